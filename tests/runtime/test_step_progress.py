"""What a rank waits for at each of its instructions, by its program and those of the others."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from arachnec.ir.nodes import Instruction, Module
from arachnec.launch.phases import Position
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.step_progress import Clock, StepProgress, described, named
from tests.distributed.executor_cases import Work, clip, lowered, traced

CLIPS = [clip("a", 2), clip("b", 3)]
WORKS = [
    Work((0,), (0,), 0, "vae"),
    Work((1,), (1,), 0, "vae"),
    Work((0,), (0, 1), 1, inputs=("c0",)),
    Work((1,), (0,), 2, inputs=("c1",)),
]


@pytest.fixture
def module() -> Module:
    return lowered(traced(2, [CLIPS], encoder=True), WORKS)


def progress_of(module: Module, rank: int, clock: Any = None) -> StepProgress:
    clips = dict(enumerate(CLIPS))
    own_clock = clock or Clock(rank, DeviceRuntime.of(torch.device("cpu")))
    return StepProgress(module, rank, 7, clips, own_clock, lambda instruction: 60.0)


def index_of(module: Module, rank: int, op: str, target: str) -> int:
    steps = next(p.instructions for p in module.programs if p.rank == rank)
    return next(i for i, step in enumerate(steps) if (step.op, step.target) == (op, target))


def awaited(module: Module, rank: int, op: str, target: str) -> dict[int, Position]:
    return progress_of(module, 0).awaited(rank, Position(7, index_of(module, rank, op, target)))


def test_a_rank_waits_for_its_group_for_who_sends_and_for_all_at_the_step(module: Module) -> None:
    assert awaited(module, 0, "encode", "c0") == {}
    both = awaited(module, 1, "forward", "c2")
    assert both == {0: max(Position(7, index_of(module, 0, op, t)) for op, t in (("send", "c0"), ("forward", "c2")))}
    assert awaited(module, 0, "forward", "c3") == {1: Position(7, index_of(module, 1, "send", "c1") + 1)}
    assert awaited(module, 0, "step", "dit") == {1: Position(7, index_of(module, 1, "reduce", "dit") + 1)}
    length = len(module.programs[1].instructions)
    assert progress_of(module, 0).awaited(0, Position(7, 100)) == {1: Position(7, length)}


def test_nobody_is_awaited_between_steps_nor_in_another(module: Module) -> None:
    progress = progress_of(module, 0)
    assert progress.awaited(0, Position(7, -1)) == {}
    assert progress.awaited(0, Position(6, 3)) == {}
    assert progress.awaited(5, Position(7, 3)) == {}


def test_a_place_names_the_instruction_and_its_clips(module: Module) -> None:
    progress = progress_of(module, 1)
    assert progress.place().doing == "its preparation"
    progress.at(index_of(module, 1, "forward", "c2"))
    place = progress.place()
    assert (place.doing, place.limit, place.position.step) == ("forward %c2 (clip a)", 60.0, 7)
    with progress.encoding_ahead(module.cascades[1], [CLIPS[clip] for clip in module.cascades[1].clips], 8):
        assert progress.place().doing == "encode %c1 of step 8 (clip b)"
        assert progress.awaited(1, Position(7, index_of(module, 1, "step", "dit"))) == {}
    progress.at(100)
    assert progress.place().doing == "the end of the step"


def test_the_work_of_another_rank_is_what_it_has_with_clips_up_to_a_position(module: Module) -> None:
    progress = progress_of(module, 0)
    before = Position(7, index_of(module, 1, "forward", "c2"))
    assert progress.work(1, before) == "encode %c1 (clip b), forward %c2 (clip a)"
    assert progress.work(1, None) == f"{progress.work(1, before)}, backward %c2 (clip a)"
    assert progress.work(5, None) == "nothing"


@dataclass
class Behind:
    """A clock whose device is behind its host."""

    at: tuple[str, str] | None

    def under_way(self) -> tuple[str, str] | None:
        return self.at


@pytest.mark.parametrize(
    ("device", "doing"),
    [
        (("backward", "c2"), "backward %c2 (clip a)"),
        (("wait", "c1"), "forward %c3 (clip b)"),
        (("reduce", "dit"), "step @dit"),
        (None, "the end of the step"),
    ],
)
def test_of_a_host_and_its_device_the_one_behind_counts(module: Module, device: Any, doing: str) -> None:
    progress = progress_of(module, 0, Behind(device))
    progress.at(100)
    place = progress.place()
    assert place.doing == doing
    assert place.seconds < time.monotonic() and not math.isinf(place.seconds)


def test_many_clips_are_counted() -> None:
    assert named(["a"]) == "clip a"
    assert named(list("abcdef")) == "clips a, b, c, d and 2 more"


def test_an_instruction_without_a_cascade_is_of_its_stage(module: Module) -> None:
    assert described(Instruction("reduce", "dit", (0, 1)), {}, {}) == "reduce @dit"
