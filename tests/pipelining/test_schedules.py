"""Orders equal those that torch executes; their makespan and what they hold are the closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.action import Action, PipelineSchedule
from arachnec.pipelining.csv_format import require_valid
from arachnec.pipelining.evaluate import Evaluation, StageTimes, evaluate, uniform_times
from arachnec.pipelining.schedules import (
    dapple,
    dapple_in_turns,
    gpipe,
    interleaved_1f1b,
    kfkb,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from tests.pipelining.torch_orders import executed, held_micro_batches, orders_of, parse_schedule, planned

SIZES = [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 4 * p)]
ODD_SIZES = [*SIZES, (3, 7), (5, 20), (4, 5), (1, 3)]
# F, I, W: equal, ascending, descending, and fractions that floats would round
DURATIONS = [(1, 1, 1), (2, 3, 1), (5, 4, 3), (Fraction(1, 3), Fraction(1, 7), Fraction(1, 11))]


def run(schedule: PipelineSchedule, f: float, i: float, w: float, c: float = 0) -> Evaluation:
    return evaluate(schedule, uniform_times(schedule.stages, schedule.micro_batches, f, i, w, c))


def bubble(evaluation: Evaluation) -> Fraction:
    return Fraction(sum(evaluation.idle)) / (len(evaluation.busy) * Fraction(evaluation.makespan))


@pytest.mark.parametrize(("p", "m"), ODD_SIZES)
def test_gpipe_and_1f1b_are_what_torch_executes(p: int, m: int) -> None:
    assert gpipe(p, m) == executed("GPipe", p, m)
    assert one_f_one_b(p, m) == executed("1F1B", p, m)


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 3), (4, 10), (3, 8)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaving_is_what_torch_executes(p: int, m: int, v: int) -> None:
    assert interleaved_1f1b(p, m, v) == orders_of(planned("Interleaved1F1B", p, v, m))


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 3), (1, 3), (5, 20)])
def test_zero_bubble_is_what_torch_executes(p: int, m: int) -> None:
    assert zb_h1(p, m) == orders_of(planned("InterleavedZeroBubble", p, 1, m))
    assert zb_v(p, m) == orders_of(planned("ZBVZeroBubble", p, 2, m))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), DURATIONS)
def test_gpipe_and_1f1b_have_their_closed_forms(p: int, m: int, f: int, i: int, w: int) -> None:
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        evaluation = run(schedule, f, i, w)
        assert evaluation.makespan == (m + p - 1) * (f + i + w)
        assert bubble(evaluation) == Fraction(p - 1, m + p - 1)
    assert held_micro_batches(gpipe(p, m)) == (m,) * p
    assert held_micro_batches(one_f_one_b(p, m)) == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaving_has_its_closed_forms(p: int, m: int, v: int) -> None:
    schedule = interleaved_1f1b(p, m, v)
    for f, i, w in DURATIONS:
        evaluation = run(schedule, f, i, w)
        assert evaluation.makespan == (v * m + p - 1) * (f + i + w)
        assert bubble(evaluation) == Fraction(p - 1, v * m + p - 1)
    expected = tuple(min(v * m, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p))
    assert held_micro_batches(schedule) == expected


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), DURATIONS)
def test_zb_h1_has_its_closed_forms_where_weight_gradients_are_the_shortest(
    p: int, m: int, f: int, i: int, w: int
) -> None:
    evaluation = run(zb_h1(p, m), f, i, w)
    assert evaluation.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
    assert held_micro_batches(zb_h1(p, m)) == (p,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v_has_its_closed_forms(p: int, m: int) -> None:
    evaluation = run(zb_v(p, m), 1, 1, 1)
    assert evaluation.makespan == 6 * m + (p - 1) * (2 if m == p else 1)
    if m > p:
        assert bubble(evaluation) == Fraction(p - 1, 6 * m + p - 1)
    assert held_micro_batches(zb_v(p, m)) == tuple(2 * p if m > p else p + 1 + r for r in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 2), (3, 2, 1), (2, 3, 2)])
def test_zb_h2_idles_only_as_published(p: int, m: int, f: int, i: int, w: int) -> None:
    """Between its own first and last action a rank idles (p-1)(F+I-2W), where the micro-batches are enough."""
    schedule = zb_h2(p, m)
    evaluation = run(schedule, f, i, w)
    assert max(held_micro_batches(schedule)) == min(m, 2 * p - 1)
    if m >= 2 * p - 1:
        spans = [end[-1] - start[0] for start, end in zip(evaluation.start, evaluation.end, strict=True)]
        assert max(spans) == m * (f + i + w) + (p - 1) * (f + i - 2 * w)
    if f == i == w and m >= 2 * p - 1:
        assert evaluation.makespan == (3 * m + p - 1) * f


def orders_of_a_rank(stage: int, m: int, most: int) -> Iterator[tuple[str, ...]]:
    """Every order of one rank, micro-batches in turn within a kind, with at most ``most`` held."""

    def extended(order: tuple[str, ...], f: int, i: int, w: int) -> Iterator[tuple[str, ...]]:
        if w == m:
            yield order
        if f < m and f - w < most:
            yield from extended((*order, f"{stage}F{f}"), f + 1, i, w)
        if i < f:
            yield from extended((*order, f"{stage}I{i}"), f, i + 1, w)
        if w < i:
            yield from extended((*order, f"{stage}W{w}"), f, i, w + 1)

    yield from extended((), 0, 0, 0)


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (3, 2, 1), (2, 3, 2)])
def test_no_order_in_the_memory_of_zb_h2_has_a_smaller_longest_span(m: int, f: int, i: int, w: int) -> None:
    p = 2

    def longest_span(schedule: PipelineSchedule) -> float:
        evaluation = run(schedule, f, i, w)
        return max(end[-1] - start[0] for start, end in zip(evaluation.start, evaluation.end, strict=True))

    least = None
    for first in orders_of_a_rank(0, m, 2 * p - 1):
        for last in orders_of_a_rank(1, m, 2 * p - 1):
            with suppress(UserError):  # deadlocked pairs
                span = longest_span(parse_schedule(f"{' '.join(first)}\n{' '.join(last)}"))
                least = span if least is None else min(least, span)
    assert longest_span(zb_h2(p, m)) == least


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), DURATIONS)
def test_kfkb_has_its_closed_forms(p: int, m: int, f: int, i: int, w: int) -> None:
    for c in (Fraction(1, 2) * min(f, i + w), min(f, i + w)):
        single = run(kfkb(p, m, 1), f, i, w, c).makespan
        assert single == (m + p - 1) * (f + i + w) + 2 * c * (Fraction((p - 1) * m, p) + p - 2)
        for k in (2, p):
            schedule = kfkb(p, m, k)
            assert run(schedule, f, i, w, c).makespan == (m + p - 1) * (f + i + w) + 2 * (p - 1) * c
            assert held_micro_batches(schedule) == tuple(k * min(p - r, -(-m // k)) for r in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dapple_warms_up_by_its_policies_and_never_above_memory(p: int, m: int) -> None:
    assert dapple(p, m, "A") == one_f_one_b(p, m)
    for policy, wanted in (("A", lambda r: p - r), ("B", lambda r: 2 * (p - r) - 1)):
        for most in (1, 2, p, 2 * p):
            schedule = dapple(p, m, policy, most)
            assert held_micro_batches(schedule) == tuple(min(wanted(r), most, m) for r in range(p))
            for rank, order in enumerate(schedule.orders):
                ahead = [action.kind for action in order].index("B")
                assert ahead == min(wanted(rank), most, m)
            require_valid(schedule, p, m)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 14), st.sampled_from("AB"))
def test_dapple_does_not_deadlock_where_ranks_hold_unequal_numbers(most: list[int], m: int, policy: str) -> None:
    schedule = dapple(len(most), m, policy, most)
    require_valid(schedule, len(most), m)
    assert all(held <= limit for held, limit in zip(held_micro_batches(schedule), most, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 20),
    st.sampled_from("AB"),
)
def test_replicas_in_turns_run_every_micro_batch_once_and_never_wait_for_each_other(
    stages: list[tuple[int, int]], m: int, policy: str
) -> None:
    """``stages``: replicas, and how many micro-batches one holds."""
    replicas, most = zip(*stages, strict=True)
    orders = dapple_in_turns(replicas, m, policy, most)
    done: set[Action] = set()
    left = [list(order) for own in orders for order in own]
    moved = True
    while moved:
        moved = False
        for order in left:
            while order and needed(order[0], len(stages)) <= done:
                done.add(order.pop(0))
                moved = True
    assert done == {Action(s, kind, n) for s in range(len(stages)) for kind in ("F", "B") for n in range(m)}
    for own, limit in zip(orders, most, strict=True):
        for order in own:
            held = [sum(1 if a.kind == "F" else -1 for a in order[: n + 1]) for n in range(len(order))]
            assert max(held, default=0) <= limit
    if set(replicas) == {1}:
        assert tuple(own[0] for own in orders) == dapple(len(stages), m, policy, most).orders


def needed(action: Action, stages: int) -> set[Action]:
    stage, kind, micro_batch = action
    if kind == "F":
        return {Action(stage - 1, "F", micro_batch)} if stage else set()
    return {Action(stage, "F", micro_batch)} | ({Action(stage + 1, "B", micro_batch)} if stage + 1 < stages else set())


def test_dapples_policy_b_hides_transfers_that_policy_a_does_not() -> None:
    slow = {policy: run(dapple(4, 16, policy), 1, 1, 1, 1).makespan for policy in ("A", "B")}
    assert slow["B"] < slow["A"]


ALL = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": lambda p, m: interleaved_1f1b(p, p * m, 2),
    "kfkb": lambda p, m: kfkb(p, m, 3),
    "dapple": lambda p, m: dapple(p, m, "B", 2),
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
}


@pytest.mark.parametrize("name", ALL)
@given(p=st.integers(1, 6), m=st.integers(1, 14))
def test_every_schedule_is_valid_for_every_size_and_its_words_are_read_back(name: str, p: int, m: int) -> None:
    schedule = ALL[name](p, m)
    require_valid(schedule)
    assert len(schedule.orders) == p
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 4), "stages = 0"),
        (lambda: kfkb(4, 4, 0), "k = 0"),
        (lambda: zb_v(2, -1), "micro batches = -1"),
        (lambda: interleaved_1f1b(4, 9, 2), "cannot be interleaved"),
        (lambda: dapple(4, 4, "C"), "warm-up policy `C`"),
        (lambda: dapple(4, 4, "A", (1, 1, 0, 2)), "rank 2 holds no micro-batch"),
        (lambda: dapple(4, 4, "A", (1, 1)), "limits for 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        make()
    assert len(refused.value.diagnostics) == 1


def test_times_for_another_schedule_are_refused() -> None:
    with pytest.raises(UserError, match="forward times are given for 2 x 5, but the schedule has 2 x 4"):
        evaluate(gpipe(2, 4), uniform_times(2, 5, 1, 1, 1))


def test_messages_of_one_link_and_direction_follow_each_other() -> None:
    """Forwards of length 1 over a link of 3: the last of four arrives at 1 + 4 x 3."""
    evaluation = evaluate(gpipe(2, 4), uniform_times(2, 4, 1, 1, 1, 3))
    assert evaluation.start[1][:4] == (4, 7, 10, 13)


@given(st.data())
def test_times_are_the_longest_path_in_the_graph_of_what_waits_for_what(data: st.DataObject) -> None:
    """Against the definition: an action starts when its rank's last, and its input's message, have ended."""
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    schedule = data.draw(st.sampled_from([gpipe(p, m), one_f_one_b(p, m), kfkb(p, m, 2), zb_h1(p, m), zb_v(p, m)]))
    stages = schedule.stages
    number = st.integers(0, 9)

    def table(rows: int) -> list[list[int]]:
        return [[data.draw(number) for _ in range(m)] for _ in range(rows)]

    drawn = StageTimes(*(table(rows) for rows in (stages, stages, stages, stages, stages - 1, stages - 1)))
    evaluation = evaluate(schedule, drawn)
    end = {a: e for o, ends in zip(schedule.orders, evaluation.end, strict=True) for a, e in zip(o, ends, strict=True)}
    rank_of = schedule.placement
    length = {"F": drawn.forward, "B": drawn.backward, "I": drawn.activation_gradient, "W": drawn.weight_gradient}
    arrival: dict[tuple[str, int, int], int] = {}
    links: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, order in enumerate(schedule.orders):
        for stage, kind, micro_batch in order:
            target = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= target < stages:
                continue
            sends = drawn.send_forward if kind == "F" else drawn.send_backward
            ready = end[stage, kind, micro_batch]
            if rank_of[target] != rank:
                sent = links.setdefault((rank, rank_of[target]), [])
                begin = max([ready, *(e for _, e in sent)])
                ready = begin + sends[min(stage, target)][micro_batch]
                sent.append((begin, ready))
            arrival["F" if kind == "F" else "B", target, micro_batch] = ready
    for sent in links.values():
        assert all(a[1] <= b[0] for a, b in combinations(sent, 2))
    for order, starts, ends in zip(schedule.orders, evaluation.start, evaluation.end, strict=True):
        for position, (action, start, stop) in enumerate(zip(order, starts, ends, strict=True)):
            stage, kind, micro_batch = action
            there = 0 if kind == "W" else arrival.get(("F" if kind == "F" else "B", stage, micro_batch), 0)
            assert start == max(there, ends[position - 1] if position else 0)
            assert stop == start + length[kind][stage][micro_batch]
