"""Decoding clips out of video files with PyAV (FFmpeg)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from arachnec.ir.diagnostic import Diagnostic, UserError

if TYPE_CHECKING:
    from torch import Tensor


REORDERING = 64  # packets; decoding order runs ahead of display order by at most 16 frames in H.264 and H.265


@dataclass(frozen=True)
class UnreadableVideo(Diagnostic):
    title: ClassVar[str] = "the video `{path}` cannot be decoded: {reason}"
    help: ClassVar[str] = "check that it plays; if it was copied, copy it again"
    path: str
    reason: str


@dataclass(frozen=True)
class TooFewFrames(Diagnostic):
    title: ClassVar[str] = "the video `{path}` gave {found} of the {wanted} frames wanted from frame {start} on"
    help: ClassVar[str] = "{remedy}"
    path: str
    found: int
    wanted: int
    start: int
    remedy: str


@dataclass(frozen=True)
class VideoHeader:
    """Frames as the header states them (counted where it does not), and pixels."""

    frames: int
    height: int
    width: int


def probe(path: str | Path) -> VideoHeader:
    """Read a video's sizes from its header. Raises ``UserError`` for a file without a readable video stream."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = _stream(container, path)
            frames = stream.frames or sum(packet.pts is not None for packet in container.demux(stream))
            return VideoHeader(frames, stream.height, stream.width)
    except (av.error.FFmpegError, OSError) as error:
        raise UserError(UnreadableVideo(None, str(path), _reason(error))) from None


def count_frames(path: str | Path) -> int:
    """The frames that are there, whatever the header states; nothing is decoded. Raises ``UserError`` as ``probe``."""
    import av

    try:
        with av.open(str(path)) as container:
            return sum(packet.pts is not None for packet in container.demux(_stream(container, path)))
    except (av.error.FFmpegError, OSError) as error:
        raise UserError(UnreadableVideo(None, str(path), _reason(error))) from None


def read_frames(path: str | Path, start: int, frames: int, height: int, width: int) -> Tensor:
    """Decode ``frames`` consecutive frames from frame ``start`` on, as uint8 RGB ``[3, frames, height, width]``.

    Each is scaled, keeping its aspect, to cover ``height`` x ``width`` (bicubic) and cropped at the centre. Raises
    ``UserError`` where the file is corrupt, or ends before the last frame.
    """
    import av
    import numpy
    import torch

    pictures = []
    failure = ""
    try:
        with av.open(str(path)) as container:
            stream = _stream(container, path)
            stated = stream.frames
            for frame in itertools.islice(_frames_from(container, stream, start), frames):
                pictures.append(_fitted(frame, height, width))
    except (av.error.FFmpegError, OSError) as error:
        if not pictures:
            raise UserError(UnreadableVideo(None, str(path), _reason(error))) from None
        failure = _reason(error)
    if len(pictures) < frames:
        promised = f"its header promises {stated}: the file is truncated or damaged; copy it again"
        short = "take fewer frames or an earlier start"
        damaged = failure or stated >= start + frames
        raise UserError(TooFewFrames(None, str(path), len(pictures), frames, start, promised if damaged else short))
    return torch.from_numpy(numpy.stack(pictures, axis=1))


def _stream(container: Any, path: str | Path) -> Any:
    if not container.streams.video:
        raise UserError(UnreadableVideo(None, str(path), "it has no video stream"))
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # ranks decode side by side; results do not depend on threads
    return stream


def _frames_from(container: Any, stream: Any, start: int) -> Iterator[Any]:
    """The decoded frames from the ``start``-th on, in display order, entered at the last keyframe before it.

    The packets' time stamps say where that frame is, also where the frame rate varies; reading them decodes nothing.
    """
    if start == 0:
        yield from container.decode(stream)
        return
    seen = (packet for packet in container.demux(stream) if packet.pts is not None and not packet.is_discard)
    packets = list(itertools.islice(seen, start + REORDERING))
    if start >= len(packets):
        return
    wanted = sorted(packet.pts for packet in packets)[start]
    # A frame before its keyframe in display order may follow it in the file and refer to frames before it, and some
    # containers seek by decoding time: so by that, to the last keyframe that is shown no later than what is wanted.
    entries = [packet for packet in packets if packet.is_keyframe and packet.pts <= wanted]
    for packet in (*entries[-1:], packets[0]):
        entry = packet.pts if packet.dts is None else packet.dts
        container.seek(entry, stream=stream, backward=True)
        frames = (frame for frame in container.decode(stream) if frame.pts is not None)
        first = next(frames, None)
        if first is not None and first.pts <= wanted:
            yield from (frame for frame in itertools.chain([first], frames) if frame.pts >= wanted)
            return


def _fitted(frame: Any, height: int, width: int) -> Any:
    """uint8 ``[3, height, width]``."""
    scale = max(height / frame.height, width / frame.width)
    tall, wide = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
    pixels = frame.to_ndarray(format="rgb24", height=tall, width=wide, interpolation="BICUBIC")
    top, left = (tall - height) // 2, (wide - width) // 2
    return pixels[top : top + height, left : left + width].transpose(2, 0, 1)


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error).lower()
