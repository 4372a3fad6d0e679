"""Rules 4 and 5, of what is dealt out over ranks: state is held, and layers are whole and updated when read.

Every layer that a forward or backward reads is gathered by it or still whole, and none is at the end of a step, whose
update changes the shards. All members of a cell gather, release and reduce-scatter the same layers in the same order.
They are all in the cascade, so these collectives are parts of an event at which they meet anyway: the rule on
deadlocks, which orders those events, holds for them as well. Of a split backward the second half, which has all
gradients of a layer, reduce-scatters them.

Where the optimizer is dealt out, a rank has updated its part of every parameter in the step before. Its program gathers
each layer once, before the first forward that reads it, in the order of all ranks of the stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.memory import state_of
from arachnec.analysis.stage_ranks import resident_gib, resident_ranks
from arachnec.analysis.uses import Values, rank_list, split_backwards, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.nodes import Instruction, Program, Stage, integer, integers
from arachnec.ir.parameter_cells import cell_of, last_layer, layer_sizes, own_cell, replicas, updated_layers

OPS = ("forward", "backward", "weight")
COMPARED = ("gather", "release", "scatter", "held")


def not_the_cell_error(span: Span | None, rank: int, instruction: str, reason: str, stage: str, cell: str) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} has `{instruction}` with {reason}",
        kind="not the cell",
        label=reason,
        help=f"its parameters of @{stage} are dealt out over ranks {cell}: write `cell = {cell}`",
    )


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
        name = one.stage.name
        here = whole.setdefault(name, {})
        for layer in layers_listed(step, "gather"):
            if layer in here:
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}` gather layer {layer} of @{name}, which is whole "
                    "already",
                    kind="gathered twice",
                    label=f"gathers layer {layer} again",
                    help=f"release layer {layer} where it was read last, or do not gather it here",
                )
            here[layer] = step
        for layer in range(one.layers) if step.op != "weight" else ():  # which reads no parameter
            if layer not in here:
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}`, and layer {layer} of @{name} is not whole there",
                    kind="not gathered",
                    label=f"reads layer {layer}",
                    help=f"name layer {layer} in its `gather`, or release it later",
                )
                here[layer] = step  # one message for one mistake
        for layer in layers_listed(step, "release"):
            if layer not in here:
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}` release layer {layer} of @{name}, which is not whole "
                    "there",
                    kind="released twice",
                    label=f"releases layer {layer}",
                    help="a layer is released once after each gather",
                )
            here.pop(layer, None)
        if step.op in ("backward", "weight"):
            counts = Counter(layers_listed(step, "scatter"))
            trained = frozenset[int]() if step.target in split else one.trained
            for layer in range(one.layers):
                if counts[layer] != (layer in trained):
                    times = f"are reduce-scattered {counts[layer]} times"
                    reason = times if counts[layer] else "are not reduce-scattered"
                    yield Mistake(
                        step.span,
                        f"rank {program.rank} has `{written(step)}`, and the gradients of layer {layer} of "
                        f"@{name} {reason}",
                        kind="not scattered",
                        label=f"layer {layer}",
                        help=(
                            "each backward reduce-scatters every layer that trains, once, where it is split its "
                            "`weight` does: name it in `scatter`"
                        ),
                    )
    for name, left in whole.items():
        for layer, step in left.items():
            yield Mistake(
                step.span,
                f"rank {program.rank} ends its step with layer {layer} of @{name} whole, since `{written(step)}`",
                kind="not released",
                label=f"layer {layer} is not released",
                help=f"release layer {layer} where it was read last: the next step would read it as it was before",
            )


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
                holding = rank_list(ranks)
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}`, and its shard of @{name} lies on ranks {holding}",
                    kind="other shard",
                    label="not the ranks that hold this shard",
                    help=f"shards are all-reduced between cells: write `on {holding}`",
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
        for word in COMPARED:
            if a.attrs.get(word) != b.attrs.get(word):
                found, right = (_text(step.attrs, word) for step in (b, a))
                yield Mistake(
                    b.span,
                    f"ranks {rank} and {program.rank} are one cell of @{one.stage.name} and gather differently: "
                    f"`{written(b)}` has {word} = {found}, and {right} on rank {rank}",
                    kind="unequal gathers",
                    label="other layers, or another order",
                    help="the members of a cell gather, release and reduce-scatter the same layers in the same order",
                )
                return


def _text(attrs: Mapping[str, object], word: str) -> str:
    value = attrs.get(word)
    return rank_list(value) if isinstance(value, tuple) else "nothing" if value is None else str(value)


READING = ("forward", "backward", "weight")


def check_updated_parameters(values: Values) -> Iterator[Diagnostic]:
    places = _places(values)
    layers = {
        stage.name: updated_layers(stage) for stage in values.module.stages if len(places.get(stage.name, ())) > 1
    }
    for program in values.module.programs:
        # the ranks that hold what this one holds of a stage: one in each cell, or all of its place
        own = {
            stage.name: replicas(program.rank, cell_of(stage) or 1, places[stage.name])
            for stage in values.module.stages
            if stage.name in places
        }
        yield from _gathers_named(program, own, layers)
        for stage in values.module.stages:
            if program.rank in own.get(stage.name, ()) and layers.get(stage.name):
                yield from _gathered(values, program, stage, layers[stage.name], own[stage.name])


def _places(values: Values) -> dict[str, tuple[int, ...]]:
    """The ranks over which the optimizer of a stage is dealt out: those of its reduce-scatters."""
    dealt_out = {stage.name for stage in values.module.stages if "sharded" in stage.attrs}
    places: dict[str, set[int]] = defaultdict(set)
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "reduce" and step.target in dealt_out and "tied" not in step.attrs:
                places[step.target].update(step.peers)
    return {stage: tuple(sorted(ranks)) for stage, ranks in places.items()}


def _gathers_named(
    program: Program, places: Mapping[str, tuple[int, ...]], layers: Mapping[str, tuple[int, ...]]
) -> Iterator[Diagnostic]:
    """Every gather is of a dealt-out stage, over its ranks, and of layers that train."""
    for step in program.instructions:
        if step.op != "gather":
            continue
        known = layers.get(step.target, ())
        unknown = [layer for layer in layers_listed(step, "layers") if layer not in known]
        if not known:
            reason = f"every rank has updated all of @{step.target} itself"
        elif step.peers != places[step.target]:
            reason = f"ranks {rank_list(places[step.target])} have updated its parts"
        elif unknown:
            reason = f"layer {unknown[0]} is not one of those that train"
        else:
            continue
        yield Mistake(
            step.span,
            f"rank {program.rank} has `{written(step)}`, and {reason}",
            kind="wrong gather",
            label=reason,
            help=(
                "what an optimizer that is dealt out has updated of a stage is gathered over the ranks of its `reduce`"
            ),
        )


def _gathered(
    values: Values, program: Program, stage: Stage, layers: tuple[int, ...], ranks: tuple[int, ...]
) -> Iterator[Diagnostic]:
    """Each layer once, before it is read, and before the next update."""
    counts: Counter[int] = Counter()

    def wrong(step: Instruction, layer: int, reason: str) -> Diagnostic:
        return Mistake(
            step.span,
            f"rank {program.rank} has `{written(step)}`, and layer {layer} of @{stage.name} {reason}",
            kind="not updated",
            label=f"layer {layer}",
            help=(
                f"a program of each of ranks {rank_list(ranks)} gathers every layer that trains once, before the "
                f"first forward of @{stage.name}"
            ),
        )

    for step in program.instructions:
        if step.op == "gather" and step.target == stage.name:
            for layer in layers_listed(step, "layers"):
                counts[layer] += 1
                if counts[layer] == 2:
                    yield wrong(step, layer, "is gathered a second time")
        reads = step.op in READING and values.cascades[step.target].stage == stage.name
        if reads or (step.op == "step" and step.target == stage.name):
            missing = next((layer for layer in layers if not counts[layer]), None)
            if missing is not None:
                yield wrong(step, missing, "is not whole yet")
                return


# Which lists an instruction may have, and whether they may name what lies outside the blocks: one more number.
NAMED_LAYERS = {"gather": True, "release": True, "scatter": True, "offload": False, "reload": False}


def check_listed_layers(values: Values) -> Iterator[Diagnostic]:
    last = {stage.name: last_layer(stage) for stage in values.module.stages}
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "gather":
                yield from _unknown(program.rank, step, "layers", step.target, last[step.target] + 1)
            elif step.op in ("forward", "backward", "weight"):
                stage = values.cascades[step.target].stage
                for word, value in step.attrs.pairs:
                    if word in NAMED_LAYERS:
                        yield from _unknown(program.rank, step, word, stage, last[stage] + NAMED_LAYERS[word])
                    elif word == "held" and integer(value) < 1:
                        span = step.attrs.span("held") or step.span
                        held = integer(value)
                        yield Mistake(
                            span,
                            f"rank {program.rank} has `{written(step)}` with held = {held}",
                            kind="none held",
                            label=f"held = {held}",
                            help="a layer that computes is whole: write 1 or more, or leave `held` out",
                        )


def _unknown(rank: int, step: Instruction, word: str, stage: str, end: int) -> Iterator[Diagnostic]:
    """The first layer of a list from ``end`` on."""
    listed = layers_listed(step, word)
    if listed and not 0 <= min(listed) <= max(listed) < end:
        layer = next(number for number in listed if not 0 <= number < end)
        known = f"0 to {end - 1}" if end else "layers that there are: it has none"
        span = step.attrs.span(word) or step.span
        verb = word if word != "layers" else "of"
        yield Mistake(
            span,
            f"rank {rank} has `{written(step)}` {verb} layer {layer}, and @{stage} has {end} layers",
            kind="unknown layer",
            label=f"no layer {layer}",
            help=f"write numbers of {known}",
        )


TOLERANCE = 1e-6  # of a sum that was printed


def check_residency(values: Values) -> Iterator[Diagnostic]:
    module = values.module
    assert module.cluster is not None
    resident = [(stage, resident_ranks(module, module.cluster, stage)) for stage in module.stages]
    for program in module.programs:
        here = [stage for stage, ranks in resident if program.rank in ranks]
        right, claimed = resident_gib(here, "state"), state_of(program)
        if claimed < right * (1 - TOLERANCE):
            names = ", ".join(f"@{stage.name}" for stage in here)
            yield Mistake(
                program.span,
                f"program rank {program.rank} claims {claimed:.3f} GiB of state, its stages hold {right:.3f} GiB",
                kind="state too low",
                label=f"state = {claimed:.3f} GiB",
                help=f"`state` is the sum over the stages on the rank, {names}: write `state = {right:.6g} GiB`",
            )
