"""What ``check`` accepts never stands still on an emulated device; what it refuses for its receives does."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.communicators import DEVICE_HANDOFFS, HOST_HANDOFFS, ExecutionModel
from arachnec.analysis.receive_prefetch import prefetched_receives
from arachnec.analysis.uses import Values
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.lowering.programs import lower
from arachnec.passes.check import find_problems
from arachnec.passes.infra.pipeline import Pipeline
from tests.emulator.machine import Machine, Standstill
from tests.emulator.plans import PIPELINES, costed, plan
from tests.emulator.translate import Backend, actions_of
from tests.passes.plans import bucket_sizes, placed_modules
from tests.passes.test_bucket import LAYERS, with_buckets
from tests.slow import slow

GOLDEN = Path(__file__).parents[1] / "golden"
POOLS = (1, 2, 8, 32)
IN_PLACE = ExecutionModel("device", "in-place")
FORMER = ExecutionModel("device", "prefetched")  # receives at the top of the program, from device to device
FORMER_LAZY = ExecutionModel("device", "prefetched", "first-use")
STANDSTILL = (
    "deadlock",
    "prefetch deadlock",
    "starts apart",
    "group incomplete",
    "unmatched send",
    "unmatched receive",
    "swapped handoff",
)
MODELS = [
    HOST_HANDOFFS,
    ExecutionModel("host", "in-place", "first-use"),
    ExecutionModel("host", "prefetched", "first-use"),
    DEVICE_HANDOFFS,
    ExecutionModel("device", "after-dependencies", "first-use"),
    IN_PLACE,
    FORMER,
    FORMER_LAZY,
]
REFUSABLE = (FORMER, FORMER_LAZY, ExecutionModel("host", "prefetched", "first-use"))  # all others never refuse a plan
rates = st.sampled_from((0.0, 0.05, 0.3, 1.0))


def emulate(module: Module, model: ExecutionModel, pool: int, waits: float, seed: int) -> Standstill | None:
    values = Values(module)
    assert module.cluster is not None
    posted = prefetched_receives(values, model, module.cluster.memory)
    backend = Backend(model.handoffs, model.connections == "first-use")
    return Machine(actions_of(values, posted, backend), pool, waits, random.Random(seed)).run()


def stands_still(module: Module, model: ExecutionModel) -> bool:
    """Whether ``check`` says so."""
    return any(problem.kind in STANDSTILL for problem in find_problems(module, model))


@cache
def golden_programs() -> dict[str, Module]:
    """Every lowered module of the golden tests, what they give and what they are given."""
    programs = {}
    for path in sorted([*GOLDEN.rglob("*.expect"), *GOLDEN.rglob("*.cascade")]):
        try:
            module = parse_module(path.read_text(encoding="utf-8"))
        except UserError:
            continue
        if module.level is Level.LOWERED and module.programs and module.cluster is not None:
            programs[path.relative_to(GOLDEN).as_posix()] = module
    return programs


def is_sound(module: Module) -> bool:
    """Of the programs that are wrong on purpose only those are emulated that at most stand still."""
    return all(problem.kind in (*STANDSTILL, "too many pending") for problem in find_problems(module, IN_PLACE))


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("pool", [pool if pool in (1, 8) else slow(pool) for pool in POOLS])
def test_golden_programs_go_through_where_check_accepts_them(model: ExecutionModel, pool: int) -> None:
    sound = {name: module for name, module in golden_programs().items() if is_sound(module)}
    assert len(sound) > 15
    for name, module in sound.items():
        if not stands_still(module, model):
            for waits in (0.0, 0.3, 1.0):
                circle = emulate(module, model, pool, waits, seed=1)
                assert circle is None, f"{name}\n{circle}"
        elif model.handoffs == "device":
            assert emulate(module, model, pool, 1.0, seed=1) is not None, name


@given(
    placed_modules(),
    st.one_of(st.none(), bucket_sizes(len(LAYERS))),
    st.sampled_from(MODELS),
    st.sampled_from(POOLS),
    rates,
    st.integers(0, 99),
)
def test_generated_programs_go_through_where_check_accepts_them(
    placed: Module, buckets: tuple[int, ...] | None, model: ExecutionModel, pool: int, waits: float, seed: int
) -> None:
    module = lower(placed if buckets is None else with_buckets(placed, buckets))
    if stands_still(module, model):
        assert model in REFUSABLE
        assert emulate(module, model, pool, 1.0, seed) is not None
    else:
        circle = emulate(module, model, pool, waits, seed)
        assert circle is None, str(circle)


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("seed", [0, 1])
def test_plans_with_encoders_need_the_host_or_receives_that_wait(nodes: int, pipeline: str, seed: int) -> None:
    """The placement of receives that once was: refused for every plan, and each of them does stand still."""
    module = plan(nodes, 8, 12 * nodes, seed, pipeline)
    for model in (HOST_HANDOFFS, DEVICE_HANDOFFS, IN_PLACE):
        assert not stands_still(module, model)
        for pool in (1, 8):
            circle = emulate(module, model, pool, 0.3, seed)
            assert circle is None, str(circle)
    for model in (FORMER, FORMER_LAZY):
        problems = find_problems(module, model)
        assert any(problem.kind == "prefetch deadlock" for problem in problems)
        circle = emulate(module, model, 8, 1.0, seed)
        assert circle is not None
        assert circle.is_circle
    # a connection over the host that is made at its first use holds up the host that has posted early
    assert stands_still(module, ExecutionModel("host", "prefetched", "first-use"))
    assert emulate(module, ExecutionModel("host", "prefetched", "first-use"), 8, 0.0, seed) is not None


def test_a_plan_on_64_ranks_goes_through() -> None:
    module = plan(8, 8, 128, 0, PIPELINES[1])
    assert len(module.programs) == 64
    assert emulate(module, HOST_HANDOFFS, 8, 0.3, 0) is None
    assert emulate(module, FORMER, 8, 1.0, 0) is not None


@pytest.mark.parametrize("cell", [2, 4])
def test_plans_in_cells_go_through(cell: int) -> None:
    whole = costed(2, 2, 4, seed=1)
    dit = replace(whole.stages[1], attrs=whole.stages[1].attrs.updated(cell=cell, layers=LAYERS))
    module = lower(Pipeline.parse(PIPELINES[1]).run(replace(whole, stages=(whole.stages[0], dit))))
    assert not find_problems(module)
    for model in (HOST_HANDOFFS, DEVICE_HANDOFFS):
        for pool, waits in ((1, 1.0), (8, 0.3)):
            assert emulate(module, model, pool, waits, seed=3) is None


def test_members_that_gather_in_two_orders_stand_still() -> None:
    text = (GOLDEN / "check" / "cell_gathers_in_two_orders.cascade").read_text(encoding="utf-8")
    assert emulate(parse_module(text), DEVICE_HANDOFFS, 8, 1.0, seed=1) is not None
