"""Which measurement comes when, in a budget."""

import math

import pytest

from arachnec.profiling import in_turns
from arachnec.profiling.in_turns import Budget, Point, Turn, counted, expected_s, telling_order
from tests.distributed.executor_cases import clip


def turn(tokens: int | None, batch: int = 1, kind: str = "dit", *, extra: bool = False) -> Turn:
    point = None if tokens is None else Point((clip("a", 1),) * batch, tokens)
    return Turn((kind,), point, f"{kind} of {tokens}", extra)


def test_the_shortest_and_the_end_come_first_then_the_longest_then_the_middle_of_the_widest_gap() -> None:
    turns = [turn(10, 4), *map(turn, (10, 20, 40, 80, 160, 1280)), turn(None), turn(30, extra=True)]
    order, always = telling_order(turns)
    assert [turns[index].doing for index in order[:always]] == ["dit of 10", "dit of None"]
    rest = [turns[index] for index in order[always:]]
    assert [row.point.tokens for row in rest if row.point][:2] == [1280, 160] or rest[1].point == turns[0].point
    assert rest[0].point is not None and rest[0].point.tokens == 1280
    assert rest[-1].extra
    assert sorted(order) == list(range(len(turns)))


def test_what_a_longer_clip_will_take_grows_with_the_square_of_its_size() -> None:
    turns = [turn(10), turn(100), turn(5), turn(100, kind="vae")]
    assert [expected_s(turns, index, {0: 1.0}) for index in (1, 2, 3)] == [pytest.approx(100.0), 0.5, 0.0]


def test_a_first_time_counts_only_where_it_is_alone() -> None:
    assert counted([[9, 1, 2], [9], []]) == [[1, 2], [9], []]


def test_what_does_not_fit_is_left_out_and_what_was_found_is_kept_after_every_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(in_turns.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(in_turns.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(in_turns, "gather", lambda own: [own])
    turns = [turn(10), turn(None), turn(100), turn(1000)]
    takes = [1.0, 1.0, 10.0, 1000.0]
    kept: list[list[list[float]]] = []
    said: list[str] = []

    def run(index: int) -> float:
        now[0] += takes[index]
        return takes[index]

    times = in_turns.in_turns(turns, run, Budget(150.0, 0.0), said.append, kept.append)
    assert times[3] == []
    assert all(set(runs) == {takes[index]} for index, runs in enumerate(times[:3]))
    assert 0 < now[0] <= 150.0 + 12.0
    assert len(kept[0][0]) == 1 and kept[0][2] == []
    assert said[0].startswith("measuring 1 of 4: dit of 10, 150 s left")
    assert math.isclose(min(map(len, times[:3])), max(map(len, times[:3])))
