"""Read a profile in the format of PipeDream and DAPPLE: a model's layers as a graph, with times and sizes.

A line for every node, ``nodeN -- name -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes,
parameter_size=bytes``, then one for every edge, which begins with a tab: ``nodeA -- nodeB``, A being read by B.

Times are in ms and sizes in bytes, at the batch size of the profile. The file is data from a stranger: it is bounded,
and everything that is wrong with it is an error with its line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from arachnec.ir.diagnostic import Mistake, Span, UserError, user_error
from arachnec.ir.limits import LARGEST, LARGEST_PROFILE, LONGEST_LINE, MOST_EDGES, MOST_LAYERS

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"(node\w{1,40}) -- (.*?) -- (\w+=.*)")
_EDGE = re.compile(r"\s+(node\w{1,40}) -- (node\w{1,40})\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """Times in ms, sizes in bytes, of one batch of the profile."""

    name: str
    forward: float
    backward: float
    activation: float
    parameters: float


@dataclass(frozen=True)
class LayerProfile:
    """Layers in an order in which each comes behind all that it reads; ``cuts[c]`` is what crosses behind layer c.

    What crosses is the activation of every layer before the cut that one behind it reads. Inputs of the model, which
    read nothing themselves, are given to every stage and cross no cut.
    """

    layers: tuple[Layer, ...]
    cuts: tuple[float, ...]


def read_profile_file(path: Path) -> LayerProfile:
    """``read_profile`` of a file. UserError where it is missing, larger than any profile, or no text."""
    if not path.is_file():
        raise user_error(
            f"there is no profile {path}",
            help="give the path of a file with a line for every layer, in DAPPLE's format",
        )
    if path.stat().st_size > LARGEST_PROFILE:
        raise _too_many_layers(None)
    try:
        return read_profile(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise user_error(f"{path} is no text", help="give a profile in DAPPLE's format, in UTF-8") from None


def read_profile(text: str, file: str) -> LayerProfile:
    """UserError for lines, numbers and graphs that are no profile."""
    rows = text.split("\n", MOST_LAYERS + MOST_EDGES)
    if (
        sum(1 for row in rows if row[:1] not in ("", "\t", " ", "\r")) > MOST_LAYERS
        or len(rows) > MOST_LAYERS + MOST_EDGES
    ):
        raise _too_many_layers(Span(file, MOST_LAYERS + 1, 1, MOST_LAYERS + 1, 2))
    nodes: dict[str, Layer] = {}
    edges: list[tuple[str, str, Span]] = []
    wrong: list[Mistake] = []
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        span = Span(file, number, 1, number, len(row) + 1, text)
        node, edge = (None, None) if len(row) > LONGEST_LINE else (_NODE.fullmatch(row.rstrip()), _EDGE.fullmatch(row))
        if edge is not None:
            edges.append((edge[1], edge[2], span))
        elif node is None:
            wrong.append(_bad_line(span))
        elif node[1] in nodes:
            title, remedy = f"`{node[1]}` stands twice in the profile", "give every node a name of its own"
            wrong.append(Mistake(span, title, label="stands before", help=remedy))
        else:
            layer = _layer(node[2], node[3], span)
            if isinstance(layer, Mistake):
                wrong.append(layer)
            else:
                nodes[node[1]] = layer
    if not wrong:
        wrong += [
            Mistake(
                span,
                f"an edge names `{end}`, which is no node of the profile",
                label="no such node",
                help=f"add a line for `{end}`, or remove the edge",
            )
            for *ends, span in edges
            for end in ends
            if end not in nodes
        ]
    if not (wrong or nodes):
        remedy = "give one line for every layer, then one for every edge"
        wrong.append(Mistake(Span(file, 1, 1, 1, 2, text), "the profile has no layer", help=remedy))
    if wrong:
        raise UserError(*wrong)
    return _ordered(nodes, edges)


def _too_many_layers(span: Span | None) -> UserError:
    return user_error(
        f"the profile has more than {MOST_LAYERS} layers or {MOST_EDGES} edges",
        help="profile blocks, not operations: a plan cuts between blocks",
        span=span,
    )


def _bad_line(span: Span) -> Mistake:
    return Mistake(
        span,
        "no node and no edge of a profile",
        label="cannot be read",
        help="write `node1 -- name -- forward_compute_time=1, backward_compute_time=2, activation_size=8, "
        "parameter_size=8`, or a tab and `node1 -- node2`",
    )


def _layer(name: str, fields: str, span: Span) -> Layer | Mistake:
    """One node's numbers, or what is wrong with them. A size may be a list, ``[16; 32]``: it is summed."""
    given: dict[str, str] = {}
    for field in fields.split(","):
        key, _, value = field.partition("=")
        given[key.strip()] = value.strip()
    if set(given) != set(FIELDS) or fields.count(",") + 1 != len(FIELDS):
        return _bad_line(span)
    numbers = []
    for key in FIELDS:
        words = given[key].removeprefix("[").removesuffix("]").split(";")
        reason = _no_size(words)
        if reason:
            title = f"`{key}` is `{given[key][:40]}`: {reason}"
            remedy = f"give `{key}` as a number of at least 0 and no more than {LARGEST:g}"
            return Mistake(span, title, label=reason, help=f"{remedy}, times in ms and sizes in bytes")
        numbers.append(sum(map(float, words)))
    return Layer(name, *numbers)


def _no_size(words: list[str]) -> str:
    """Why the sum of these numbers is none that a profile has; empty where it is."""
    if not all(_NUMBER.fullmatch(word.strip()) for word in words):
        return "no number"
    numbers = [float(word) for word in words]
    if not math.isfinite(sum(numbers)):
        return "not finite"
    if min(numbers) < 0:
        return "negative"
    return f"above {LARGEST:g}" if sum(numbers) > LARGEST else ""


def _ordered(nodes: dict[str, Layer], edges: list[tuple[str, str, Span]]) -> LayerProfile:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((a, b) for a, b, _ in edges)
    place = {name: k for k, name in enumerate(nodes)}
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [a for a, _ in nx.find_cycle(graph)]
        span = next(span for a, b, span in edges if a == cycle[-1] and b == cycle[0])
        raise user_error(
            f"the layers of the profile read each other in a cycle: {' -- '.join([*cycle[:8], cycle[0]])}",
            label="closes the cycle",
            help="remove one of these edges: what comes later cannot be read before",
            span=span,
        ) from None
    at = {name: k for k, name in enumerate(order)}
    cuts = [0.0] * (len(order) - 1)
    for name in order:
        readers = [at[reader] for reader in graph.successors(name)]
        if readers and graph.in_degree(name):
            for cut in range(at[name], max(readers)):
                cuts[cut] += nodes[name].activation
    return LayerProfile(tuple(nodes[name] for name in order), tuple(cuts))
