"""Encoders' outputs that wait for their readers: the plan holds the memory, or an error says what does not fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.lowering.programs import lower
from arachnec.passes.check import find_problems
from arachnec.passes.infra.base import Duration, Pass
from arachnec.passes.partition import cascades
from arachnec.passes.place import Place
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.planning.formulate import decided
from arachnec.planning.validate import validate_schedule

BS = (("B", 1), ("S", 1))
MIB = 1 / 1024
SCHEDULERS: list[Pass] = [
    ScheduleZ3(budget=Duration(0.0)),
    ScheduleZ3(steps=5),
    ScheduleStatic(policy="data-parallel"),
]


def formula(unit: str, *terms: tuple[float, tuple[tuple[str, int], ...]]) -> Formula:
    return Formula(tuple(Term(value, powers) for value, powers in terms), unit)


def module(
    cluster: str,
    memory: float,
    batches: list[tuple[int, int]],
    encoders: list[tuple[float, float]],
) -> Module:
    """``memory`` MiB a device; micro-batches of clips x tokens; of encoders MiB of output and workspace per token."""
    dit = Stage(
        "dit",
        True,
        Attributes.of(
            params=1000,
            heads=4,
            attentions=2,
            forward=formula("ms", (1e-2, BS), (1.0, ())),
            backward=formula("ms", (2e-2, BS), (2.0, ())),
            saved=formula("GiB", (0.02 * MIB, BS)),
            saved_recompute=formula("GiB", (0.005 * MIB, BS)),
            state=Quantity(0.5 * MIB, "GiB"),
            costs="device specs",
        ),
    )
    vaes = [
        Stage(
            f"vae{i}",
            False,
            Attributes.of(
                output=formula("GiB", (output * MIB, BS)),
                workspace=formula("GiB", (workspace * MIB, BS)),
                forward=formula("ms", (1e-3, BS), (0.2, ())),
                costs="device specs",
            ),
        )
        for i, (output, workspace) in enumerate(encoders)
    ]
    clips = [[Clip(100 * i + k, 1, 16, 16, 0, tokens) for k in range(n)] for i, (n, tokens) in enumerate(batches)]
    stages = (*vaes, dit)
    pod = parse_cluster(cluster)
    pod = replace(pod, attrs=pod.attrs.updated(memory=Quantity(memory * MIB, "GiB")))
    every = tuple(clip for row in clips for clip in row)
    return Module("m", Level.COSTED, pod, every, stages, cascades=cascades([tuple(row) for row in clips], stages))


def serial_plans(costed: Module, reader: Cascade) -> Iterator[Module]:
    """One micro-batch alone: its encoders in any order, then what reads them, at any degrees, on the first ranks."""
    cost = CostModel(costed)
    named = {cascade.name: cascade for cascade in costed.cascades}
    for turn in permutations([named[name] for name in reader.inputs]):
        chain = (*turn, reader)
        for degrees in product(*(cost.legal_degrees(cascade) for cascade in chain)):
            recompute = [cost.recompute_at(link, degree) for link, degree in zip(chain, degrees, strict=True)]
            if None in recompute or max(degrees) > degrees[-1]:
                continue
            begin, placed = 0.0, []
            for link, degree, again in zip(chain, degrees, recompute, strict=True):
                scheduled = decided(link, cost, degree, again is True, begin, begin + 100.0)
                placed.append(scheduled.with_attrs(ranks=tuple(range(degree))))
                begin += 100.0
            clips = tuple(clip for clip in costed.clips if clip.id in reader.clips)
            yield replace(costed, level=Level.PLACED, clips=clips, cascades=tuple(placed))


def holds_memory(placed: Module) -> bool:
    return not any(problem.kind == "out of memory" for problem in find_problems(lower(placed)))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["1:cpu", "2:cpu", "4:cpu", "2x2:cpu"]),
    st.floats(1.5, 9.0),
    st.lists(st.tuples(st.integers(1, 3), st.integers(10, 120)), min_size=1, max_size=10),
    st.lists(st.tuples(st.floats(0.001, 0.02), st.floats(0.0, 0.03)), min_size=1, max_size=2),
    st.sampled_from(SCHEDULERS),
)
def test_a_plan_holds_the_memory_and_there_is_one_wherever_a_serial_plan_holds_it(
    cluster: str,
    memory: float,
    batches: list[tuple[int, int]],
    encoders: list[tuple[float, float]],
    scheduler: Pass,
) -> None:
    costed = module(cluster, memory, batches, encoders)
    try:
        placed = Place().run(scheduler.run(costed))
    except UserError as error:
        assert "GiB" in str(error)
        readers = [cascade for cascade in costed.cascades if cascade.phase is Phase.TRAIN]
        assert not all(any(map(holds_memory, serial_plans(costed, reader))) for reader in readers)
        return
    assert validate_schedule(placed) == []
    assert holds_memory(placed)


def test_encoders_run_ahead_as_far_as_the_memory_allows() -> None:
    ahead = []
    for memory in (100.0, 6.0, 4.0):
        costed = module("2:cpu", memory, [(1, 100)] * 12, [(0.01, 0.0)])
        placed = Place().run(ScheduleZ3(budget=Duration(0.0)).run(costed))
        assert holds_memory(placed)
        named = {cascade.name: cascade for cascade in placed.cascades}
        ahead.append(sum(reader.start > named[name].end + 1.0 for reader in placed.cascades for name in reader.inputs))
    assert ahead[0] > ahead[1] > ahead[2] == 0


def test_what_fits_in_no_order_is_named_with_its_clips_and_a_remedy() -> None:
    costed = module("2:cpu", 3.0, [(1, 100)], [(0.012, 0.01), (0.005, 0.013)])
    with pytest.raises(UserError, match=r"clip 0 .* beside .* other encoders") as raised:
        Place().run(ScheduleZ3(budget=Duration(0.0)).run(costed))
    (diagnostic,) = raised.value.diagnostics
    assert "more memory" in diagnostic.text(diagnostic.help)


def test_a_shared_encoder_leaves_nothing_on_ranks_that_neither_read_nor_send() -> None:
    costed = module("4:cpu", 100.0, [(3, 100)], [(0.01, 0.0)])
    cost = CostModel(costed)
    encoder, reader = costed.cascades
    cascades = (
        decided(encoder, cost, 3, False, 0.0, 10.0).with_attrs(ranks=(0, 1, 2)),
        decided(reader, cost, 1, False, 20.0, 30.0).with_attrs(ranks=(3,)),
    )
    lowered = lower(replace(costed, level=Level.PLACED, cascades=cascades))
    freed = [program.rank for program in lowered.programs for step in program.instructions if step.op == "free"]
    assert sorted(freed) == [0, 1, 2, 3]
