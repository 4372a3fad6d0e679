"""Valid plans pass; each thing that can be wrong with one is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import Values
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Clip, Instruction, Module, Phase, Program
from arachnec.ir.stage_sizes import uneven
from arachnec.ir.values import Quantity, Value
from arachnec.lowering.programs import lower
from arachnec.passes.check import Check, find_problems
from arachnec.verification import deadlock as deadlock
from arachnec.verification import gradient as gradient
from arachnec.verification import handoffs as handoffs
from arachnec.verification import inputs as inputs
from arachnec.verification import memory as memory
from arachnec.verification import shards as shards
from arachnec.verification import structure as structure
from tests.passes.plans import cluster, equal_clips, linear, module_of, placed_modules, timed

GOLDEN = Path(__file__).parents[1] / "golden" / "check"
Lists = dict[int, list[Instruction]]
Places = list[tuple[int, int, Instruction]]


def lists_of(module: Module) -> Lists:
    return {program.rank: list(program.instructions) for program in module.programs}


def with_lists(module: Module, lists: Lists) -> Module:
    return replace(module, programs=tuple(Program(p.rank, tuple(lists[p.rank]), p.attrs) for p in module.programs))


def places(lists: Lists, *ops: str) -> Places:
    return [(rank, at, i) for rank, items in lists.items() for at, i in enumerate(items) if i.op in ops]


def kinds(module: Module) -> set[str]:
    problems = find_problems(module)
    for problem in problems:
        assert problem.kind and render(problem)
    return {problem.kind for problem in problems}


def pick(data: st.DataObject, candidates: Places) -> tuple[int, int, Instruction]:
    assume(candidates)
    return data.draw(st.sampled_from(candidates))


def drop(op: str) -> Callable[[Lists, st.DataObject], None]:
    def mutate(lists: Lists, data: st.DataObject) -> None:
        rank, at, _ = pick(data, places(lists, op))
        del lists[rank][at]

    return mutate


def drop_everywhere(op: str) -> Callable[[Lists, st.DataObject], None]:
    def mutate(lists: Lists, data: st.DataObject) -> None:
        _, _, chosen = pick(data, places(lists, op))
        for items in lists.values():
            items[:] = [i for i in items if (i.op, i.target) != (chosen.op, chosen.target)]

    return mutate


def repeat_everywhere(op: str) -> Callable[[Lists, st.DataObject], None]:
    def mutate(lists: Lists, data: st.DataObject) -> None:
        _, _, chosen = pick(data, places(lists, op))
        for items in lists.values():
            items[:] = [i for instruction in items for i in ([instruction] * (2 if instruction == chosen else 1))]

    return mutate


def swap_sends(lists: Lists, data: st.DataObject) -> None:
    sends = places(lists, "send")
    pairs = [(a, b) for a in sends for b in sends if a[0] == b[0] and a[1] < b[1] and a[2].peers == b[2].peers]
    assume(pairs)
    (rank, i, first), (_, j, second) = data.draw(st.sampled_from(pairs))
    lists[rank][i], lists[rank][j] = second, first


def remove_a_rank_from_a_group(lists: Lists, data: st.DataObject) -> None:
    _, _, chosen = pick(data, [place for place in places(lists, "forward") if len(place[2].peers) > 1])
    lost = data.draw(st.sampled_from(chosen.peers))
    left = tuple(peer for peer in chosen.peers if peer != lost)
    for rank, items in lists.items():
        for at, item in reversed(list(enumerate(items))):
            if item.target == chosen.target and item.op in ("forward", "backward"):
                items[at : at + 1] = [] if rank == lost else [replace(item, peers=left)]


def shrink_a_group_on_one_rank(lists: Lists, data: st.DataObject) -> None:
    rank, at, chosen = pick(data, [place for place in places(lists, "forward") if len(place[2].peers) > 1])
    lists[rank][at] = replace(chosen, peers=tuple(sorted(chosen.peers))[::-1][:-1] or chosen.peers)


def change_a_weight(lists: Lists, data: st.DataObject) -> None:
    rank, at, chosen = pick(data, places(lists, "forward"))
    lists[rank][at] = replace(chosen, attrs=chosen.attrs.updated(weight=0.123))


def free_too_early(lists: Lists, data: st.DataObject) -> None:
    frees = [
        (rank, at, i)
        for rank, at, i in places(lists, "free")
        if (lists[rank][at - 1].op, lists[rank][at - 1].target) == ("backward", i.target.replace("e", "t"))
    ]
    rank, at, chosen = pick(data, frees)
    del lists[rank][at]
    lists[rank].insert(at - 1, chosen)


def receive_too_late(lists: Lists, data: st.DataObject) -> None:
    rank, at, chosen = pick(data, places(lists, "receive"))
    use = next(k for k, i in enumerate(lists[rank]) if i.op == "free" and i.target == chosen.target)
    lists[rank].insert(use, chosen)
    del lists[rank][at]


def backward_after_the_reduce(lists: Lists, data: st.DataObject) -> None:
    _, _, chosen = pick(data, places(lists, "backward"))
    for items in lists.values():
        if chosen in items:
            items.remove(chosen)
            items.append(chosen)


def start_too_early(lists: Lists, data: st.DataObject) -> None:
    computing = [p for p in places(lists, "forward") if p[2].attrs["start"] != Quantity(0.0, "ms")]
    busy = [(r, k, i) for r, k, i in computing if any(o.op in ("encode", "backward") for o in lists[r][:k])]
    rank, at, chosen = pick(data, busy)
    lists[rank][at] = replace(chosen, attrs=chosen.attrs.updated(start=Quantity(0.0, "ms")))


def split_otherwise(name: str, value: Value) -> Callable[[Lists, st.DataObject], None]:
    def mutate(lists: Lists, data: st.DataObject) -> None:
        _, _, chosen = pick(data, places(lists, "forward"))
        everywhere = data.draw(st.booleans())
        ranks = chosen.peers if everywhere else (data.draw(st.sampled_from(chosen.peers)),)
        for rank in ranks:
            lists[rank] = [
                replace(i, attrs=i.attrs.updated(**{name: value}))
                if (i.op, i.target) == (chosen.op, chosen.target)
                else i
                for i in lists[rank]
            ]

    mutate.__qualname__ = f"split_otherwise_{name}_{value}"
    return mutate


def leave_an_idle_rank_out(lists: Lists, data: st.DataObject) -> None:
    idle = [rank for rank, items in lists.items() if not any(i.op == "backward" for i in items)]
    assume(idle and len(idle) < len(lists))
    lost = data.draw(st.sampled_from(idle))
    for rank, items in lists.items():
        if rank == lost:
            items[:] = [i for i in items if i.op not in ("reduce", "step")]
            continue
        items[:] = [
            replace(i, peers=tuple(peer for peer in i.peers if peer != lost)) if i.op == "reduce" else i for i in items
        ]


SPLITS: tuple[tuple[str, Value], ...] = (
    ("ulysses", 0), ("ulysses", 3), ("ring", 5), ("shards", (1, 2)), ("shards", (-1, 401)), ("recompute", True),
    ("side", 7),
)  # fmt: skip
MUTATIONS = [
    *((split_otherwise(name, value), {"split unlike cascade"}) for name, value in SPLITS),
    (leave_an_idle_rank_out, {"left out"}),
    (drop("receive"), {"unmatched send"}),
    (drop("send"), {"unmatched receive"}),
    (swap_sends, {"swapped handoff"}),
    (drop("forward"), {"wrong run count"}),
    (drop("backward"), {"wrong run count"}),
    (drop_everywhere("forward"), {"wrong run count"}),
    (drop_everywhere("backward"), {"wrong run count"}),
    (repeat_everywhere("forward"), {"wrong run count"}),
    (repeat_everywhere("backward"), {"wrong run count"}),
    (drop_everywhere("reduce"), {"not reduced"}),
    (repeat_everywhere("reduce"), {"not reduced"}),
    (drop("step"), {"not stepped"}),
    (remove_a_rank_from_a_group, {"wrong group", "wrong run count"}),
    (shrink_a_group_on_one_rank, {"wrong group", "bad peers"}),
    (change_a_weight, {"wrong weight"}),
    (backward_after_the_reduce, {"not reduced"}),
    (free_too_early, {"used after free"}),
    (receive_too_late, {"missing input"}),
    (start_too_early, {"overlap"}),
    (drop("free"), set()),
]


@pytest.mark.parametrize(("mutate", "expected"), MUTATIONS, ids=[m.__qualname__.split(".")[0] for m, _ in MUTATIONS])
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_a_broken_program_is_found_by_its_rule(
    mutate: Callable[[Lists, st.DataObject], None], expected: set[str], data: st.DataObject
) -> None:
    module = lower(data.draw(placed_modules()))
    lists = lists_of(module)
    mutate(lists, data)
    problems = kinds(with_lists(module, lists))
    assert problems & expected if expected else not problems


@given(placed_modules())
def test_a_device_one_byte_too_small_is_found_and_one_that_just_fits_passes(module: Module) -> None:
    lowered = lower(module)
    values = Values(lowered)
    need = max(memory.high_water(values, program).total for program in lowered.programs)

    def on(size: float) -> Module:
        pod = lowered.cluster
        assert pod is not None
        return replace(lowered, cluster=replace(pod, attrs=pod.attrs.updated(memory=Quantity(size, "GiB"))))

    assert not kinds(on(need))
    assert kinds(on(need - 2**-20)) == {"out of memory"}


@given(placed_modules(), st.data())
def test_a_clip_left_out_or_counted_twice_is_found(module: Module, data: st.DataObject) -> None:
    lowered = lower(module)
    extra = Clip(len(lowered.clips), 17, 480, 832, 0, 400)
    assert "clip not trained" in kinds(replace(lowered, clips=(*lowered.clips, extra)))
    trained = [c for c in lowered.cascades if c.phase is Phase.TRAIN]
    chosen = data.draw(st.sampled_from(trained))
    doubled = tuple(replace(c, clips=c.clips * 2) if c is chosen else c for c in lowered.cascades)
    assert "clip trained twice" in kinds(replace(lowered, cascades=doubled))


@given(placed_modules(), st.data())
def test_a_train_cascade_reads_the_encodings_of_its_own_clips(module: Module, data: st.DataObject) -> None:
    lowered = lower(module)
    readers = [c for c in lowered.cascades if c.inputs]
    assume(readers)
    chosen = data.draw(st.sampled_from(readers))
    without = replace(chosen, inputs=())
    encoded = next(c for c in lowered.cascades if c.name == chosen.inputs[0])
    of_another = replace(encoded, clips=(max(clip.id for clip in lowered.clips) + 1,))
    for broken, original in ((without, chosen), (of_another, encoded)):
        cascades = tuple(broken if c is original else c for c in lowered.cascades)
        assert "not its encoding" in kinds(replace(lowered, cascades=cascades))


@given(placed_modules(), st.data())
def test_a_cascade_is_as_long_as_its_clips(module: Module, data: st.DataObject) -> None:
    lowered = lower(module)
    chosen = data.draw(st.sampled_from(lowered.cascades))
    shorter = tuple(replace(c, tokens=c.tokens - 1) if c is chosen else c for c in lowered.cascades)
    assert "not its clips" in kinds(replace(lowered, cascades=shorter))


@given(placed_modules(), st.data())
def test_a_rank_holds_the_state_of_its_stages_whatever_its_program_claims(module: Module, data: st.DataObject) -> None:
    lowered = lower(module)
    chosen = data.draw(st.sampled_from(lowered.programs))
    free = Quantity(data.draw(st.floats(0.0, 11.9)), "GiB")
    programs = tuple(replace(p, attrs=p.attrs.updated(state=free)) if p is chosen else p for p in lowered.programs)
    assert "state too low" in kinds(replace(lowered, programs=programs))


@given(placed_modules(), st.data())
def test_an_instruction_holds_what_its_stage_says_whatever_it_claims(module: Module, data: st.DataObject) -> None:
    """Of a train cascade and of an encoder: less memory than the formulas say is refused, more is not."""
    saving = tuple(
        replace(stage, attrs=stage.attrs.updated(saved=linear(2e-4, "GiB"))) if stage.trained else stage
        for stage in module.stages
    )
    lowered = lower(replace(module, stages=saving))
    lists = lists_of(lowered)
    rank, at, chosen = pick(data, places(lists, "forward", "encode"))
    assert "memory too low" not in kinds(lowered)
    stage, cascade = saving[-1 if chosen.op == "forward" else 0], Values(lowered).cascades[chosen.target]
    need = cascade.tokens * (2e-4 * uneven(cascade.tokens, cascade.degree) if stage.trained else 1e-6)
    for share, refused in ((0.0, True), (0.9, True), (1.001, False)):
        claim = Quantity(need * share, "GiB")
        lists[rank][at] = replace(chosen, attrs=chosen.attrs.updated(memory=claim, workspace=None))
        assert ("memory too low" in kinds(with_lists(lowered, lists))) == refused


def two_cascades_on(ranks: tuple[int, ...]) -> Module:
    clips = equal_clips(2)
    cascades = [
        timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), ranks),
        timed("b", Phase.TRAIN, 1, 1000, (), (30.0, 60.0), ranks),
    ]
    return lower(module_of(cluster(), clips, cascades))


def test_collectives_in_another_order_on_one_rank_deadlock_and_the_cycle_is_named() -> None:
    module = two_cascades_on((1, 2))
    lists = lists_of(module)
    lists[2] = [*lists[2][2:4], *lists[2][:2], *lists[2][4:]]
    problem = next(p for p in find_problems(with_lists(module, lists)) if p.kind == "deadlock")
    assert problem.message == "deadlock: ranks [1, 2] wait for each other"
    assert "rank 1 has `backward %a on [1, 2]` before `forward %b on [1, 2]`" in problem.help
    assert "rank 2 has `forward %b on [1, 2]` before `backward %a on [1, 2]`" in problem.help


def test_ranks_that_send_to_each_other_first_deadlock() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("e0", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("e1", Phase.ENCODE, 1, 1000, (), (0.0, 1.0), (1,)),
        timed("t0", Phase.TRAIN, 0, 1000, ("e0",), (1.0, 31.0), (1,)),
        timed("t1", Phase.TRAIN, 1, 1000, ("e1",), (1.0, 31.0), (0,)),
    ]
    module = lower(module_of(cluster(), clips, cascades))
    assert not find_problems(module)
    lists = lists_of(module)
    for rank in (0, 1):
        lists[rank][1:3] = sorted(lists[rank][1:3], key=lambda i: i.op == "receive")
    assert kinds(with_lists(module, lists)) == {"deadlock"}


def test_check_returns_the_module_itself_or_raises_one_diagnostic_per_kind() -> None:
    module = two_cascades_on((1, 2))
    assert Check().run(module) is module
    lists = lists_of(module)
    lists[1] = [i for i in lists[1] if i.op != "backward"]
    with pytest.raises(UserError) as caught:
        Check().run(with_lists(module, lists))
    kinds_of = [problem.kind for problem in caught.value.diagnostics]
    assert len(kinds_of) == len(set(kinds_of))


def test_a_program_with_unknown_names_is_refused_before_the_rules_are_asked() -> None:
    module = two_cascades_on((1, 2))
    lists = lists_of(module)
    lists[1].insert(0, Instruction("free", "nothing"))
    assert kinds(with_lists(module, lists)) == {"unknown target"}
    lists[1][0] = Instruction("encode", "a")
    assert kinds(with_lists(module, lists)) == {"wrong phase"}
    assert kinds(replace(module, programs=module.programs[1:])) == {"program count"}


def test_a_thousand_ranks_are_lowered_and_pass_check() -> None:
    pod, clips, cascades = cluster(nodes=128, gpus=8), [], []
    for number in range(4096):
        block, turn = (number % 512) * 2, number // 512
        clips.append(Clip(number, 17, 480, 832, 0, 1000))
        encoder = (block + 8) % 1024
        start = turn * 20.0
        cascades.append(timed(f"e{number}", Phase.ENCODE, number, 1000, (), (start, start + 1), (encoder,)))
        when = (start + 1, start + 16)
        cascades.append(timed(f"t{number}", Phase.TRAIN, number, 1000, (f"e{number}",), when, (block, block + 1)))
    module = module_of(pod, clips, cascades)
    assert not find_problems(lower(module))
