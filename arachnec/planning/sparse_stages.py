"""Sparse stages: which attentions of a traced stage can select keys, and what a plan makes of them in numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from arachnec.cost.sparse_attention import ATTENDS, divided, given_divisions, head_weights
from arachnec.ir.head_density import (
    ByLength,
    LayerDensity,
    density_rows,
    latest_densities,
    length_class,
    measured_densities,
    sparse_layers,
    sparse_stages,
)
from arachnec.ir.nodes import Cascade, Graph, GraphOp, Module, Stage, TensorType, formula, integer, integers
from arachnec.ir.stage_sizes import count_in, formula_in, gib, layers_of, squared
from arachnec.ir.state_placement import PREDICTOR_BYTES
from arachnec.ir.values import Formula, Quantity, Symbol, Term
from arachnec.sparsity.head_shares import imbalance

ATTENTION = "aten.scaled_dot_product_attention.default"
SOFTMAXES = ("aten.softmax.int", "aten._softmax.default")
TERA, GIB = 10**12, 2**30
FROZEN_BYTES = 4  # of one that only predicts
JOINED_OUTSIDE = "the model joins captions to the tokens outside its blocks"
NOT_ONE_GRAPH = {  # by the stage's ``graphs``: none is there when the run gives layers their predictors
    "shapes": "its blocks have a graph for each clip shape",
    "none": "its blocks run as they are written, without a graph",
}
NOT_READ = "the work of its blocks was measured on whole clips, not read from their graphs"
DENSE_FORM = "is written as products and a softmax, not as one attention"


@dataclass(frozen=True)
class Choice:
    """How keys are chosen: tokens of a query group, a key block and a scored cell, and the predictor's rank."""

    group: int
    block: int
    cell: int
    rank: int
    mass: float
    division: str
    moved: float  # FLOPs that take as long as putting a feature of a token in its place, forward and backward
    overhead: float  # ms of prediction and choice of one layer that no size of the clip changes
    speed: tuple[float, float, float]
    # Of learning: FLOPs of dense attention in that time, for a pair of tokens and a token's feature of a head, and ms.
    learning: tuple[float, ...] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ClassAttention:
    """The one attention over video tokens of a block class: its heads and their size; and the captions among its keys,
    so many tokens for each text token, and beside these."""

    heads: int
    size: int
    captions: tuple[int, int] = field(default=(0, 0), compare=False)


def sparse_stage(
    stage: Stage,
    graphs: Sequence[Graph],
    densities: Mapping[int, ByLength] | float,
    choice: Choice,
    lacking: str = "is not in the sparsity file",
) -> Stage:
    """The stage with densities for the layers that can be sparse, and with reasons why other attentions are dense.

    ``densities`` by layer, or one for all heads; a layer without ``lacking`` says why it has none.

    An attention is found by its lengths: queries and keys both grow with the clip's tokens. What it attends to is
    followed by symbol, never by size. All others stay dense, each with its reason.
    """
    blocks = block_names(stage)
    known = {graph.name: graph for graph in graphs}
    attentions, reasons = _attentions_by_class(stage, blocks, known)
    layers = {}
    for number, kind in enumerate(layer_classes(stage, blocks)):
        attention = attentions.get(kind)
        if attention is None:
            continue
        heads = attention.heads
        own = ByLength((densities,) * heads) if isinstance(densities, float) else densities.get(number)
        if own is None:
            reasons.append((blocks[kind], f"layer {number} {lacking}"))
        elif (share := pair_share(stage, kind)) > 0:
            layers[number] = LayerDensity.of(share, own)
        else:
            reasons.append((blocks[kind], f"layer {number} computes no pairs of tokens"))
    dense = tuple(dict.fromkeys(reasons))
    if not layers:
        return replace(stage, attrs=stage.attrs.updated(dense=dense or None))
    attention = next(iter(attentions.values()))
    captions = tuple(map(max, zip(*(of_class.captions for of_class in attentions.values()), strict=True)))
    predictors = 2 * attention.heads * attention.size * choice.rank * len(layers)
    parameter = PREDICTOR_BYTES if stage.trained else FROZEN_BYTES
    state = Quantity(gib(stage.attrs.get("state")) + parameter * predictors / GIB, "GiB")
    return replace(
        stage,
        attrs=stage.attrs.updated(
            state=state,
            density=density_rows(layers),
            dense=dense or None,
            query_group=choice.group,
            key_block=choice.block,
            caption_tokens=captions if any(captions) else None,
            mass=choice.mass,
            predictor_rank=choice.rank,
            predictors=predictors,
            division=choice.division,
            choice=choice_flops(attention, choice),
            choice_overhead=Quantity(choice.overhead, "ms"),
            sparse_speed=choice.speed,
            learning=learning_flops(attention, choice) if stage.trained else None,
            learning_overhead=Quantity(choice.learning[2], "ms") if stage.trained and choice.learning[2] else None,
        ),
    )


