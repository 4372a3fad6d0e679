"""Rule 5, of stages whose optimizer is dealt out: no layer is read before all ranks' updates of it have been gathered.

A rank has updated its part of every parameter in the step before. Its program gathers each layer once, before the
first forward that reads it. All ranks of the stage gather the same layers in the same order: that is an event of the
rule on deadlocks, like any other collective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.uses import Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Program, Stage
from arachnec.ir.parameter_cells import cell_of, replicas, updated_layers

READING = ("forward", "backward", "weight")


@dataclass(frozen=True)
class NotUpdated(Diagnostic):
    title = "rank {rank} has `{instruction}`, and layer {layer} of @{stage} {reason}"
    label = "layer {layer}"
    help = (
        "a program of each of ranks {ranks} gathers every layer that trains once, before the first forward of @{stage}"
    )
    rank: int
    instruction: str
    layer: int
    stage: str
    reason: str
    ranks: str


@dataclass(frozen=True)
class WrongGather(Diagnostic):
    title = "rank {rank} has `{instruction}`, and {reason}"
    label = "{reason}"
    help = "what an optimizer that is dealt out has updated of a stage is gathered over the ranks of its `reduce`"
    rank: int
    instruction: str
    reason: str


def check_updated_parameters(values: Values) -> Iterator[Diagnostic]:
    places = _places(values)
    layers = {
        stage.name: updated_layers(stage) for stage in values.module.stages if len(places.get(stage.name, ())) > 1
    }
    for program in values.module.programs:
        own = {stage.name: _holding(stage, program.rank, places[stage.name]) for stage in _dealt_out(values, places)}
        yield from _groups(program, own, layers)
        for stage in values.module.stages:
            if program.rank in own.get(stage.name, ()) and layers.get(stage.name):
                yield from _gathered(values, program, stage, layers[stage.name], own[stage.name])


def _dealt_out(values: Values, places: Mapping[str, tuple[int, ...]]) -> list[Stage]:
    return [stage for stage in values.module.stages if stage.name in places]


def _holding(stage: Stage, rank: int, place: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that hold what ``rank`` holds of a stage: one in each cell, or all of its place."""
    return replicas(rank, cell_of(stage) or 1, place)


def _places(values: Values) -> dict[str, tuple[int, ...]]:
    """The ranks over which the optimizer of a stage is dealt out: those of its reduce-scatters."""
    dealt_out = {stage.name for stage in values.module.stages if "sharded" in stage.attrs}
    places: dict[str, set[int]] = defaultdict(set)
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "reduce" and step.target in dealt_out and "tied" not in step.attrs:
                places[step.target].update(step.peers)
    return {stage: tuple(sorted(ranks)) for stage, ranks in places.items()}


def _groups(
    program: Program, places: Mapping[str, tuple[int, ...]], layers: Mapping[str, tuple[int, ...]]
) -> Iterator[WrongGather]:
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
        yield WrongGather(step.span, program.rank, written(step), reason)


def _gathered(
    values: Values, program: Program, stage: Stage, layers: tuple[int, ...], ranks: tuple[int, ...]
) -> Iterator[NotUpdated]:
    """Each layer once, before it is read, and before the next update."""
    counts: Counter[int] = Counter()

    def wrong(step: Instruction, layer: int, reason: str) -> NotUpdated:
        return NotUpdated(step.span, program.rank, written(step), layer, stage.name, reason, rank_list(ranks))

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
