"""Buckets hold every gradient once, and are cut where the last of them is through earliest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from arachnec.analysis.uses import bucket_of, overlapped_reduces
from arachnec.backends.simulator import simulate
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip, Instruction, Module, Phase, Program, integer, quantity
from arachnec.ir.stage_sizes import buckets_of, gradient_bytes
from arachnec.ir.verify import verify
from arachnec.lowering.buckets import MOST_BUCKETS, best_buckets, can_reverse, time_reversed
from arachnec.lowering.programs import lower
from arachnec.passes.bucket import Bucket
from arachnec.passes.check import find_problems
from arachnec.views.timeline import planned
from tests.passes.plans import DIT, bucket_sizes, cluster, equal_clips, module_of, placed_modules, timed

LAYERS = (("in", 0), *((f"blocks.{i}", 10_000_000) for i in range(8)), ("out", 7_000_000))
STAGE = replace(DIT, attrs=DIT.attrs.updated(layers=LAYERS, params=100_000_000))


def with_layers(module: Module) -> Module:
    return replace(module, stages=tuple(STAGE if stage.name == "dit" else stage for stage in module.stages))


def with_buckets(module: Module, buckets: tuple[int, ...]) -> Module:
    module = with_layers(module)
    nodes = tuple(replace(node, attrs=node.attrs.updated(buckets=buckets)) for node in module.reductions)
    return replace(module, reductions=nodes)


def reduces(program: Program) -> list[Instruction]:
    return [instruction for instruction in program.instructions if instruction.op == "reduce"]


@given(placed_modules(), bucket_sizes(len(LAYERS)))
def test_a_plan_in_any_buckets_verifies_and_passes_check(module: Module, buckets: tuple[int, ...]) -> None:
    lowered = lower(with_buckets(module, buckets))
    assert not verify(lowered)
    assert not find_problems(lowered)


@given(bucket_sizes(len(LAYERS)))
def test_buckets_hold_every_layer_once_the_rest_once_and_all_bytes(buckets: tuple[int, ...]) -> None:
    read = buckets_of(STAGE, buckets)
    assert sorted(layer for bucket in read for layer in bucket.layers) == list(range(len(LAYERS)))
    assert [bucket.rest for bucket in read] == [False] * (len(buckets) - 1) + [True]
    assert sum(bucket.size for bucket in read) == gradient_bytes(STAGE)


@given(placed_modules(), st.one_of(st.none(), st.integers(0, 200)))
def test_the_pass_cuts_what_lower_can_follow(module: Module, mib: int | None) -> None:
    cut_up = Bucket(mib=mib).run(with_layers(module))
    assert not verify(cut_up)
    lowered = lower(cut_up)
    assert not find_problems(lowered)
    assert all(len(reduces(program)) <= MOST_BUCKETS for program in lowered.programs) or mib is not None
    assert sum(integer(i.attrs["bytes"]) for i in reduces(lowered.programs[0])) == gradient_bytes(STAGE)


@given(placed_modules())
def test_a_stage_that_names_no_layers_is_all_reduced_whole(module: Module) -> None:
    assert Bucket().run(module) == module


def test_nothing_is_cut_where_nothing_runs_behind_the_sum() -> None:
    assert best_buckets(STAGE, [(100.0, 0.0)], lambda size: 1.0 + size / 1e9) == (len(LAYERS),)


@given(placed_modules(encoders=False))
def test_a_plan_reversed_in_time_is_a_plan_and_reversed_again_the_first(module: Module) -> None:
    assert can_reverse(module)
    there = time_reversed(with_layers(module))
    assert not verify(there)
    assert not find_problems(lower(Bucket().run(there)))
    back = time_reversed(there)
    for cascade, again in zip(module.cascades, back.cascades, strict=True):
        assert again.start == pytest.approx(cascade.start, abs=1e-6)
        assert again.ranks == cascade.ranks


def test_a_plan_is_reversed_in_time_where_that_ends_with_longer_backwards() -> None:
    """The long cascade comes first; from its end to its beginning the plan hides the all-reduces behind it."""
    clips = [Clip(0, 17, 480, 832, 0, 9000), Clip(1, 17, 480, 832, 0, 900)]
    cascades = [
        timed("long", Phase.TRAIN, 0, 9000, (), (0.0, 300.0), (0, 1)),
        timed("short", Phase.TRAIN, 1, 900, (), (300.0, 301.0), (0, 1)),
    ]
    module = with_layers(module_of(cluster(gpus=2), clips, cascades))
    bucketed, kept = Bucket().run(module), Bucket(reverse=False).run(module)
    assert simulate(lower(bucketed)).iteration_ms < simulate(lower(kept)).iteration_ms


def test_a_plan_in_which_a_cascade_reads_another_stays_as_it_is() -> None:
    clips = [Clip(0, 17, 480, 832, 0, 9000)]
    cascades = [
        timed("e", Phase.ENCODE, 0, 9000, (), (0.0, 9.0), (0,)),
        timed("t", Phase.TRAIN, 0, 9000, ("e",), (9.0, 300.0), (0, 1)),
    ]
    module = with_layers(module_of(cluster(gpus=2), clips, cascades))
    assert not can_reverse(module)
    assert Bucket().run(module).cascades == module.cascades


def test_only_backwards_that_all_their_ranks_end_with_hold_all_reduces() -> None:
    clips = [Clip(i, 17, 480, 832, 0, 1000) for i in range(3)]
    cascades = [
        timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0, 1)),
        timed("b", Phase.TRAIN, 1, 1000, (), (30.0, 60.0), (1, 2)),
        timed("c", Phase.TRAIN, 2, 1000, (), (0.0, 30.0), (3,)),
    ]
    lowered = lower(with_buckets(module_of(cluster(), clips, cascades), (5, 5)))
    inside = [{program.instructions[at].target for at in overlapped_reduces(program)} for program in lowered.programs]
    assert inside == [set(), {"b"}, {"b"}, {"c"}]  # rank 0 ends with `a`, but rank 1 does not


def test_an_early_bucket_starts_when_its_lowest_layer_has_been_passed() -> None:
    clips = equal_clips()
    cascades = [timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0, 1, 2, 3))]
    lowered = lower(with_buckets(module_of(cluster(), clips, cascades), (5, 5)))
    first, rest = reduces(lowered.programs[0])
    assert quantity(first.attrs["early"]) == pytest.approx(20 * 5 / 10)  # backward is two thirds of 30 ms
    assert "early" not in rest.attrs


def test_the_simulator_runs_all_reduces_during_backwards_and_steps_after_them() -> None:
    """One long cascade on rank 0, a short one on rank 1: all but the last bucket fit behind the long backward."""
    clips = [Clip(0, 17, 480, 832, 0, 9000), Clip(1, 17, 480, 832, 0, 900)]
    cascades = [
        timed("a", Phase.TRAIN, 0, 9000, (), (0.0, 300.0), (0,)),
        timed("b", Phase.TRAIN, 1, 900, (), (0.0, 30.0), (1,)),
    ]
    module = module_of(cluster(gpus=2), clips, cascades)
    whole, parts = lower(with_layers(module)), lower(with_buckets(module, (2, 2, 2, 2, 1, 1)))
    alone, hidden = simulate(whole), simulate(parts)
    assert alone.makespan_ms == hidden.makespan_ms == 300.0
    last = quantity(reduces(parts.programs[0])[-1].attrs["time"])
    step = quantity(parts.programs[0].instructions[-1].attrs["time"])
    assert hidden.iteration_ms == pytest.approx(300.0 + last + step)
    assert hidden.iteration_ms < alone.iteration_ms
    assert planned(parts).end == pytest.approx(hidden.iteration_ms)
    for lane in hidden.timeline.lanes.values():
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(lane))


@given(placed_modules(), bucket_sizes(len(LAYERS)))
def test_an_iteration_in_buckets_ends_after_its_last_sum(module: Module, buckets: tuple[int, ...]) -> None:
    lowered = lower(with_buckets(module, buckets))
    last = max(sum(quantity(i.attrs["time"]) for i in reduces(program)[-1:]) for program in lowered.programs)
    result = simulate(lowered)
    assert result.iteration_ms >= result.makespan_ms + last * (1 - 1e-9)
    assert min(result.idle_ms) >= -1e-6


def test_buckets_that_do_not_add_up_to_the_layers_are_refused() -> None:
    clips = equal_clips()
    module = module_of(cluster(), clips, [timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0,))])
    for buckets in ((3, 3), (11, -1), (11,), (5, 0, 5), (5, 5, -1, 1), ()):
        with pytest.raises(UserError, match="do not make up"):
            lower(with_buckets(module, buckets))


def drop_one(items: list[Instruction], at: int) -> None:
    del items[at]


def twice(items: list[Instruction], at: int) -> None:
    items.insert(at, items[at])


def swap(items: list[Instruction], at: int) -> None:
    other = at + 1 if at + 1 < len(items) and items[at + 1].op == "reduce" else at - 1
    items[at], items[other] = items[other], items[at]


def step_first(items: list[Instruction], at: int) -> None:
    items.insert(at, items.pop())


def late(items: list[Instruction], at: int) -> None:
    items[at] = replace(items[at], attrs=items[at].attrs.updated(early=None))


def unknown_layer(items: list[Instruction], at: int) -> None:
    layers = (*(bucket_of(items[at]) or ((), False))[0], len(LAYERS))
    items[at] = replace(items[at], attrs=items[at].attrs.updated(layers=layers))


def nothing(items: list[Instruction], at: int) -> None:
    empty = replace(items[at], attrs=items[at].attrs.updated(layers=(), rest=None))
    items.insert(at, empty)


BROKEN: list[tuple[Callable[[list[Instruction], int], None], set[str]]] = [
    (drop_one, {"wrong bucket layers", "not reduced"}),
    (twice, {"wrong bucket layers"}),
    (nothing, {"wrong bucket layers"}),
    (swap, {"deadlock", "wrong start"}),
    (step_first, {"not stepped"}),
    (unknown_layer, {"wrong bucket layers"}),
    (late, {"starts apart", "deadlock", "wrong start"}),
]


@pytest.mark.parametrize(("change", "expected"), BROKEN, ids=[change.__name__ for change, _ in BROKEN])
@given(module=placed_modules(), data=st.data())
def test_one_rank_with_other_buckets_is_found(
    change: Callable[[list[Instruction], int], None],
    expected: set[str],
    module: Module,
    data: st.DataObject,
) -> None:
    lowered = lower(with_buckets(module, (4, 4, 2)))
    shared = [p for p in lowered.programs if len(p.instructions) and overlapped_reduces(p)] if change is late else None
    programs = shared if shared is not None else list(lowered.programs)
    assume(programs and len(lowered.programs) > 1)
    program = data.draw(st.sampled_from(programs))
    places = [at for at, i in enumerate(program.instructions) if i.op == "reduce"]
    if change is late:  # of the last early sum it is no mistake on a rank that computes alone
        places = places[:1]
    items = list(program.instructions)
    change(items, data.draw(st.sampled_from(places)))
    broken = tuple(replace(p, instructions=tuple(items)) if p.rank == program.rank else p for p in lowered.programs)
    problems = {problem.kind for problem in find_problems(replace(lowered, programs=broken))}
    assert problems & (expected | ({"group incomplete"} if change is unknown_layer else set()))
