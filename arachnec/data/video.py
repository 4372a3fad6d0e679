"""Decoding clips out of video files with PyAV (FFmpeg): which frames are shown, and when.

How one of them becomes a picture is ``arachnec/data/shown_picture.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arachnec.data.container_crop import container_crop
from arachnec.data.shown_picture import NotShown, ShownPictures, deinterlaced
from arachnec.ir.diagnostic import Diagnostic, UserError

if TYPE_CHECKING:
    from torch import Tensor


REORDERING = 64  # packets; decoding order runs ahead of display order by at most 16 frames in H.264 and H.265
DEPENDENT = 0x80000  # AV_DISPOSITION_DEPENDENT: a tile of a picture
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
COARSEST_TICK = Fraction(1, 500)  # seconds; containers of finer time bases round frames' times to them
RATE_TOLERANCE = 0.02  # between two statements of one frame rate


@dataclass(frozen=True)
class UnreadableVideo(Diagnostic):
    title = "the video `{path}` cannot be decoded: {reason}"
    help = "check that it plays; if it was copied, copy it again"
    path: str
    reason: str


@dataclass(frozen=True)
class NoPicture(UnreadableVideo):
    title = "the video `{path}` cannot be shown: {reason}"
    help = "convert it with a tool that plays it, to an mp4 file, a PNG or a GIF"


@dataclass(frozen=True)
class TooFewFrames(Diagnostic):
    title = "the video `{path}` gave {found} of the {wanted} frames wanted from frame {start} on"
    help = "{remedy}"
    path: str
    found: int
    wanted: int
    start: int
    remedy: str


@dataclass(frozen=True)
class VideoHeader:
    """What a file shows. ``frames`` are those that players show; ``height`` and ``width`` are of the shown picture, in
    pixels; ``fps`` is the mean frame rate, None for a still image, and ``nominal_fps`` the one that the container
    guesses. ``alpha``: whether the first frame has transparent pixels.
    """

    frames: int
    height: int
    width: int
    fps: float | None = None
    nominal_fps: float | None = None
    alpha: bool = False


def read_header(path: str | Path) -> VideoHeader:
    """Read what a video shows: its first frame is decoded, its frames are counted by its index, or else its packets.

    Raises ``UserError`` for a file without a video stream that can be decoded and shown.
    """
    with _opened(path) as (container, stream):
        frame = next(_decoded(container, stream), None)
        if frame is None:
            raise UserError(UnreadableVideo(None, str(path), "it has no frames"))
        shown = _pictures(path, container, stream)
        (height, width), alpha = shown.size(frame), shown.has_alpha(frame)
        frames = _frames_of_index(container, stream)
        if stream.start_time is not None and frame.pts is not None and frame.pts > stream.start_time:
            frames = None  # the first ones cannot be decoded
        fps, nominal = (float(rate) if rate else None for rate in (stream.average_rate, stream.guessed_rate))
    if frames is None:
        times, _ = _shown_times(path)
        frames = len(times)
        if fps and nominal and frames > 1 and abs(fps / nominal - 1) > RATE_TOLERANCE and times[-1] > times[0]:
            fps = float((frames - 1) / (times[-1] - times[0]))
    return VideoHeader(frames, height, width, *((fps, nominal) if frames > 1 else (None, None)), alpha)


probe = read_header


def count_frames(path: str | Path) -> int:
    """The shown frames that are there, whatever the header states. Raises ``UserError`` as ``read_header``."""
    return len(_shown_times(path)[0])


def frames_taken(path: str | Path, start: int, target_fps: float | None, stride: int, frames: int) -> int:
    """The frames that ``read_frames`` finds from ``start`` on in a video that shows ``frames``. Only with
    ``target_fps`` the file is read. Raises ``UserError`` as ``read_header``."""
    if target_fps is None:
        return max(0, -(-(frames - start) // stride))
    times, timing = _shown_times(path)
    return sum(1 for _ in _taken(((time, None) for time in times[start:]), timing, target_fps, stride))


def read_frames(
    path: str | Path,
    start: int,
    frames: int,
    height: int,
    width: int,
    *,
    target_fps: float | None = None,
    stride: int = 1,
) -> Tensor:
    """Decode ``frames`` frames from the file's shown frame ``start`` on, as uint8 RGB ``[3, frames, height, width]``.

    They are consecutive, or every ``stride``-th; with ``target_fps`` they are those shown at so many equal times a
    second. Each is the shown picture, scaled, keeping its aspect, to cover ``height`` x ``width`` (bicubic) and cropped
    at the centre. Raises ``UserError`` where the file is corrupt, cannot be shown, or ends before the last frame.
    """
    import numpy
    import torch

    pictures: list[Any] = []
    failure = previous = None
    try:
        with _opened(path) as (container, stream):
            shown, timing = _pictures(path, container, stream), _Timing.of(stream)
            before = min(start, 1)  # a frame from whose fields the next one's are interpolated
            decoded = timing.timed(_frames_from(path, container, stream, start - before))
            timed = itertools.islice(deinterlaced(decoded), before, None)
            for frame in itertools.islice(_taken(timed, timing, target_fps, stride), frames):
                # A frame may be taken several times.
                pictures.append(pictures[-1] if frame is previous else shown.picture(frame, height, width))
                previous = frame
    except UserError as error:
        if not pictures or isinstance(error.diagnostics[0], NoPicture):
            raise
        failure = error
    if len(pictures) < frames:
        stated, there = _stated_frames(path), count_frames(path)
        damaged = failure or stated > there or frames_taken(path, start, target_fps, stride, there) >= frames
        promised = f"its header promises {max(stated, there)}: the file is truncated or damaged; copy it again"
        remedy = promised if damaged else "take fewer frames or an earlier start"
        raise UserError(TooFewFrames(None, str(path), len(pictures), frames, start, remedy))
    return torch.from_numpy(numpy.stack(pictures, axis=1))


@dataclass(frozen=True)
class _Timing:
    """How the times of a stream's frames are read, in seconds. ``period`` is a frame's mean duration."""

    tick: Fraction
    period: Fraction

    @staticmethod
    def of(stream: Any) -> _Timing:
        rate = stream.average_rate or stream.guessed_rate
        return _Timing(Fraction(stream.time_base), 1 / Fraction(rate) if rate else Fraction(1))

    @property
    def slack(self) -> Fraction:
        """By how much rounding may have moved a frame: Matroska's times are whole milliseconds."""
        return self.tick if self.tick <= COARSEST_TICK else Fraction(0)

    def time(self, pts: int | None, number: int) -> Fraction:
        """When a frame is shown; without a time stamp (raw streams) by its number."""
        return number * self.period if pts is None else pts * self.tick

    def timed(self, frames: Iterable[Any]) -> Iterator[tuple[Fraction, Any]]:
        return ((self.time(frame.pts, number), frame) for number, frame in enumerate(frames))


