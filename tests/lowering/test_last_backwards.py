"""Inside which last backwards reduces start, held against a search of all that waits, instruction by instruction."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.nodes import Instruction
from arachnec.lowering.gradient_sync import overlapped_backwards

Lists = dict[int, list[Instruction]]
Node = tuple[int, int]  # a rank and a place in its list
RUNS = ("backward", "weight")


def drawn(rng: random.Random) -> tuple[Lists, dict[str, str]]:
    """Projections of one order: rank by rank, or two together, a last backward and what it hands to those that are not
    there yet, who may hand on what they have to each other; and now and then what does not belong behind it."""
    world = rng.randint(2, 6)
    stage_of: dict[str, str] = {}
    lists: Lists = {rank: [] for rank in range(world)}

    def run(op: str, name: str, group: tuple[int, ...]) -> None:
        stage_of.setdefault(name, rng.choice(("one", "two")))
        for rank in group:
            lists[rank].append(Instruction(op, name, group))

    def hand(name: str, source: int, left: list[int]) -> None:
        target = rng.choice(left)
        if target != source and (name, target) not in handed:
            handed.add((name, target))
            lists[source].append(Instruction("send", name, (target,)))
            lists[target].append(Instruction("receive", name, (source,)))

    handed: set[tuple[str, int]] = set()
    for rank in range(world):
        run("forward", f"f{rank}", (rank,))
        run("backward", f"b{rank}", (rank,))
    left = rng.sample(range(world), world)
    while left:
        for source in rng.choices(left, k=rng.randint(0, 2)):
            hand(rng.choice((f"f{source}", f"b{source}")), source, left)
        group = tuple(left.pop() for _ in range(min(len(left), rng.choice((1, 1, 2)))))
        if rng.random() < 0.2:
            continue  # one that only hands on
        name = f"l{group[0]}"
        run("backward", name, group)
        if rng.random() < 0.3:
            run("weight", name.replace("l", "w"), group)
        for rank in rng.choices(group, k=rng.randint(0, 2)):
            others = [*left, *range(world)] if rng.random() < 0.1 else left
            if others:
                hand(rng.choice((name, name, f"b{rank}", f"f{rank}" if rng.random() < 0.2 else name)), rank, others)
        lists[group[0]] += [Instruction("free", name)] * rng.randint(0, 1)
    if rng.random() < 0.2:
        for stage in rng.sample(("one", "two"), rng.randint(1, 2)):
            for items in lists.values():
                items.append(Instruction("reduce", stage, tuple(range(world))))
    return lists, stage_of


def last_runs(lists: Lists, stage_of: dict[str, str]) -> dict[int, int]:
    """By rank, the place of its last backward or weight, if behind it only gradients are sent, or only reduces of its
    own stage stand: on all ranks of the group."""
    ends = {}
    for rank, steps in lists.items():
        places = [n for n, step in enumerate(steps) if step.op in RUNS]
        if not places:
            continue
        behind = [step for step in steps[places[-1] + 1 :] if step.op != "free"]
        gradients = [step.target for step in steps if step.op == "backward"]
        own = stage_of[steps[places[-1]].target]
        if all(step.op == "send" and step.target in gradients for step in behind) or all(
            (step.op, step.target) == ("reduce", own) for step in behind
        ):
            ends[rank] = places[-1]
    named = {rank: lists[rank][place] for rank, place in ends.items()}
    return {
        rank: place
        for rank, place in ends.items()
        if all(peer in named and named[peer].target == named[rank].target for peer in named[rank].peers)
    }


def beside(lists: Lists, node: Node) -> Iterator[Node]:
    """Where other ranks meet this one at an instruction."""
    rank, place = node
    step = lists[rank][place]
    op, peers = {"send": "receive", "receive": "send"}.get(step.op, step.op), step.peers
    for peer in peers:
        for number, other in enumerate(lists[peer]):
            if (other.op, other.target) == (op, step.target) and other.peers == (peers if op == step.op else (rank,)):
                yield peer, number


def behind(lists: Lists, ends: dict[int, int], stage_of: dict[str, str], group: tuple[int, ...]) -> set[Node]:
    """All that comes behind the last backwards of a group, if all of a stage begin the same reduces in theirs."""
    reached: set[Node] = set()
    coming = [(rank, ends[rank] + 1) for rank in group]
    while coming:
        rank, place = node = coming.pop()
        if node in reached or place >= len(lists[rank]):
            continue
        reached.add(node)
        coming += [(rank, place + 1), *beside(lists, node)]
        if ends.get(rank) == place:
            stage = stage_of[lists[rank][place].target]
            coming += [(other, end + 1) for other, end in ends.items() if stage_of[lists[other][end].target] == stage]
    return reached


def holding_up(lists: Lists, ends: dict[int, int], stage_of: dict[str, str]) -> Iterator[tuple[int, ...]]:
    """The groups behind whose last backward another of its stage comes, stage by stage, from the first rank on."""
    stages = {rank: stage_of[lists[rank][place].target] for rank, place in ends.items()}
    for stage in dict.fromkeys(stages.values()):
        for rank, place in ends.items():
            if stages[rank] != stage:
                continue
            group = lists[rank][place].peers
            others = {(other, end) for other, end in ends.items() if stages[other] == stage and other not in group}
            if others & behind(lists, ends, stage_of, group):
                yield group


@given(st.integers(0, 10**9).map(random.Random))
@settings(max_examples=200)
def test_reduces_start_inside_a_last_backward_where_no_other_one_that_starts_them_waits_behind(
    rng: random.Random,
) -> None:
    """A group behind which another comes gives it up, one after the other; all that are left start theirs inside."""
    lists, stage_of = drawn(rng)
    ends = last_runs(lists, stage_of)
    while (group := next(holding_up(lists, ends, stage_of), None)) is not None:
        ends = {rank: place for rank, place in ends.items() if rank not in group}
    assert overlapped_backwards(lists, stage_of) == {rank: lists[rank][place] for rank, place in ends.items()}


def steps(*lines: str) -> list[Instruction]:
    """``backward a 0 1``: operation, target, ranks."""
    words = [line.split() for line in lines]
    return [Instruction(op, target, tuple(map(int, ranks))) for op, target, *ranks in words]


@pytest.mark.parametrize(
    ("behind_it", "inside"),
    [
        ([], True),
        (["free a"], True),
        (["send a 1"], True),
        (["send a 1", "free a", "send b 1"], True),
        (["send f 1"], False),  # no gradient
        (["reduce one 0 1"], True),
        (["reduce one 0 1", "reduce one 0 1"], True),
        (["reduce two 0 1"], False),
        (["reduce one 0 1", "reduce two 0 1"], False),
        (["reduce one 0 1", "send a 1"], False),
        (["send a 1", "reduce one 0 1"], False),
        (["receive x 1"], False),
        (["receive x 1", "free x"], False),
        (["send a 1", "forward f 0"], False),
    ],
)
def test_behind_a_last_backward_come_gradients_or_reduces_of_its_stage_and_nothing_else(
    behind_it: list[str], inside: bool
) -> None:
    lists = {0: steps("forward f 0", "backward b 0", "backward a 0", *behind_it), 1: steps()}
    last = overlapped_backwards(lists, {"a": "one", "b": "one", "f": "one"})
    assert last == ({0: lists[0][2]} if inside else {})


def test_a_rank_whose_last_value_another_waits_for_starts_its_reduces_behind_its_backward() -> None:
    """Rank 1 takes what rank 0 hands on right before its own last backward, by rank 2 or itself; or behind it."""
    stage_of = {"a": "one", "b": "one", "c": "two"}
    own = steps("backward a 0", "send a 1")
    direct = {0: own, 1: steps("receive a 0", "backward b 1")}
    late = {0: own, 1: steps("backward b 1", "receive a 0")}
    through = {
        0: steps("backward a 0", "send a 2"),
        1: steps("receive c 2", "backward b 1"),
        2: steps("receive a 0", "backward c 2", "send c 1"),
    }
    assert overlapped_backwards(direct, stage_of) == {1: direct[1][1]}
    assert overlapped_backwards(late, stage_of) == {0: own[0]}, "what it receives comes behind"
    assert set(overlapped_backwards(through, stage_of)) == {1, 2}


def test_reduces_of_another_stage_hold_up_what_comes_behind_the_backwards_they_start_in_and_no_more() -> None:
    """Ranks 1 and 2 are of one stage, 0 and 3 of another: behind what 0 hands to 1 comes what 2 has behind its own."""
    stage_of = {"a": "one", "b": "one", "c": "two", "d": "two", "e": "two"}
    first, second = steps("backward a 0", "send a 1"), steps("receive a 0", "backward c 1")
    waits, alone = steps("receive d 2", "backward b 3"), steps("backward b 3")
    behind_it = {0: first, 1: second, 2: steps("backward d 2", "send d 3"), 3: waits}
    assert set(overlapped_backwards(behind_it, stage_of)) == {1, 2, 3}
    before_it = {0: first, 1: second, 2: steps("backward d 2", "send d 3", "backward e 2"), 3: waits}
    assert set(overlapped_backwards(before_it, stage_of)) == {0, 1, 2, 3}
    back = {0: steps("receive d 2") + first, 1: second, 2: steps("backward d 2", "send d 0"), 3: alone}
    assert set(overlapped_backwards(back, stage_of)) == {0, 1, 3}, "3 waits for nothing behind 0"
