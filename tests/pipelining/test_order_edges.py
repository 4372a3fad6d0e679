"""Where the rules of orders begin and end: one micro-batch, three stages a rank, what each blocked rank is told."""

from __future__ import annotations

import random
from itertools import product

import pytest

from arachnec.ir.diagnostic import Diagnostic, Span, UserError
from arachnec.pipelining.action import KINDS, Action, PipelineSchedule
from arachnec.pipelining.csv_format import require_valid
from arachnec.pipelining.evaluate import StageTimes, evaluate, held, uniform_times
from arachnec.pipelining.hybrid_plan import POLICIES, allocate
from arachnec.pipelining.order_problem import OrderProblem, like_1f1b
from arachnec.pipelining.order_search import list_schedule, plan_order
from arachnec.pipelining.schedules import dapple_in_turns, interleaved_1f1b
from tests.pipelining.torch_orders import parse_schedule


def refused(text: str) -> Diagnostic:
    with pytest.raises(UserError) as caught:
        require_valid(parse_schedule(text))
    return caught.value.diagnostics[0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_three_stages_a_rank_never_wait_for_each_others_memory(seed: int, split: bool) -> None:
    """Of what has begun on a rank everything counts that it holds, whichever stage it has come to."""
    rng = random.Random(seed)
    ranks, count = rng.choice((1, 2)), rng.randint(2, 4)
    placement = tuple(stage % ranks for stage in range(3 * ranks))

    def table() -> list[list[int]]:
        return [[rng.randint(1, 4) for _ in range(count)] for _ in placement]

    times, saved = StageTimes(table(), table(), table()), table()
    hosted = [[stage for stage, own in enumerate(placement) if own == rank] for rank in range(ranks)]
    alone = [max(sum(saved[stage][m] for stage in own) for m in range(count)) for own in hosted]
    limits = [need + rng.randint(0, 4) for need in alone]
    makespan, schedule = list_schedule(OrderProblem(times, saved, limits, placement), range(count), split)
    require_valid(schedule, len(placement), count)
    assert all(most <= limit for most, limit in zip(held(schedule, saved), limits, strict=True))
    assert evaluate(schedule, times).makespan == makespan


@pytest.mark.parametrize("split", [False, True])
def test_one_micro_batch_has_one_order(split: bool) -> None:
    problem = OrderProblem(StageTimes([[2], [3]], [[2], [3]], [[1], [1]]), [[1], [1]], [1, 1], (0, 1))
    plan = plan_order(problem, split=split, tries=3)
    assert plan.makespan == (2 + 3 + 3 + 2 + 1 if split else 2 + 3 + 4 + 3)
    assert plan.gap == plan.makespan / plan.bound - 1 < 0.2


def test_every_micro_batch_has_a_forward_and_a_backward_whole_or_in_both_halves() -> None:
    """Of every set of kinds what is told to be lacking."""
    for chosen in product((False, True), repeat=len(KINDS)):
        kinds = {kind for kind, there in zip(KINDS, chosen, strict=True) if there}
        if "F" not in kinds or {"B", "I"} <= kinds or {"B", "W"} <= kinds or kinds == {"F", "W"}:
            continue  # told as work that stands too early or in both ways
        lacking = {"F": "B", "FI": "W"}.get("".join(kind for kind in "FBIW" if kind in kinds))
        text = " ".join(["0F0 0B0", *(f"0{kind}1" for kind in "FBIW" if kind in kinds)])
        if lacking is None:
            require_valid(parse_schedule(text))
            continue
        problem = refused(text)
        assert problem.message.endswith(" of micro-batch 1")
        assert problem.help == f"add `0{lacking}1` to the row of rank 0"


def test_idle_time_is_a_share_of_all_ranks_time() -> None:
    schedule = PipelineSchedule(((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))))
    evaluation = evaluate(schedule, uniform_times(2, 1, 1, 1, 1))
    assert evaluation.makespan == 6
    assert evaluation.idle == (3, 3)
    assert evaluation.bubble == 0.5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_machine_gives_nothing(policy: str) -> None:
    assert allocate(policy, (4, 1, 0), 4, 7) == (0, 3, 4)
    with pytest.raises(ValueError, match="too few"):
        allocate(policy, (4, 1, 0), 4, 8)
    first = {"fresh-first": (0, 0, 2), "append-first": (0, 2, 0), "scatter-first": (0, 2, 0)}
    assert allocate(policy, (4, 1, 0), 4, 2) == first[policy]