def _taken(
    frames: Iterable[tuple[Fraction, Any]], timing: _Timing, target_fps: float | None, stride: int
) -> Iterator[Any]:
    """Of frames with their times those that a clip takes: every ``stride``-th, or at each of its own times, counted
    from the first frame's, the frame that is shown then. The last one is shown for the mean of all; a single one, a
    still image, is taken once."""
    if target_fps is None:
        yield from (frame for _, frame in itertools.islice(frames, 0, None, stride))
        return
    step = 1 / Fraction(target_fps)
    shown, since, due, number = None, Fraction(0), Fraction(0), 0
    for time, frame in frames:
        if number == 0:
            due = time + timing.slack
        while due < time:
            yield shown
            due += step
        shown, since, number = frame, time, number + 1
    if number == 1:
        yield shown
    while number > 1 and due < since + timing.period:
        yield shown
        due += step


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, Any]]:
    """A file and its video stream. What goes wrong with them in here is a ``UserError``."""
    import av

    try:
        with av.open(str(path)) as container:
            yield container, _stream(container, path)
    except NotShown as error:
        raise UserError(NoPicture(None, str(path), str(error))) from None
    except (av.error.FFmpegError, OSError) as error:
        if _is_animated_webp(path):
            raise UserError(NoPicture(None, str(path), "this FFmpeg does not decode animated WebP")) from None
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise UserError(UnreadableVideo(None, str(path), reason)) from None


def _pictures(path: str | Path, container: Any, stream: Any) -> ShownPictures:
    size = stream.codec_context.height, stream.codec_context.width
    return ShownPictures(stream, container_crop(path, container.format.name, stream.index, *size))


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """A stream's frames, by a decoder that knows its alpha: FFmpeg's own ones of VP8 and VP9 drop it."""
    name = stream.codec_context.name
    tags = {key.lower(): value for key, value in stream.metadata.items()}
    if tags.get("alpha_mode") != "1" or name not in ALPHA_DECODERS:
        return iter(container.decode(stream))
    import av

    if ALPHA_DECODERS[name] not in av.codecs_available:
        raise NotShown(f"its transparency needs the decoder {ALPHA_DECODERS[name]}, which this FFmpeg lacks")
    decoder = av.CodecContext.create(ALPHA_DECODERS[name], "r")
    decoder.thread_count = 1
    return (frame for packet in container.demux(stream) for frame in decoder.decode(packet))


