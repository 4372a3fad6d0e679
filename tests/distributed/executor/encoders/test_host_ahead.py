"""A host ahead of its device: nothing is read back while a step is queued, clips are loaded before they are wanted."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.backends.torch_distributed import engine
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead, encoded_here, own_clips
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run import training_run
from arachnec.data.clip import VideoClip
from arachnec.data.video import UnreadableVideo
from arachnec.executable.folder import read_executable
from arachnec.ir.diagnostic import UserError
from arachnec.runtime.device_runtime import DeviceRuntime
from tests.distributed.executor_cases import Work, clip, executable, lowered, traced
from tests.distributed.harness import run_ranks
from tests.distributed.rank_device import rank_device

CLIPS = [clip(name, frames) for name, frames in zip("abcd", (1, 2, 3, 2), strict=True)]
EQUAL = [clip(name, frames) for name, frames in zip("abcd", (2, 2, 3, 2), strict=True)]
PLAN = [  # of these
    Work((0, 1), (0, 1), 0, "vae"),
    Work((2,), (1,), 1, "vae"),
    Work((3,), (1,), 2, "vae"),
    Work((0,), (0, 1), 3, inputs=("c0",)),
    Work((1,), (0,), 4, inputs=("c0",)),
    Work((2,), (1,), 4, inputs=("c1",)),
    Work((3,), (0, 1), 5, inputs=("c2",)),
]
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")


class Noted(TorchDispatchMode):
    """The operations of this thread that hand a tensor's value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func.name().partition(".")[0]
        self.count += 1
        if name in READS:
            self.reads.append(name + "".join(traceback.format_stack(limit=6)))
        return func(*args, **(kwargs or {}))


def train_noted(folder: Path) -> tuple[list[str], int]:
    """What is read from the start of an iteration until AdamW steps, which counts on the host; how much runs at all."""
    noted, running = Noted(), list[bool]()
    run, step = training_run.run_iteration, torch.optim.AdamW.step

    def iteration(*arguments: Any) -> Any:
        noted.__enter__()
        running.append(True)
        return run(*arguments)

    def stepped(self: torch.optim.AdamW) -> Any:
        if running:  # and not a step that measures what an optimizer keeps
            running.clear()
            noted.__exit__(None, None, None)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "run_iteration", iteration)
        patch.setattr(torch.optim.AdamW, "step", stepped)
        engine.train(read_executable(folder), RunOptions(clip_norm=0.1), rank_device())
    return noted.reads, noted.count


def test_no_value_is_read_between_the_first_forward_and_the_optimizer(tmp_path: Path) -> None:
    for reads, count in run_ranks(2, train_noted, executable(tmp_path, [EQUAL], PLAN, 2, encoder=True)):
        assert count > 100
        assert not reads


def test_a_read_would_be_noted() -> None:
    with Noted() as noted:
        float(torch.ones(1).sum())
    assert len(noted.reads) == 1


class Loads(nn.Module):
    """Notes what is loaded, where, and waits for a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.threads: set[str] = set()
        self.go = threading.Event()

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        assert self.go.wait(30)
        self.loaded.append(str(clip.id))
        self.threads.add(threading.current_thread().name)
        if clip.id == "broken":
            raise UserError(UnreadableVideo(None, "broken.mp4", "it is"))
        return torch.full((1,), float(clip.frames))


def ahead(host_bytes: int) -> tuple[LoadAhead, Loads]:
    encoder = Loads()
    runtime = DeviceRuntime.of(torch.device("cpu"))
    return LoadAhead(ThreadPoolExecutor(1, "loads"), {"vae": encoder}, runtime, host_bytes), encoder


def test_clips_are_loaded_in_order_and_of_the_next_step_too() -> None:
    loads, encoder = ahead(10**9)
    loads.want(0, [("vae", CLIPS[0]), ("vae", CLIPS[1])])
    loads.want(1, [("vae", CLIPS[1])])
    loads.want(1, [("vae", CLIPS[1])])  # once a step
    encoder.go.set()
    assert float(loads.take(0, "vae", CLIPS[0])) == 1.0
    assert float(loads.take(0, "vae", CLIPS[1])) == 2.0
    assert float(loads.take(1, "vae", CLIPS[1])) == 2.0
    assert encoder.loaded == ["a", "b", "b"]
    assert encoder.threads == {"loads_0"}


def test_no_more_is_ahead_than_fits_and_one_always_is() -> None:
    loads, encoder = ahead(1)
    encoder.go.set()
    loads.want(0, [("vae", clip) for clip in CLIPS])
    assert len(loads._loading) == 1
    assert float(loads.take(0, "vae", CLIPS[0])) == 1.0
    assert list(loads._loading) == [(0, "vae", "b")]


def test_what_nobody_wanted_is_loaded_at_once() -> None:
    loads, encoder = ahead(1)
    encoder.go.set()
    assert float(loads.take(0, "vae", CLIPS[2])) == 3.0
    assert encoder.threads == {threading.current_thread().name}


def test_a_clip_that_cannot_be_read_is_told_where_it_is_wanted() -> None:
    loads, encoder = ahead(10**9)
    encoder.go.set()
    loads.want(0, [("vae", replace(CLIPS[0], id="broken"))])
    with pytest.raises(UserError):
        loads.take(0, "vae", replace(CLIPS[0], id="broken"))


def test_every_rank_wants_what_its_program_encodes_there() -> None:
    module = lowered(traced(2, [EQUAL], encoder=True), PLAN)
    cascades = {cascade.name: cascade for cascade in module.cascades}
    wanted = [encoded_here(program, cascades, dict(enumerate(EQUAL))) for program in module.programs]
    assert [[clip.id for _, clip in of_rank] for of_rank in wanted] == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize(("clips", "ranks"), [(5, 3), (4, 4), (2, 3), (3, 1)])
def test_an_encoders_clips_are_all_somebodys(clips: int, ranks: int) -> None:
    shares = [own_clips(range(clips), range(ranks), rank) for rank in range(ranks)]
    if ranks <= clips:
        assert [number for share in shares for number in share] == list(range(clips))
    else:
        assert all(list(share) == list(range(clips)) for share in shares)
