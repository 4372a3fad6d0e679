"""Clips are loaded before their encoders run: videos decoded, captions tokenized, in threads of their own.

A rank's program says in which order it will encode, so what is loaded ahead is what is wanted next, of this step or of
the next. How much is ahead is bounded by its size on the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from arachnec.backends.torch_distributed.batches.set_aside import is_unreadable, reason_of
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Program
from arachnec.kernels.attention.sequence_shard import even_split
from arachnec.runtime.device_runtime import DeviceRuntime

HOST_BYTES = 2 * 2**30  # of pixels that are loaded, and not yet encoded
HOST = torch.device("cpu")
TRIES = 3  # for a clip that cannot be loaded
BETWEEN_TRIES_S = 0.2
Key = tuple[int, str, str | int]  # step, encoder, clip


class LoadAhead:
    """What one rank's encoders will read. Only the training thread calls its methods."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        encoders: Mapping[str, nn.Module],
        runtime: DeviceRuntime,
        host_bytes: int = HOST_BYTES,
        in_step: Callable[[VideoClip, int], VideoClip] = lambda clip, step: clip,
    ) -> None:
        """``in_step`` says what is read of a clip in a step."""
        self._in_step = in_step
        self._threads = threads
        self._encoders = encoders
        self._runtime = runtime
        self._host_bytes = host_bytes
        self._todo: deque[tuple[Key, VideoClip]] = deque()
        self._loading: dict[Key, tuple[Future[Tensor], int]] = {}
        self._wanted: set[int] = set()  # steps
        self.unreadable: dict[str | int, str] = {}  # clips that could not be loaded, and why

    def want(self, step: int, clips: Iterable[tuple[str, VideoClip]]) -> None:
        """Load these for ``step``, encoder by encoder and clip, behind all that was wanted before; once a step."""
        if step in self._wanted:
            return
        self._wanted = {known for known in self._wanted if known >= step - 1} | {step}
        self._todo.extend(((step, stage, clip.id), self._in_step(clip, step)) for stage, clip in clips)
        self._fill()

    def take_readable(self, step: int, stage: str, clip: VideoClip) -> Tensor | None:
        """As ``take``; None for a clip that cannot be read, which is then among the ``unreadable``."""
        try:
            taken = self.take(step, stage, clip)
        except Exception as error:
            if not is_unreadable(error):
                raise
            self.unreadable[clip.id] = reason_of(error)
            self._fill()
            return None
        self.unreadable.pop(clip.id, None)
        return taken

    def take(self, step: int, stage: str, clip: VideoClip) -> Tensor:
        """A clip for its encoder, on the device, waited for; loaded now where nobody wanted it.

        Raises what kept a clip from being loaded.
        """
        key = (step, stage, clip.id)
        if key not in self._loading:
            self._todo = deque(item for item in self._todo if item[0] != key)
            loaded = self._load(stage, self._in_step(clip, step))
        else:
            loading, _ = self._loading.pop(key)
            loaded = loading.result()
        self._fill()
        copied: Tensor = self._runtime.to_device(loaded).ready()
        return copied

    def _fill(self) -> None:
        held = sum(size for _, size in self._loading.values())
        while self._todo and (not self._loading or held + pixels(self._todo[0][1]) <= self._host_bytes):
            key, clip = self._todo.popleft()
            if key in self._loading:
                continue
            self._loading[key] = self._threads.submit(self._load, key[1], clip), pixels(clip)
            held += pixels(clip)

    def _load(self, stage: str, clip: VideoClip) -> Tensor:
        """On the host, from where the device can copy it without anybody waiting: what waits takes no device memory."""
        load = self._encoders[stage].load
        assert callable(load)
        for _ in range(TRIES - 1):
            try:
                return self._runtime.pinned(load(clip, HOST))
            except Exception as error:
                if not is_unreadable(error):
                    raise
                time.sleep(BETWEEN_TRIES_S)
        return self._runtime.pinned(load(clip, HOST))


def encoded_here(
    program: Program, cascades: Mapping[str, Cascade], clips: Mapping[int, VideoClip]
) -> list[tuple[str, VideoClip]]:
    """What this rank's encoders read, in the order of its program: encoder and clip."""
    wanted: list[tuple[str, VideoClip]] = []
    for step in program.instructions:
        if step.op == "encode":
            cascade = cascades[step.target]
            wanted += [(cascade.stage, clips[clip]) for clip in own_clips(cascade.clips, step.peers, program.rank)]
    return wanted


def own_clips(clips: Sequence[int], ranks: Sequence[int], rank: int) -> Sequence[int]:
    """Those of an encoder's clips that fall to ``rank``: all where there are not enough for every rank to have one."""
    if not 1 < len(ranks) <= len(clips):
        return clips
    sizes = even_split(len(clips), len(ranks))
    place = list(ranks).index(rank)
    return clips[sum(sizes[:place]) : sum(sizes[: place + 1])]


def pixels(clip: VideoClip) -> int:
    """Bytes of a clip's pixels."""
    return 3 * clip.frames * clip.height * clip.width
