"""Which ranks an instruction may name: every group of three ranks and their neighbours, by the rule as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Phase, Program
from arachnec.ir.values import Attributes, Quantity
from arachnec.verification.inputs import TOLERANCE_MS, check_inputs
from arachnec.verification.structure import check_structure
from tests.passes.plans import DIT, cluster, equal_clips, module_of, timed

WORLD = 3
CASCADES = [
    timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 2.0), (0, 1)),
    timed("t", Phase.TRAIN, 0, 1000, ("e",), (2.0, 32.0), (0, 1)),
]
MODULE = module_of(cluster(gpus=WORLD), equal_clips(), CASCADES)
TARGETS = {
    "encode": "e", "forward": "t", "backward": "t", "reduce": DIT.name, "step": DIT.name, "gather": DIT.name,
    "norm": DIT.name, "send": "e", "receive": "e", "free": "e", "replan": DIT.name,
}  # fmt: skip
ALONE = ("encode", "step")  # may name no ranks: it is of this one


def groups() -> Iterator[tuple[int, ...]]:
    for size in range(4):
        yield from product(range(-1, WORLD + 1), repeat=size)


def may_name(op: str, rank: int, peers: tuple[int, ...]) -> bool:
    known = set(peers) <= set(range(WORLD))
    if op in ("free", "replan"):
        return not peers
    if op in ("send", "receive"):
        return len(peers) == 1 and known and peers != (rank,)
    if not peers:
        return op in ALONE
    return known and rank in peers and len(set(peers)) == len(peers)


def programs(*instructions: Instruction) -> tuple[Program, ...]:
    """Rank 1 has these."""
    return tuple(Program(rank, instructions if rank == 1 else ()) for rank in range(WORLD))


@pytest.mark.parametrize("op", TARGETS)
def test_a_group_is_ranks_of_the_cluster_each_once_and_its_own_among_them(op: str) -> None:
    for peers in groups():
        named = Instruction(op, TARGETS[op], peers)
        problems = list(check_structure(Values(replace(MODULE, programs=programs(named)))))
        assert [problem.kind for problem in problems] == ["bad peers"] * (not may_name(op, 1, peers)), peers


def test_a_group_that_another_rank_may_name_is_not_this_ones() -> None:
    """What was found sound on one rank is looked at again where the rank is no member."""
    pair = Instruction("reduce", DIT.name, (0, 1))
    own = tuple(Program(rank, (pair,)) for rank in range(WORLD))
    problems = list(check_structure(Values(replace(MODULE, programs=own))))
    assert [(problem.kind, problem.message[:6]) for problem in problems] == [("bad peers", "rank 2")]


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1), (0, 1, 2, 3), (0, 1, 1, 2), (2, 1, 0), ()])
def test_every_rank_has_one_program_and_no_other_has_one(ranks: tuple[int, ...]) -> None:
    own = tuple(Program(rank, ()) for rank in ranks)
    problems = list(check_structure(Values(replace(MODULE, programs=own))))
    counts = [(rank, ranks.count(rank)) for rank in range(WORLD + 1)]
    wrong = [(rank, count) for rank, count in counts if count != (1 if rank < WORLD else 0)]
    assert [one.message for one in problems] == [f"rank {rank} has {count} programs" for rank, count in wrong]


@pytest.mark.parametrize("until", [0.0, 1.0, 32.0, 1e7])
def test_a_rank_may_start_before_it_has_ended_by_what_rounding_takes_and_no_more(until: float) -> None:
    """A thousandth of a ms, and of long plans a billionth of their length."""
    rounding = max(TOLERANCE_MS, 1e-9 * until)

    def run(name: str, start: float, length: float) -> Instruction:
        return Instruction(
            "forward", name, (1,), Attributes.of(start=Quantity(start, "ms"), time=Quantity(length, "ms"))
        )

    unplanned = Instruction("backward", "t", (1,))
    for early, refused in ((0.0, False), (rounding, False), (1.1 * rounding, True)):
        steps = [run("t", 0.0, until), unplanned, run("t", until - early, 1.0)] if until else [run("t", -early, 1.0)]
        problems = list(check_inputs(Values(replace(MODULE, programs=programs(*steps)))))
        told = [problem for problem in problems if problem.kind == "overlap"]
        assert len(told) == refused
        for problem in told:
            assert f"until {until:g} ms" in problem.message
            assert ("start of the iteration" in problem.message) == (until == 0)
