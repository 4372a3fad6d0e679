"""Rule 5, of stages whose parameters are dealt out over cells: no layer is read where it is not whole.

Every layer that a forward or backward reads is gathered by it or still whole, and none is at the end of a step, whose
update changes the shards. All members of a cell gather, release
and reduce-scatter the same layers in the same order. They are all in the cascade, so these collectives are parts of an
event at which they meet anyway: the rule on deadlocks, which orders those events, holds for them as well.

Of a split backward the second half, which has all gradients of a layer, reduce-scatters them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.stage_ranks import resident_ranks
from arachnec.analysis.uses import Values, rank_list, split_backwards, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.nodes import Instruction, Program, Stage, integers
from arachnec.ir.parameter_cells import cell_of, last_layer, layer_sizes, own_cell, replicas

OPS = ("forward", "backward", "weight")
LISTS = ("gather", "release", "scatter", "held")


@dataclass(frozen=True)
class NotGathered(Diagnostic):
    title = "rank {rank} has `{instruction}`, and layer {layer} of @{stage} is not whole there"
    label = "reads layer {layer}"
    help = "name layer {layer} in its `gather`, or release it later"
    rank: int
    instruction: str
    layer: int
    stage: str


@dataclass(frozen=True)
class GatheredTwice(Diagnostic):
    title = "rank {rank} has `{instruction}` gather layer {layer} of @{stage}, which is whole already"
    label = "gathers layer {layer} again"
    help = "release layer {layer} where it was read last, or do not gather it here"
    rank: int
    instruction: str
    layer: int
    stage: str


def not_releasable_error(span: Span | None, rank: int, instruction: str, layer: int, stage: str) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} has `{instruction}` release layer {layer} of @{stage}, which is not whole there",
        label=f"releases layer {layer}",
        help="a layer is released once after each gather",
    )


@dataclass(frozen=True)
class NotReleased(Diagnostic):
    title = "rank {rank} ends its step with layer {layer} of @{stage} whole, since `{instruction}`"
    label = "layer {layer} is not released"
    help = "release layer {layer} where it was read last: the next step would read it as it was before"
    rank: int
    instruction: str
    layer: int
    stage: str


@dataclass(frozen=True)
class UnequalGathers(Diagnostic):
    title = (
        "ranks {rank} and {other} are one cell of @{stage} and gather differently: `{instruction}` has {what} = "
        "{found}, and {expected} on rank {rank}"
    )
    label = "other layers, or another order"
    help = "the members of a cell gather, release and reduce-scatter the same layers in the same order"
    rank: int
    other: int
    stage: str
    instruction: str
    what: str
    found: str
    expected: str


def not_the_cell_error(span: Span | None, rank: int, instruction: str, reason: str, stage: str, cell: str) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} has `{instruction}` with {reason}",
        label=reason,
        help=f"its parameters of @{stage} are dealt out over ranks {cell}: write `cell = {cell}`",
    )


@dataclass(frozen=True)
class NotScattered(Diagnostic):
    title = "rank {rank} has `{instruction}`, and the gradients of layer {layer} of @{stage} {reason}"
    label = "layer {layer}"
    help = (
        "each backward reduce-scatters every layer that trains, once, where it is split its `weight` does: name it in "
        "`scatter`"
    )
    rank: int
    instruction: str
    layer: int
    stage: str
    reason: str


@dataclass(frozen=True)
class _Sharded:
    """What is known of a stage that is dealt out."""

    stage: Stage
    cell: int
    layers: int  # the last one included
    trained: frozenset[int]


Steps: TypeAlias = list[tuple[Instruction, _Sharded]]


def check_gathers(values: Values) -> Iterator[Diagnostic]:
    sharded = {stage.name: _sharded(stage, size) for stage in values.module.stages if (size := cell_of(stage))}
    if not sharded:
        return
    split = split_backwards(values.module)
    holders = {name: _ranks_of(values, name) for name in sharded}
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Steps]] = {}
    for program in values.module.programs:
        steps = [(step, sharded[name]) for step, name in _of_stages(values, program) if name in sharded]
        yield from _whole(program, steps, split)
        yield from _groups(program, steps, holders)
        for one in sharded.values():
            mine = [pair for pair in steps if pair[1] is one and pair[0].op in OPS]
            cell = one.stage.name, own_cell(program.rank, one.cell)
            rank, other = first.setdefault(cell, (program.rank, mine))
            yield from _alike(rank, other, program, mine)


def _sharded(stage: Stage, cell: int) -> _Sharded:
    sizes = layer_sizes(stage)
    trained = frozenset(number for number, size in enumerate(sizes) if size.trained)
    return _Sharded(stage, cell, last_layer(stage) + 1, trained)


def _of_stages(values: Values, program: Program) -> Iterator[tuple[Instruction, str]]:
    for step in program.instructions:
        if step.op == "reduce" and "tied" not in step.attrs:
            yield step, step.target
        elif step.op in OPS:
            yield step, values.cascades[step.target].stage


def _whole(program: Program, steps: Steps, split: Set[str]) -> Iterator[Diagnostic]:
    """Follows which layers are whole on one rank. ``split`` are backwards that leave their weight gradients."""
    whole: dict[str, dict[int, Instruction]] = {}  # with what gathered them
    for step, one in steps:
        if step.op not in OPS:
            continue
        name, where = one.stage.name, (step.span, program.rank, written(step))
        here = whole.setdefault(name, {})
        for layer in layers_listed(step, "gather"):
            if layer in here:
                yield GatheredTwice(*where, layer, name)
            here[layer] = step
        for layer in range(one.layers) if step.op != "weight" else ():  # which reads no parameter
            if layer not in here:
                yield NotGathered(*where, layer, name)
                here[layer] = step  # one message for one mistake
        for layer in layers_listed(step, "release"):
            if layer not in here:
                yield not_releasable_error(*where, layer, name)
            here.pop(layer, None)
        if step.op in ("backward", "weight"):
            counts = Counter(layers_listed(step, "scatter"))
            trained = frozenset[int]() if step.target in split else one.trained
            for layer in range(one.layers):
                if counts[layer] != (layer in trained):
                    times = f"are reduce-scattered {counts[layer]} times"
                    reason = times if counts[layer] else "are not reduce-scattered"
                    yield NotScattered(*where, layer, name, reason)
    for name, left in whole.items():
        for layer, step in left.items():
            yield NotReleased(step.span, program.rank, written(step), layer, name)


def _groups(program: Program, steps: Steps, holders: Mapping[str, tuple[int, ...]]) -> Iterator[Diagnostic]:
    """Every instruction names the rank's cell, runs on whole cells, and all-reduces shards over the ``holders`` of its
    stage that have them."""
    for step, one in steps:
        cell = own_cell(program.rank, one.cell)
        name, stated = one.stage.name, integers(step.attrs.get("cell", ()))
        if stated != cell:
            reason = f"cell {rank_list(stated)}" if stated else "no cell"
            yield not_the_cell_error(step.span, program.rank, written(step), reason, name, rank_list(cell))
        elif step.op in OPS and not set(cell) <= set(step.peers):
            reason = "members of its cell missing"
            yield not_the_cell_error(step.span, program.rank, written(step), reason, name, rank_list(cell))
        elif step.op == "reduce":
            ranks = replicas(program.rank % one.cell, one.cell, holders[name])
            if step.peers != ranks:
                ranks_text = rank_list(ranks)
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}`, and its shard of @{name} lies on ranks {ranks_text}",
                    label="not the ranks that hold this shard",
                    help=f"shards are all-reduced between cells: write `on {ranks_text}`",
                )


def _ranks_of(values: Values, stage: str) -> tuple[int, ...]:
    """The ranks that hold a stage."""
    module = values.module
    assert module.cluster is not None
    return tuple(sorted(resident_ranks(module, module.cluster, module.stage(stage))))


def _alike(rank: int, expected: Steps, program: Program, steps: Steps) -> Iterator[Diagnostic]:
    """The first difference between two members of a cell."""
    for (a, one), (b, _) in zip(expected, steps, strict=False):
        if a is b:
            continue
        for word in LISTS:
            if a.attrs.get(word) != b.attrs.get(word):
                texts = (_text(step.attrs, word) for step in (b, a))
                yield UnequalGathers(b.span, rank, program.rank, one.stage.name, written(b), word, *texts)
                return


def _text(attrs: Mapping[str, object], word: str) -> str:
    value = attrs.get(word)
    return rank_list(value) if isinstance(value, tuple) else "nothing" if value is None else str(value)