def attentions_of(stage: Stage, graphs: Sequence[Graph]) -> Mapping[int, tuple[ClassAttention, float]]:
    """For every layer that can be sparse its attention, and its share of the stage's pairs of tokens."""
    blocks = block_names(stage)
    attentions, _ = _attentions_by_class(stage, blocks, {graph.name: graph for graph in graphs})
    kinds = enumerate(layer_classes(stage, blocks))
    return {number: (attentions[kind], pair_share(stage, kind)) for number, kind in kinds if kind in attentions}


def choice_flops(attention: ClassAttention, choice: Choice) -> Formula:
    """TFLOP of prediction and choice of one layer: means over cells, two projections, cells scored with cells; and
    what takes as long as putting tokens in order and gathering keys."""
    heads, size, rank, cell = attention.heads, attention.size, choice.rank, choice.cell
    linear = 2 * heads * size + 4 * heads * size * rank / cell + heads * size * choice.moved
    square = 2 * heads * rank / cell**2
    pairs = Term(square / TERA, (("B", 1), ("S", 2)))
    return Formula((pairs, Term(linear / TERA, (("B", 1), ("S", 1)))), "TFLOP")


def learning_flops(attention: ClassAttention, choice: Choice) -> Formula | None:
    """TFLOP of dense attention in the time in which one layer's predictor learns and is measured; None for none."""
    of_pair, of_feature, _ = choice.learning
    heads, size = attention.heads, attention.size
    terms = [
        Term(heads * of_pair / TERA, (("B", 1), ("S", 2))),
        Term(heads * size * of_feature / TERA, (("B", 1), ("S", 1))),
    ]
    counted = tuple(term for term in terms if term.coefficient)
    return Formula(counted, "TFLOP") if counted else None


def block_names(stage: Stage) -> tuple[str, ...]:
    """The stage's block classes, in their order."""
    blocks = stage.attrs.get("blocks", ())
    assert isinstance(blocks, tuple)
    return tuple(pair[0].name for pair in blocks if isinstance(pair, tuple) and isinstance(pair[0], Symbol))


def layer_classes(stage: Stage, blocks: Sequence[str]) -> tuple[int, ...]:
    """The block class of every layer; of a stage that does not say it, of one class alone."""
    if "classes" in stage.attrs:
        return integers(stage.attrs["classes"])
    return (0,) * len(layers_of(stage)) if len(blocks) == 1 else ()


def pair_share(stage: Stage, kind: int) -> float:
    """The share of the stage's pairs of tokens that a layer of this class computes."""
    every, blocks = squared(formula_in(stage, "flops")), stage.attrs.get("block_flops")
    if isinstance(blocks, tuple) and every:
        return squared(formula(blocks[kind])) / every
    return 1 / max(1, count_in(stage, "attentions"))


def _attentions_by_class(
    stage: Stage, blocks: Sequence[str], graphs: Mapping[str, Graph]
) -> tuple[dict[int, ClassAttention], list[tuple[str, str]]]:
    """For every block class that can be sparse its attention, and why others are dense: attention, reason."""
    attentions: dict[int, ClassAttention] = {}
    reasons: list[tuple[str, str]] = []
    reason = NOT_ONE_GRAPH.get(str(stage.attrs.get("graphs"))) or (None if blocks else NOT_READ)
    if reason is not None:
        return {}, [(name, reason) for name in blocks or (stage.name,)]
    for kind, name in enumerate(blocks):
        of_class, why = _in_graph(graphs[name], stage) if name in graphs else _recorded(stage, kind)
        reasons += [(f"{name}/{op}" if op else name, reason) for op, reason in why]
        if len(of_class) > 1:
            reasons.append((name, "has several attentions over the clip's tokens"))
        elif of_class and attentions and of_class[0] != next(iter(attentions.values())):
            reasons.append((name, "has heads of another number or size than the first blocks"))
        elif of_class:
            attentions[kind] = of_class[0]
    return attentions, reasons


def _captioned(stage: Stage) -> bool:
    return stage.attrs.get("captioned") is True