def _stream(container: Any, path: str | Path) -> Any:
    stream = container.streams.best("video")
    if stream is None:
        raise UserError(UnreadableVideo(None, str(path), "it has no video stream"))
    if stream.codec_context is None:
        raise NotShown("this FFmpeg has no decoder for its codec")
    if int(getattr(stream, "disposition", 0)) & DEPENDENT:
        raise NotShown("it is made of tiles")
    stream.codec_context.thread_count = 1  # ranks decode side by side; results do not depend on threads
    return stream


def _is_animated_webp(path: str | Path) -> bool:
    try:
        with Path(path).open("rb") as file:
            start = file.read(21)
    except OSError:
        return False
    return start[:4] == b"RIFF" and start[8:16] == b"WEBPVP8X" and len(start) > 20 and bool(start[20] & 2)


def _frames_of_index(container: Any, stream: Any) -> int | None:
    """The shown frames as an mp4 file's index lists them; None without an index that is known to be whole."""
    index = getattr(stream, "index_entries", ())  # since PyAV 17
    if "mp4" not in container.format.name or not stream.frames or len(index) != stream.frames:
        return None
    return sum(not entry.is_discard for entry in index)


def _stated_frames(path: str | Path) -> int:
    """The shown frames that the header states; 0 where it states none, or counts what is not a frame."""
    with _opened(path) as (container, stream):
        rates = stream.average_rate, stream.guessed_rate
        whole = all(rates) and abs(rates[0] / rates[1] - 1) <= RATE_TOLERANCE
        if not whole and "mp4" not in container.format.name:
            return 0
        stated = int(stream.frames)
        return stated - sum(packet.is_discard for packet in container.demux(stream)) if stated else 0


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """The packets of frames that are shown: an edit list has others discarded."""
    return (packet for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _shown_times(path: str | Path) -> tuple[list[Fraction], _Timing]:
    """When each frame is shown, in order. Nothing but a first frame is decoded."""
    with _opened(path) as (container, stream):
        timing = _Timing.of(stream)
        packets = [(packet.pts, packet.is_keyframe) for packet in _packets(container, stream)]
    stamps = _decodable(path, packets)
    return sorted(timing.time(pts, number) for number, pts in enumerate(stamps)), timing


def _decodable(path: str | Path, packets: list[tuple[int | None, bool]]) -> list[int | None]:
    """The time stamps of packets, of which each says whether it is a keyframe.

    Frames that are shown before the first keyframe refer to others: where the file was cut, these are gone, and the
    decoder leaves out what needs them.
    """
    stamps = [pts for pts, _ in packets]
    entry = next((pts for pts, is_key in packets if is_key), None)
    if entry is None or not any(pts is not None and pts < entry for pts in stamps):
        return stamps
    with _opened(path) as (container, stream):
        first = next((frame.pts for frame in _decoded(container, stream) if frame.pts is not None), entry)
    return [pts for pts in stamps if pts is None or pts >= first]


def _frames_from(path: str | Path, container: Any, stream: Any, start: int) -> Iterator[Any]:
    """The decoded frames from the ``start``-th on, in display order, entered at the last keyframe before it.

    The packets' time stamps say where that frame is, also where the frame rate varies; reading them decodes nothing.
    """
    if start == 0:
        yield from _decoded(container, stream)
        return
    packets = list(itertools.islice(_packets(container, stream), start + REORDERING))
    stamps = _decodable(path, [(packet.pts, packet.is_keyframe) for packet in packets])
    if start >= len(stamps):
        return
    if None in stamps:  # a raw stream, which cannot be entered by time
        with _opened(path) as (again, whole):
            yield from itertools.islice(_decoded(again, whole), start, None)
        return
    wanted = sorted(pts for pts in stamps if pts is not None)[start]
    # A frame before its keyframe in display order may follow it in the file and refer to frames before it, and some
    # containers seek by decoding time: so by that, to the last keyframe that is shown no later than what is wanted.
    entries = [packet for packet in packets if packet.is_keyframe and packet.pts <= wanted]
    for packet in (*entries[-1:], packets[0]):
        entry = packet.pts if packet.dts is None else packet.dts
        container.seek(entry, stream=stream, backward=True)
        frames = (frame for frame in _decoded(container, stream) if frame.pts is not None)
        first = next(frames, None)
        if first is not None and first.pts <= wanted:
            yield from (frame for frame in itertools.chain([first], frames) if frame.pts >= wanted)
            return
