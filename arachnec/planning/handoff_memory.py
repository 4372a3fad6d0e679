"""What encoders hand off and waits on ranks: where memory runs out for it, and the order in which it waits least.

A cascade fits its ranks by itself, inputs included. What the scheduler does not see is what else lies there then:
values that were encoded ahead for later cascades. The exact lists that ``lower`` will make say where they do not fit.
An encoder that is late, ``late_order``, runs right before the first cascade that reads it, on ranks of that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from arachnec.analysis.memory import Usage, high_water, usages
from arachnec.analysis.stage_ranks import resident_ranks
from arachnec.analysis.uses import Values, written
from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Mistake, shown
from arachnec.ir.nodes import Cascade, Module, Phase, Program, quantity
from arachnec.ir.values import Attributes, Quantity
from arachnec.lowering.order import global_order, plan_handoffs
from arachnec.lowering.programs import compute_lists, lower
from arachnec.verification.memory import TOLERANCE_GIB


@dataclass(frozen=True)
class Overflow:
    """The moment at which a rank lacks most memory, and the encoders whose values should not wait at such moments."""

    worst: Mistake
    waiting: frozenset[str]


def is_roomy(placed: Sequence[Cascade], cost: CostModel) -> bool:
    """Whether all values that ever come to a rank fit into what cascades leave free of it: then none need be late."""
    named = {cascade.name: cascade for cascade in placed}
    waiting: dict[int, float] = {}
    holders: dict[str, set[int]] = {}
    for cascade in placed:
        for name in cascade.inputs:
            if name in named:
                holders.setdefault(name, set(named[name].ranks)).update(cascade.ranks)
    for name, ranks in holders.items():
        size = cost.output(named[name])
        for rank in ranks if size else ():
            waiting[rank] = waiting.get(rank, 0.0) + size
    nodes = machines(cost.cluster)
    return all(size <= cost.spare(nodes[node_of(cost.cluster, rank)].memory) for rank, size in waiting.items())


def find_overflow(placed: Sequence[Cascade], cost: CostModel) -> Overflow | None:
    """Where the lists that ``lower`` makes of a placement need more memory than there is; None where they fit."""
    module, cluster = replace(cost.module, cascades=tuple(placed)), cost.cluster
    order = global_order(module.cascades)
    lists = compute_lists(module, cluster, order, plan_handoffs(module, cluster, order))
    stages = [(quantity(stage.attrs["state"]), stage) for stage in module.stages if "state" in stage.attrs]
    states = [(size, resident_ranks(module, cluster, stage)) for size, stage in stages]
    values, nodes = Values(module), machines(cluster)
    first_reader = {name: i for i, cascade in reversed(list(enumerate(order))) for name in cascade.inputs}
    waiting: set[str] = set()
    worst: tuple[float, Program, Usage] | None = None
    for rank, items in lists.items():
        state = math.fsum(size for size, ranks in states if rank in ranks)
        program = Program(rank, tuple(items), Attributes.of(state=Quantity(state, "GiB")))
        limit = nodes[node_of(cluster, rank)].memory
        for usage in usages(values, program):
            excess = usage.total - limit
            if excess > TOLERANCE_GIB:
                waiting.update(_to_be_late(values, program, usage.index, excess, waiting, first_reader))
                if worst is None or excess > worst[0]:
                    worst = excess, program, usage
    if worst is None:
        return None
    _, program, usage = worst
    instruction = written(program.instructions[usage.index]) if usage.index >= 0 else "its parameters alone"
    limit = nodes[node_of(cluster, program.rank)].memory
    mistake = Mistake(
        None,
        f"rank {program.rank} needs {usage.total:.3f} GiB in `{shown(instruction)}`, its device has {limit:.3f} GiB: "
        f"{usage.values:.3f} GiB are encoders' outputs, even where each is made right before it is read",
        label="does not fit here",
        help="use devices with more memory, or lower `tokens` of `partition` so that fewer clips share one",
    )
    return Overflow(mistake, frozenset(waiting))


def _to_be_late(
    values: Values, program: Program, index: int, excess: float, late: Set[str], first_reader: Mapping[str, int]
) -> Iterator[str]:
    """Encoders whose values wait while an instruction runs, those read last first, until ``excess`` is made up for."""
    instruction = program.instructions[index] if index >= 0 else None
    reads = values.reads(instruction) if instruction is not None and instruction.op not in ("send", "free") else ()
    sizes = {
        name: size
        for name, size in _value_sizes(values, program, index).items()
        if name not in reads and values.cascades[name].phase is Phase.ENCODE
    }
    for name in sorted(sizes, key=lambda name: (name not in late, -first_reader.get(name, 0), name)):
        if excess <= 0:
            return
        excess -= sizes[name]
        yield name


def _value_sizes(values: Values, program: Program, index: int) -> dict[str, float]:
    """GiB of every value on the rank while an instruction runs."""
    sizes: dict[str, float] = {}
    for number, instruction in enumerate(program.instructions[: index + 1]):
        name = values.makes(instruction)
        if name is not None:
            memory = instruction.attrs.get("memory")
            sizes[name] = 0.0 if memory is None else quantity(memory)
        elif instruction.op == "free" and number < index:
            sizes.pop(instruction.target, None)
    return sizes


def in_turn(encoders: Iterable[Cascade], cost: CostModel) -> list[Cascade]:
    """The encoders of one cascade in the order in which they need least memory, one after another on one rank.

    Those that need most beside their output, at their highest degree, come first: nothing waits for them yet.
    """

    def needed_to_run(encoder: Cascade) -> float:
        return cost.memory(encoder, max(cost.legal_degrees(encoder), default=1)) - cost.output(encoder)

    return sorted(encoders, key=lambda encoder: (-needed_to_run(encoder), encoder.name))


@dataclass(frozen=True)
class Late:
    """A cascade in its turn; where it is late, ``behind`` are ranks that must have come to it before it starts."""

    cascade: Cascade
    ranks: tuple[int, ...]
    behind: tuple[int, ...] = ()


def late_order(
    cascades: Sequence[Cascade], ranks: Mapping[str, tuple[int, ...]], late: Set[str], cost: CostModel
) -> list[Late]:
    """Cascades in their order, but those in ``late`` right before the first that reads them, and on its ranks.

    Where its ranks cannot hold a late one, that one stays on its own.
    """
    named = {cascade.name: cascade for cascade in cascades}
    placed: dict[str, Late] = {}

    def add(cascade: Cascade, reader: Cascade | None) -> None:
        if cascade.name in placed:
            return
        before = [named[name] for name in cascade.inputs if name in late and name in named]
        for encoder in in_turn(before, cost):
            add(encoder, cascade)
        planned = ranks[cascade.name]
        if reader is None:
            placed[cascade.name] = Late(cascade, planned)
            return
        near = ranks[reader.name]
        target = (*near, *(rank for rank in planned if rank not in near))[: cascade.width]
        fits = not cost.devices.kinds or cost.recompute_at(cascade, cascade.width, target) is not None
        placed[cascade.name] = Late(cascade, tuple(sorted(target)) if fits else planned, near)

    read = {name for cascade in cascades for name in cascade.inputs}
    for cascade in cascades:
        if cascade.name not in late or cascade.name not in read:
            add(cascade, None)
    return list(placed.values())


def overflow(placed: Module, needed: float, cost: CostModel) -> float:
    """GiB on the rank that exceeds its device most; at most 0 where all fit.

    Beyond the ``needed`` GiB of state and cascades, programs hold what was handed on and waits to be read. They are
    made where that may be too much.
    """
    nodes = machines(cost.cluster)
    free = cost.room + cost.resident - needed + min(cost.spare(machine.memory) for machine in nodes)
    if waiting_at_most(placed.cascades, cost) <= free:
        return 0.0
    lowered = lower(placed)
    values = Values(lowered)
    return max(
        high_water(values, program).total - nodes[node_of(cost.cluster, program.rank)].memory
        for program in lowered.programs
    )


def waiting_at_most(cascades: Sequence[Cascade], cost: CostModel) -> float:
    """GiB of values on the rank that holds most at once, each from its maker's end to its last reader's."""
    named = {cascade.name: cascade for cascade in cascades}
    holders: dict[str, set[int]] = {}
    until: dict[str, float] = {}
    for cascade in cascades:
        for name in cascade.inputs:
            holders.setdefault(name, set(named[name].ranks)).update(cascade.ranks)
            until[name] = max(until.get(name, 0.0), cascade.end)
    changes: dict[int, list[tuple[float, float]]] = {}
    for name, ranks in holders.items():
        size = cost.output(named[name])
        for rank in ranks if size else ():
            changes.setdefault(rank, []).extend(((named[name].end, size), (until[name], -size)))
    return max((_peak(of_rank) for of_rank in changes.values()), default=0.0)


def _peak(changes: list[tuple[float, float]]) -> float:
    most = now = 0.0
    for _, size in sorted(changes, key=lambda change: (change[0], -change[1])):
        now += size
        most = max(most, now)
    return most
