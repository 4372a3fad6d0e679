"""Where receives are posted under each execution model, and what a rank's program asks of its device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.communicators import (
    COMMUNICATOR_MIB,
    DEVICE_HANDOFFS,
    HARDWARE_QUEUES,
    HOST_HANDOFFS,
    STREAMS,
    ExecutionModel,
    communicator_gib,
    communicators,
    family,
    most_resident_gib,
)
from arachnec.analysis.memory import high_water
from arachnec.analysis.receive_prefetch import in_place, prefetch_receives, prefetched_receives
from arachnec.analysis.uses import Values
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip, Cluster, Instruction, Level, Module, Phase, Program
from arachnec.ir.values import Attributes
from arachnec.lowering.programs import lower
from arachnec.passes.check import Check, find_problems
from tests.passes.plans import DIT, cluster, module_of, placed_modules, timed

IN_PLACE = ExecutionModel("device", "in-place")
FORMER = ExecutionModel("device", "prefetched")


def circle_of(world: int) -> Module:
    """Every rank encodes for the next one."""
    clips = [Clip(number, 17, 480, 832, 0, 1000) for number in range(world)]
    encoders = [timed(f"e{n}", Phase.ENCODE, n, 1000, (), (0.0, 10.0), (n,)) for n in range(world)]
    trained = [timed(f"t{n}", Phase.TRAIN, n, 1000, (f"e{n}",), (11.0, 41.0), ((n + 1) % world,)) for n in range(world)]
    return lower(module_of(cluster(1, world), clips, [*encoders, *trained]))


def places(module: Module, model: ExecutionModel, rank: int) -> dict[str, int]:
    posted = prefetched_receives(Values(module), model, 80.0)[rank]
    return {step.target: place for place, receives in enumerate(posted) for step in receives}


def test_two_receives_that_are_right_alone_do_not_both_pass_the_encoders() -> None:
    """Neither send depends on the other rank's encoder; with both receives ahead of both, each waits for the other."""
    module = circle_of(2)
    assert (places(module, FORMER, 0), places(module, FORMER, 1)) == ({"e1": 0}, {"e0": 0})
    kinds = {problem.kind for problem in find_problems(module, FORMER)}
    assert kinds == {"prefetch deadlock"}
    assert not find_problems(module, DEVICE_HANDOFFS)
    assert not find_problems(module, HOST_HANDOFFS)


def test_the_options_of_the_pass_are_the_model() -> None:
    module = circle_of(2)
    assert Check().run(module) is module
    assert Check(handoffs="device", receives="after-dependencies").run(module) is module
    with pytest.raises(UserError):
        Check(handoffs="device").run(module)


def test_hosts_that_connect_at_their_first_receive_wait_in_a_circle() -> None:
    """Two ranks share one connection and call together; of three each calls another one."""
    first_use = ExecutionModel(connections="first-use")
    assert not find_problems(circle_of(2), first_use)
    assert {problem.kind for problem in find_problems(circle_of(3), first_use)} == {"prefetch deadlock"}
    assert not find_problems(circle_of(3), ExecutionModel("host", "in-place", "first-use"))


@given(placed_modules(), st.sampled_from((20.0, 34.0, 80.0)))
def test_receives_that_follow_dependencies_keep_their_order_and_never_come_late(module: Module, limit: float) -> None:
    lowered = lower(module)
    values = Values(lowered)
    posted = prefetched_receives(values, DEVICE_HANDOFFS, limit)
    for program in lowered.programs:
        own = [step for step in program.instructions if step.op == "receive"]
        assert [step for receives in posted[program.rank] for step in receives] == own
        for place, receives in enumerate(posted[program.rank]):
            assert all(place <= program.instructions.index(step) for step in receives)
    kinds = {problem.kind for problem in find_problems(lowered, DEVICE_HANDOFFS)}
    assert not kinds & {"deadlock", "prefetch deadlock"}


@given(placed_modules())
def test_over_the_host_receives_are_prefetched_as_far_as_memory_allows(module: Module) -> None:
    lowered = lower(module)
    values = Values(lowered)
    posted = prefetched_receives(values, HOST_HANDOFFS, 80.0)
    assert posted == {p.rank: prefetch_receives(values, p, 80.0) for p in lowered.programs}
    placed = prefetched_receives(values, IN_PLACE, 80.0)
    assert placed == {p.rank: in_place(p) for p in lowered.programs}


