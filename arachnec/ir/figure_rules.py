"""Rules about figures: lists that speak of the same layers or devices are of one length, and costs are no gains.

In: a ``ModuleIndex`` whose names are right. Out: a diagnostic per mistake. Stages are cut and priced by these figures.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.ir.diagnostic import Mistake, counted
from arachnec.ir.names import ModuleIndex, label
from arachnec.ir.nodes import Stage, integer, integers
from arachnec.ir.printer import number
from arachnec.ir.stage_sizes import gib, layers_of
from arachnec.ir.values import Formula, Value

OF_CLASSES = (
    "blocks", "block_flops", "block_saved", "block_inputs", "block_shared", "block_workspace", "block_traffic",
    "block_attentions", "block_heads",
)  # fmt: skip
OF_ENDS = ("end_params", "end_flops", "end_saved", "head")  # embedding and head, or two figures of the head
OF_LAYERS = ("classes", "layer_params")
OF_BORDERS = ("cuts", "token_cuts")
OF_SOME_LAYERS = ("tied_layers", "between_params", "between_flops", "between_saved")


def every_device_has_a_network_card(index: ModuleIndex) -> Iterator[Mistake]:
    cluster = index.module.cluster
    nics = cluster.attrs.get("nics") if cluster is not None else None
    if cluster is not None and isinstance(nics, str) and len(nics) != cluster.gpus:
        yield Mistake(
            cluster.attrs.span("nics") or cluster.span,
            f"{label(cluster)} names {counted(len(nics), 'network card')} in `nics`",
            label=f"expected one letter for each of {counted(cluster.gpus, 'device')}",
            help="give devices that share a network card the same letter, or leave `nics` out",
        )


def figures_agree(index: ModuleIndex) -> Iterator[Mistake]:
    """Of every stage the first that does not."""
    for stage in index.module.stages:
        wrong = next(_figures(stage), None)
        if wrong is not None:
            name, text, expected = wrong
            yield Mistake(
                stage.attrs.span(name) or stage.span,
                f"{label(stage)} has {text} in `{name}`",
                label=f"expected {expected}",
                help="trace the model again, or leave out what `trace` says of the stage's parts",
            )


def _figures(stage: Stage) -> Iterator[tuple[str, str, str]]:
    layers = len(layers_of(stage))
    lists = {name: value for name, value in stage.attrs.pairs if isinstance(value, tuple)}
    for name in OF_ENDS:
        if len(lists.get(name, (0, 0))) != 2:
            yield name, counted(len(lists[name]), "figure"), "two"
    for name in OF_LAYERS:
        if name in lists and len(lists[name]) != layers:
            yield name, counted(len(lists[name]), "figure"), f"one for each of {counted(layers, 'layer')}"
    for name in OF_BORDERS:
        runs = [integer(row[0]) for row in lists.get(name, ()) if isinstance(row, tuple)]
        if name in lists and (sum(runs) != max(0, layers - 1) or 0 in runs):
            yield name, f"runs of {counted(sum(runs), 'layer')}", f"all but the last of {counted(layers, 'layer')}"
    for name in OF_SOME_LAYERS:
        for row in lists.get(name, ()):
            assert isinstance(row, tuple)
            named = integers(row[0]) if isinstance(row[0], tuple) else (integer(row[0]),)
            if not named or max(named) >= layers:
                yield name, f"layer {max(named)}" if named else "no layer", f"some of {counted(layers, 'layer')}"
    split, state = gib(stage.attrs.get("tensor_split")), gib(stage.attrs.get("state"))
    if split > state and "state" in stage.attrs and "tensor_parallel" not in stage.attrs:
        yield "tensor_split", f"{number(split)} GiB", f"no more than its `state`, {number(state)} GiB"
    if "classes" in lists:
        count = len(lists.get("blocks", ()))
        for name in OF_CLASSES:
            if name in lists and len(lists[name]) != count:
                yield name, counted(len(lists[name]), "figure"), f"one for each of {count} classes in `blocks`"
        used = [integers(lists["classes"]).count(kind) for kind in range(count)]
        listed = [integer(row[1]) for row in lists.get("blocks", ()) if isinstance(row, tuple)]
        if used != listed or sum(used) != layers:
            yield "classes", f"classes {sorted(set(lists['classes']), key=str)}", f"those of `blocks`, {listed} times"


def costs_are_no_gains(index: ModuleIndex) -> Iterator[Mistake]:
    """At no size of a cascade, and of no clip alone. Most formulas have no coefficient below zero."""
    module = index.module
    alone = {(1, clip.tokens, clip.text) for clip in module.clips}
    for stage in module.stages:
        doubtful = [(name, one) for name, value in stage.attrs.pairs for one in _falling(value)]
        own = {(c.batch, c.tokens, c.text) for c in module.cascades if c.stage == stage.name} if doubtful else set()
        for name, one in doubtful:
            for batch, tokens, text in sorted(alone | own):
                value = one(B=batch, S=tokens, T=text)
                if value < 0:
                    size, shape = f"{number(value)} {one.unit}", f"B = {batch}, S = {tokens}, T = {text}"
                    yield Mistake(
                        stage.attrs.span(name) or stage.span,
                        f"`{name}` of {label(stage)} comes to {size} at {shape}",
                        label="below zero",
                        help="no cascade takes less than nothing: mend the formula's coefficients",
                    )
                    break


def _falling(value: Value) -> Iterator[Formula]:
    if isinstance(value, tuple):
        for item in value:
            yield from _falling(item)
    elif isinstance(value, Formula) and any(term.coefficient < 0 for term in value.terms):
        yield value


FIGURE_RULES = (every_device_has_a_network_card, figures_agree, costs_are_no_gains)