def _recorded(stage: Stage, kind: int) -> tuple[list[ClassAttention], list[tuple[str, str]]]:
    """Without graphs: as many attentions over tokens as the tracer counted in the class."""
    counts = stage.attrs.get("block_attentions")
    count = integers(counts)[kind] if counts is not None else 1 if "attentions" in stage.attrs else 0
    heads, hidden = count_in(stage, "heads"), count_in(stage, "hidden")
    # Whether captions are joined to the keys is not known here: more are counted, never less.
    known = [ClassAttention(heads, hidden // heads, (1, 0))] * count if heads and hidden else []
    return ([], [("", JOINED_OUTSIDE)]) if known and _captioned(stage) else (known, [])


def _in_graph(graph: Graph, stage: Stage) -> tuple[list[ClassAttention], list[tuple[str, str]]]:
    """The attentions over the clip's tokens, and for each other one its name and why it is dense."""
    types: dict[str, TensorType | None] = {item.name: item.type for item in graph.inputs}
    types |= {op.name: op.type for op in graph.ops}
    tokens = _tokens(graph, types)
    attentions, reasons = [], []
    for op in graph.ops:
        if (
            op.target in SOFTMAXES
            and op.type is not None
            and len(op.type.dims) > 1
            and all(map(_grows, op.type.dims[-2:]))
        ):
            reasons.append((op.name, DENSE_FORM))
        if op.target != ATTENTION:
            continue
        shapes = [types.get(operand) for operand in op.operands[:3]]
        why = next(_reasons(op, shapes, stage, tokens), None)
        query = shapes[0]
        if why is not None:
            reasons.append((op.name, why))
        elif query is not None:
            heads, size = query.dims[-3], query.dims[-1]
            assert isinstance(heads, int) and isinstance(size, int)
            attentions.append(ClassAttention(heads, size, _captions(shapes[1].dims[-2] if shapes[1] else 0)))
    return attentions, reasons


def _tokens(graph: Graph, types: Mapping[str, TensorType | None]) -> str | None:
    """The length of the sequence that a run shares out over ranks: of the first input that the block passes on, as
    ``spmd.inputs`` finds it. None where no input has the clip's tokens as a dimension of their own."""
    of_inputs = [item.type.dims for item in graph.inputs]
    known = [(dims, own) for dims in of_inputs if len(own := [size for size in dims if _grows(size)]) == 1]
    with_tokens = [(dims, str(own[0])) for dims, own in known if "S" in _terms(own[0])]
    passed_on = [kind.dims for name in graph.outputs if (kind := types.get(name)) is not None]
    handed = (tokens for dims, tokens in with_tokens if dims in passed_on)
    wide = (tokens for dims, tokens in with_tokens if len(dims) > 2)
    return next(handed, None) or next(wide, None)


def _reasons(op: GraphOp, shapes: Sequence[TensorType | None], stage: Stage, tokens: str | None) -> Iterator[str]:
    """Why an attention cannot be sparse, in a block of so many ``tokens``; nothing where it can."""
    if len(shapes) < 3 or any(shape is None or len(shape.dims) < 4 for shape in shapes):
        yield "has no dimensions of batch, heads, tokens and features"
        return
    query, key, value = (shape.dims for shape in shapes if shape is not None)
    if not _grows(key[-2]):
        yield f"its keys are no tokens of the clip: {key[-2]}"
    elif not _grows(query[-2]):
        yield f"its queries are no tokens of the clip: {query[-2]}"
    elif any(map(_grows, (*query[:-2], *key[:-2]))):
        yield "every token attends to a part of the clip only"
    elif tokens is None:
        yield "no input of its block has the clip's tokens as a dimension of their own"
    elif tokens != "S" or _captioned(stage):
        yield JOINED_OUTSIDE
    elif sorted(_terms(query[-2])) != sorted(_terms(key[-2])):
        yield f"its queries are not the tokens and captions that its keys are: {query[-2]} and {key[-2]}"
    elif query[-3] != key[-3] or not isinstance(query[-3], int) or not isinstance(query[-1], int):
        yield "its heads share keys"
    elif value[-1] != query[-1]:
        yield "its values have another size than its keys"
    elif op.attrs.get("is_causal") is True:
        yield "it is causal"
    elif count_in(stage, "heads") not in (0, query[-3]):
        yield f"it has {query[-3]} heads, and others of the stage {count_in(stage, 'heads')}"


def _captions(length: int | str) -> tuple[int, int]:
    """Of the length of a sequence with a clip's tokens, as ``S + 2*T + 1``, what is not S."""
    terms = _terms(length)
    of_text = sum(int(term.removesuffix("T").removesuffix("*") or 1) for term in terms if term.endswith("T"))
    return of_text, sum(int(term) for term in terms if term.isdigit())


def _terms(size: int | str) -> list[str]:
    return str(size).replace(" ", "").split("+")


def _grows(size: int | str) -> bool:
    """Whether a dimension grows with the tokens of a clip."""
    return isinstance(size, str) and re.search(r"\bS\b", size) is not None


@dataclass(frozen=True)
class SparseSummary:
    """Of one stage and its cascades."""

    stage: Stage
    layers: int  # of the stage, all
    sparse: int  # that have densities
    density: float  # mean over heads and sparse layers, predicted, for clips of all lengths
    least: float
    most: float
    classes: Mapping[int, float]  # the same mean for the classes of length of its cascades, where some differ
    chosen: tuple[Cascade, ...]  # cascades that run some layer sparse
    dense: tuple[Cascade, ...]  # those that run none
    measured: int | None  # layers that were sparse in a run when this was planned; None for a plan before any run
    imbalance: float  # the heaviest rank's heads over the mean, the worst layer of all cascades; 1 without ranks


def sparse_summaries(module: Module) -> tuple[SparseSummary, ...]:
    """Of the stages with densities, in the order of the module."""
    summaries = []
    for stage in module.stages:
        table = latest_densities(stage)
        if not table:
            continue
        heads = [density for layer in table.values() for density in layer.heads]
        own = [x for layer in table.values() for _, densities in layer.classes for x in densities]
        cascades = [c for c in module.cascades if c.stage == stage.name and c.phase in ATTENDS]
        worst = max((worst_imbalance(cascade, stage) for cascade in distinct_divisions(cascades)), default=1.0)
        summaries.append(
            SparseSummary(
                stage,
                len(layers_of(stage)),
                len(table),
                math.fsum(heads) / len(heads),
                min([*heads, *own]),
                max([*heads, *own]),
                _by_class(cascades, table) if own else {},
                tuple(cascade for cascade in cascades if sparse_layers(cascade)),
                tuple(cascade for cascade in cascades if not sparse_layers(cascade)),
                None if (now := measured_densities(stage)) is None else len(now),
                worst,
            )
        )
    return tuple(summaries)


def _by_class(cascades: Iterable[Cascade], table: Mapping[int, LayerDensity]) -> Mapping[int, float]:
    lengths = sorted({length_class(cascade.tokens) for cascade in cascades if sparse_layers(cascade)})
    heads = {length: [x for layer in table.values() for x in layer.at(length).heads] for length in lengths}
    return {length: math.fsum(own) / len(own) for length, own in heads.items()}


@dataclass(frozen=True)
class Forecast:
    """Of one layer, the heaviest rank's heads over the mean, in the cascade where that is most: as planned, as it is
    with measured densities, and as it would be had they been known. 1 without ranks."""

    planned: float
    measured: float
    known: float


def forecasts(module: Module, measured: Mapping[int, ByLength]) -> Mapping[int, Forecast]:
    """By layer of the model with ``measured`` densities by head."""
    rows = {}
    for first, stage in sparse_stages(module).items():
        cascades = [c for c in module.cascades if c.stage == stage.name and "heads" in c.attrs]
        divided_alike = list(distinct_divisions(cascades))
        for layer, planned in latest_densities(stage).items():
            if first + layer in measured:
                now = LayerDensity.of(planned.share, measured[first + layer])
                rows[first + layer] = _forecast(stage, divided_alike, layer, planned, now)
    return rows


def _forecast(
    stage: Stage, cascades: Sequence[Cascade], layer: int, planned: LayerDensity, now: LayerDensity
) -> Forecast:
    """Of one layer of a stage; ``cascades`` are those with its distinct divisions of heads."""
    worst = Forecast(1.0, 1.0, 1.0)
    for cascade in cascades:
        division, groups = given_divisions(cascade).get(layer), integer(cascade.attrs["groups"])
        if division is None:
            continue
        assumed, own = planned.at(cascade.tokens), now.at(cascade.tokens)
        weights = head_weights(stage, own)
        ratio = imbalance(division, weights, groups)
        if ratio >= worst.measured:
            of_plan = imbalance(division, head_weights(stage, assumed), groups)
            best = imbalance(divided(stage, own, groups, cascade.degree), weights, groups)
            worst = Forecast(of_plan, ratio, best)
    return worst


def distinct_divisions(cascades: Sequence[Cascade]) -> Iterator[Cascade]:
    """One cascade for every division of heads in every class of length."""
    divided_ones = (cascade for cascade in cascades if "heads" in cascade.attrs)
    yield from {(c.attrs["heads"], length_class(c.tokens)): c for c in divided_ones}.values()


def worst_imbalance(cascade: Cascade, stage: Stage) -> float:
    """The heaviest rank's heads over the mean, in the layer where that is most; 1 for a cascade without ``heads``."""
    table, groups = latest_densities(stage), integer(cascade.attrs.get("groups", 1))
    divisions = given_divisions(cascade).items()
    own = {layer: head_weights(stage, table[layer].at(cascade.tokens)) for layer, _ in divisions}
    ratios = [imbalance(division, own[layer], groups) for layer, division in divisions]
    return max(ratios, default=1.0)
