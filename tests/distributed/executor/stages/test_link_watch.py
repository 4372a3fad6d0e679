"""Plans follow the links' measured speeds: what is concluded from the notes of all ranks, and when plans change."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.executable.folder import MEASURED_PROGRAM, read_executable
from arachnec.ir.nodes import integer, quantity
from arachnec.ir.parser import parse_module
from arachnec.runtime.replanning import EVERY, LinkWatch, Message, Notes, measured_speeds
from tests.distributed.executor_cases import clip, losses, train_on
from tests.distributed.pipeline_cases import executable, pipeline_of

MB = 1_000_000


def notes(travel: float, offset: float, queued: float = 0.0) -> list[Notes]:
    """Rank 1's clock is ``offset`` s ahead. Two messages there, of which one stood in a queue, and two back."""
    there = [Message("f0", 1, MB, 0.0), Message("f1", 1, MB, 1.0)]
    back = [Message("b0", 0, MB, offset + 2.0), Message("b1", 0, MB, offset + 3.0)]
    arrived = [Message("f0", 0, MB, offset + travel), Message("f1", 0, MB, offset + 1 + travel + queued)]
    returned = [Message("b0", 1, MB, 2 + travel + queued), Message("b1", 1, MB, 3 + travel)]
    return [Notes(there, returned), Notes(back, arrived)]


@pytest.mark.parametrize("offset", [0.0, 5.0, -300.0])
def test_speeds_do_not_depend_on_clocks_or_queues(offset: float) -> None:
    assert measured_speeds(notes(0.1, offset, queued=0.7)) == pytest.approx({(0, 1): MB / 0.1 / 1e9})


def test_a_link_without_messages_both_ways_says_nothing() -> None:
    first, second = notes(0.1, 0.0)
    assert measured_speeds([Notes(first.sent, []), Notes([], second.arrived)]) == {}


def test_plans_change_at_most_every_few_steps_and_only_for_what_differs() -> None:
    """A link that drops to a tenth and recovers, measured behind every step; noise changes nothing."""
    watch, changes = LinkWatch(), []
    for step in range(48):
        speed = (0.1 if 16 <= step < 32 else 1.0) * (1.2 if step % 2 else 0.9)
        if watch.due(step) and (after := watch.after(step, {(0, 1): speed})) is not watch:
            watch, _ = after, changes.append(step)
    assert changes == [EVERY, 16, 32]


def test_a_run_plans_anew_for_what_it_measured_and_trains_the_same(tmp_path: Path) -> None:
    """The cluster file's links are not this machine's, so plans change; losses are those of the fixed k."""
    clips = tuple(clip(name, 3) for name in "abcd")
    steps = EVERY + 5  # behind step EVERY + 1 plans change, from the third step after it on
    adaptive = executable(tmp_path / "adaptive", 2, [clips], pipeline_of("p=2", "schedule=kfkb"))
    fixed = executable(tmp_path / "fixed", 2, [clips], pipeline_of("p=2", "schedule=kfkb,k=1"))
    for folder in (adaptive, fixed):
        train_on(2, folder, steps=steps)
    assert losses(adaptive / "run.json") == pytest.approx(losses(fixed / "run.json"), rel=1e-12)
    assert "measured" not in read_executable(adaptive).program.cluster.attrs  # type: ignore[union-attr]
    last = parse_module((adaptive / MEASURED_PROGRAM).read_text())
    assert last.cluster is not None
    ((a, b, speed),) = last.cluster.attrs["measured"]  # type: ignore[misc]
    assert (integer(a), integer(b)) == (0, 1)
    assert quantity(speed) > 0
    assert integer(last.attrs["grouping"]) >= 1