def test_one_stage_may_hold_what_1f1b_holds_of_it() -> None:
    problem = like_1f1b(StageTimes([[1, 2, 3]], [[1, 2, 3]], [[1, 2, 3]]), [[5, 7, 6]])
    assert (list(problem.limits), problem.placement) == ([7], (0,))


@pytest.mark.parametrize(
    ("orders", "given", "places"),
    [
        ("", {}, [(0, 0)]),
        ("0F0 0B0\n", {}, [(1, 0)]),
        ("0F0 0B0", {"stages": 2}, [(0, 0)]),
        ("0F0 0B0", {"micro_batches": 2}, [(0, 0)]),
        ("0F0 0B0\n2F0 2B0", {}, [(0, 0)]),
        ("0F0 0B0\n1F0", {}, [(1, 0)]),
        ("0F0 0B0 0F0\n1F0 1B0", {}, [(0, 2)]),
        ("0F0 0B0\n1F0 1B0 0F1", {}, [(1, 2)]),
        ("0F0 0B0 0I0", {}, [(0, 2)]),
        ("0F1 0B1 0B0 0F0", {}, [(0, 2)]),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", {}, [(0, 1)]),
    ],
)
def test_a_message_points_at_the_action_that_has_to_change(
    orders: str, given: dict[str, int], places: list[tuple[int, int]]
) -> None:
    """Rank and position, from 0; the row where something lacks."""
    rows = [row.split() for row in orders.split("\n")]
    words = [[Action(int(word[0]), word[1], int(word[2])) for word in row] for row in rows]
    with pytest.raises(UserError) as caught:
        require_valid(
            PipelineSchedule(tuple(map(tuple, words))),
            place=lambda r, p: Span("x", r + 1, p + 1, r + 1, p + 2),
            **given,
        )
    assert [(d.span.line - 1, d.span.column - 1) for d in caught.value.diagnostics if d.span is not None] == places


def test_what_has_no_action_has_no_stage_and_no_micro_batch() -> None:
    for orders in ((), ((), ())):
        empty = PipelineSchedule(orders)
        assert (empty.stages, empty.micro_batches, empty.placement, empty.splits_backward) == (0, 0, (), False)
    assert parse_schedule("0F0 0B0 0F1 0I1 0W1").splits_backward, "one backward in halves is enough"
    assert not parse_schedule("0F0 0B0").splits_backward


@pytest.mark.parametrize("table", range(6))
@pytest.mark.parametrize(("row", "length"), [(0, 1), (1, 3)])
def test_times_are_for_others_where_one_row_is_shorter_or_longer(table: int, row: int, length: int) -> None:
    """Three stages, two micro-batches."""
    tables = [[[1] * 2 for _ in range(3 if k < 4 else 2)] for k in range(6)]
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1")
    assert evaluate(schedule, StageTimes(*tables)).makespan == 12
    tables[table][row] = [1] * length
    with pytest.raises(UserError, match=f"the schedule has {len(tables[table])} x 2"):
        evaluate(schedule, StageTimes(*tables))


@pytest.mark.parametrize(("replicas", "fewest"), [((0, 2), 0), ((2, 0), 0), ((), 0), ((3, -1), -1)])
def test_every_stage_has_a_replica(replicas: tuple[int, ...], fewest: int) -> None:
    with pytest.raises(UserError, match=f"^a pipeline schedule with the fewest replicas = {fewest}$"):
        dapple_in_turns(replicas, 4)


def test_what_cannot_be_interleaved_is_told_the_next_number_of_micro_batches_that_can() -> None:
    for ranks, count in product(range(1, 6), range(1, 24)):
        fitting = [m for m in range(count, count + ranks) if m % max(1, m // ranks) == 0]
        if count in fitting:
            interleaved_1f1b(ranks, count, 2)
            continue
        with pytest.raises(UserError) as caught:
            interleaved_1f1b(ranks, count, 2)
        (problem,) = caught.value.diagnostics
        told = next(m for m in range(count, 99) if m % ranks == 0)
        assert f"give {told} micro-batches" in problem.help
        interleaved_1f1b(ranks, told, 2)
