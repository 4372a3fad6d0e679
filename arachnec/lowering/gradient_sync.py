"""The end of every rank's list: the sums of the gradients, whole or in buckets, and the optimizer's steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.gradient_buckets import contents, layers_of, passed
from arachnec.ir.nodes import Cluster, Instruction, Module, Stage, integer, integers, quantity
from arachnec.ir.stage_sizes import gradient_bytes
from arachnec.ir.values import Attributes, Quantity


@dataclass(frozen=True)
class WrongBuckets(Diagnostic):
    title: ClassVar[str] = "the buckets {buckets} of `reduce @{stage}` do not make up the stage's {layers} layers"
    label: ClassVar[str] = "has {layers} layers"
    help: ClassVar[str] = "each number is a run of layers, from the last layer on, and only the last may be 0"
    stage: str
    buckets: list[int]
    layers: int


def synchronisation(
    module: Module,
    cluster: Cluster,
    resident: dict[str, frozenset[int]],
    inside: dict[int, Instruction],  # the backward that sums may start in, of the ranks that have one
) -> dict[int, list[Instruction]]:
    """The gradients' sums and the optimizer's steps at the end of every rank's list."""
    cost = CostModel(module)
    attributes = {reduce.stage: reduce.attrs for reduce in module.reductions}
    steps = {step.stage: step.attrs for step in module.steps}
    ends: dict[int, list[Instruction]] = {rank: [] for rank in range(cluster.world)}
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    trained = [stage for stage in module.stages if stage.trained and resident[stage.name]]
    for stage in trained:
        group = tuple(sorted(resident[stage.name]))
        given = attributes.get(stage.name, Attributes())
        if "buckets" in given:
            own = {rank: item for rank, item in inside.items() if stage_of[item.target] == stage.name}
            _add_buckets(ends, cost, stage, group, integers(given["buckets"]), own)
            continue
        size = integer(given["bytes"]) if "bytes" in given else round(gradient_bytes(stage))
        time = given.get("time", Quantity(cost.reduce_time(stage, group), "ms"))
        instruction = Instruction("reduce", stage.name, group, Attributes.of(bytes=size, time=time))
        for rank in group:
            ends[rank].append(instruction)
    for stage in trained:
        time = steps.get(stage.name, Attributes()).get("time", Quantity(cost.step_time(stage), "ms"))
        # With the optimizer dealt out over ranks, the step ends with every rank sending what it updated to the others.
        together = tuple(sorted(resident[stage.name])) if "sharded" in stage.attrs else ()
        for rank in resident[stage.name]:
            ends[rank].append(Instruction("step", stage.name, together, Attributes.of(time=time)))
    return ends


def _add_buckets(
    ends: dict[int, list[Instruction]],
    cost: CostModel,
    stage: Stage,
    group: tuple[int, ...],
    buckets: tuple[int, ...],
    inside: dict[int, Instruction],
) -> None:
    layers = len(layers_of(stage))
    if not buckets or sum(buckets) != layers or min(buckets[:-1], default=1) < 1 or buckets[-1] < 0:
        raise UserError(WrongBuckets(stage.span, stage.name, list(buckets), layers))
    for bucket in contents(stage, buckets):
        time = Quantity(cost.reduce_time(stage, group, bucket.size), "ms")
        attrs = Attributes.of(bytes=bucket.size, time=time, layers=bucket.layers, rest=bucket.rest or None)
        plain = Instruction("reduce", stage.name, group, attrs)
        early: dict[str, Instruction] = {}
        for rank in group:
            backward = inside.get(rank)
            if bucket.rest or backward is None:
                ends[rank].append(plain)
                continue
            if backward.target not in early:
                lead = quantity(backward.attrs["time"]) * passed(bucket, layers)
                early[backward.target] = replace(plain, attrs=attrs.updated(early=Quantity(lead, "ms")))
            ends[rank].append(early[backward.target])


def sums_start_inside(lists: dict[int, list[Instruction]]) -> dict[int, Instruction]:
    """For each rank the backward inside which its gradient sums may start, where there is one.

    It is the last thing that the rank does together with others, for every rank of its group: so nobody waits for a
    rank that is held up in a sum, however little the links and the device do at one time (docs/check.md).
    """
    last: dict[int, Instruction] = {}
    for rank, items in lists.items():
        found = next((item for item in reversed(items) if item.op != "free"), None)
        if found is not None and found.op == "backward":
            last[rank] = found
    return {
        rank: backward
        for rank, backward in last.items()
        if all(peer in last and last[peer].target == backward.target for peer in backward.peers)
    }