def test_a_receive_passes_what_its_send_does_not_depend_on() -> None:
    """Rank 1 encodes at once what rank 0 reads last: its receive goes ahead of rank 0's other work, and stays legal."""
    clips = [Clip(number, 17, 480, 832, 0, 1000) for number in range(2)]
    cascades = [
        timed("e1", Phase.ENCODE, 1, 1000, (), (60.0, 61.0), (1,)),  # planned late
        timed("t0", Phase.TRAIN, 0, 1000, ("e0",), (1.0, 31.0), (0,)),
        timed("t1", Phase.TRAIN, 1, 1000, ("e1",), (61.0, 91.0), (0,)),
        timed("e0", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
    ]
    module = lower(module_of(cluster(1, 2), clips, cascades))
    own = next(p for p in module.programs if p.rank == 0).instructions
    stands = next(index for index, step in enumerate(own) if step.op == "receive")
    assert places(module, DEVICE_HANDOFFS, 0)["e1"] < stands
    assert not find_problems(module, DEVICE_HANDOFFS)
    # through a collective that rank 1 needs first, it may not
    cascades[0] = timed("e1", Phase.ENCODE, 1, 1000, (), (60.0, 61.0), (1,))
    cascades[1] = timed("t0", Phase.TRAIN, 0, 1000, ("e0",), (1.0, 31.0), (0, 1))
    module = lower(module_of(cluster(1, 2), clips, cascades))
    own = next(p for p in module.programs if p.rank == 0).instructions
    place = places(module, DEVICE_HANDOFFS, 0)["e1"]
    assert all(step.target != "t0" for step in own[place:] if step.op in ("forward", "backward"))


def test_communicators_are_the_groups_of_cascades_and_of_all_reduces_and_one_per_direction() -> None:
    grid = Attributes.of(ulysses=2, ring=2)
    steps = (
        Instruction("forward", "a", (0, 1, 2, 3), grid),
        Instruction("backward", "a", (0, 1, 2, 3)),
        Instruction("forward", "b", (3, 2, 1, 0), grid),
        Instruction("send", "c", (1,)),
        Instruction("receive", "d", (1,)),
        Instruction("reduce", "dit", (0, 1, 2, 3)),
    )
    program = Program(0, steps)
    groups = {("cascade", frozenset(ranks)) for ranks in ((0, 1, 2, 3), (0, 1), (0, 2))}
    reduced = {("all-reduce", frozenset((0, 1, 2, 3)))}
    assert communicators(program, HOST_HANDOFFS) == groups | reduced
    assert communicators(program, DEVICE_HANDOFFS) == groups | reduced | {("handoff", 0, 1), ("handoff", 1, 0)}
    devices = cluster(1, 4)
    cpus = replace(devices, attrs=devices.attrs.updated(device="cpu"))

    def count(pod: Cluster, program: Program) -> float:
        values = Values(Module("m", Level.LOWERED, pod, stages=(DIT,)))
        return communicator_gib(values, program, HOST_HANDOFFS) * 1024 / COMMUNICATOR_MIB

    own = {("cascade", frozenset(group)) for group in family(devices, ()) if 0 in group}
    assert own - groups  # made at the start, and not used
    assert count(devices, program) == 2 + len(groups | own)  # with that of all ranks, and the all-reduce's
    assert count(devices, Program(0, steps[:-1])) == 2 + len(groups | own)  # the all-reduce will come
    assert most_resident_gib(devices, (DIT,)) * 1024 / COMMUNICATOR_MIB == 2 + len(own)
    assert most_resident_gib(cpus, (DIT,)) == 0
    assert count(cpus, program) == 0
    assert count(cluster(1, 1), Program(0, ())) == 0


def test_communicators_are_charged_to_the_memory_of_a_rank() -> None:
    module = circle_of(2)
    values = Values(module)
    over_host, over_device = (
        high_water(values, module.programs[0], model) for model in (HOST_HANDOFFS, DEVICE_HANDOFFS)
    )
    # all ranks, their all-reduces, and the one group of the family
    assert over_host.communicators == 3 * COMMUNICATOR_MIB / 1024
    assert over_device.total - over_host.total == 2 * COMMUNICATOR_MIB / 1024


def test_more_communicators_than_streams_are_refused_on_devices_and_not_on_cpus() -> None:
    clips = [Clip(number, 17, 480, 832, 0, 1000) for number in range(STREAMS)]
    groups = [(0, rank) for rank in range(1, STREAMS + 1)]
    cascades = [
        timed(f"t{n}", Phase.TRAIN, n, 1000, (), (30.0 * n, 30.0 * (n + 1)), group) for n, group in enumerate(groups)
    ]
    module = lower(module_of(cluster(5, 8), clips, cascades))
    problems = find_problems(module)
    assert {problem.kind for problem in problems} == {"too many streams"}
    assert problems[0].message.startswith(
        f"rank 0 needs {STREAMS + 1} communicators"
    )  # the all-reduce's is one of them
    pod = module.cluster
    assert pod is not None
    assert not find_problems(replace(module, cluster=replace(pod, attrs=pod.attrs.updated(device="cpu"))))


def test_kernels_that_wait_for_other_ranks_leave_one_hardware_queue() -> None:
    """A clip encoded on one rank for many: from device to device so many sends wait at once, over the host none."""

    def broadcast(readers: int) -> Module:
        clips = [Clip(0, 17, 480, 832, 0, 1000)]
        cascades = [
            timed("e0", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
            timed("t0", Phase.TRAIN, 0, 1000, ("e0",), (2.0, 32.0), tuple(range(1, readers + 1))),
        ]
        return lower(module_of(cluster(2, 8), clips, cascades))

    assert not find_problems(broadcast(HARDWARE_QUEUES - 1), IN_PLACE)
    problems = find_problems(broadcast(HARDWARE_QUEUES), IN_PLACE)
    assert {problem.kind for problem in problems} == {"too many pending"}
    assert not find_problems(broadcast(HARDWARE_QUEUES), HOST_HANDOFFS)
