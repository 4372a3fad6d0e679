"""One decoded frame as the picture that players show: upright, with square pixels, opaque, in sRGB.

What is applied, in this order: the container's crop is cut off; transparent pixels are laid on white; colours are
converted by the stream's matrix and range (without one BT.601, limited, as FFmpeg does); pixels that are not square are
stretched in width; then the display matrix, which is also what FFmpeg makes of EXIF orientation, turns and mirrors.
High dynamic range and wide gamuts are converted in ``arachnec/data/wide_colours.py``. What cannot be shown is a
``NotShown``, by its name.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arachnec.data.container_crop import Crop
from arachnec.data.wide_colours import WideColours

WHITE = 255
CONSTANT_LUMINANCE = {8: "YCgCo", 10: "BT.2020 with constant luminance", 11: "Y'D'zD'x", 14: "ICtCp", 15: "IPT"}
BT601 = "bt601"
MATRICES = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020"}  # by AVColorSpace
FULL = 2  # AVColorRange
UNSPECIFIED = 2  # AVColorTransferCharacteristic
UNKNOWN_KINDS = range(28, 40)  # of AVFrameSideDataType
SKEW = 0.02  # of a display matrix: about a degree
ABSURD = 16  # so far from square no pixel is


class NotShown(Exception):
    """Why a frame has no picture, as a reason for a message."""


@dataclass(frozen=True)
class Orientation:
    """A display matrix's signs: a stored pixel ``(x, y)`` is shown at ``(a x + c y, b x + d y)``, plus an offset."""

    a: int = 1
    b: int = 0
    c: int = 0
    d: int = 1

    @property
    def transposed(self) -> bool:
        return self.a == 0

    def turned(self, pixels: Any) -> Any:
        """Pixels ``[height, width, 3]`` as they are shown."""
        shown = pixels.swapaxes(0, 1) if self.transposed else pixels
        down, right = (self.b, self.c) if self.transposed else (self.d, self.a)
        return shown[::down, ::right]


class ShownPictures:
    """Makes the pictures of one stream's frames. Its scalers and tables are kept from frame to frame."""

    def __init__(self, stream: Any, crop: Crop | None = None) -> None:
        self._stream = stream
        self._crop = crop
        self._scalers: dict[Any, Any] = {}
        self._wide: WideColours | None = None
        self._orientation: Orientation | None = None

    def size(self, frame: Any) -> tuple[int, int]:
        """Height and width of the picture. Raises ``NotShown``."""
        return self._size(self._cropped(frame))

    def _size(self, frame: Any) -> tuple[int, int]:
        height, width = frame.height, max(1, round(frame.width * self._pixel_aspect()))
        return (width, height) if self._turned_as(frame).transposed else (height, width)

    def has_alpha(self, frame: Any) -> bool:
        """Whether any pixel is transparent."""
        return _may_have_alpha(frame) and bool((self._scaled(frame, "rgba")[..., 3] < 255).any())

    def picture(self, frame: Any, height: int, width: int) -> Any:
        """uint8 ``[3, height, width]``: scaled, keeping its aspect, to cover the size (bicubic), and cropped at the
        centre. Raises ``NotShown``."""
        frame = self._cropped(frame)
        shown_height, shown_width = self._size(frame)
        scale = max(height / shown_height, width / shown_width)
        tall, wide = max(height, round(shown_height * scale)), max(width, round(shown_width * scale))
        orientation = self._turned_as(frame)
        stored = (wide, tall) if orientation.transposed else (tall, wide)
        pixels = orientation.turned(self._colours(frame, *stored))
        top, left = (tall - height) // 2, (wide - width) // 2
        return pixels[top : top + height, left : left + width].transpose(2, 0, 1)

    def _cropped(self, frame: Any) -> Any:
        if self._crop is None or not self._crop.leaves(frame.height, frame.width):
            return frame
        crop = self._crop
        size = f"{frame.width - crop.left - crop.right}:{frame.height - crop.top - crop.bottom}"
        graph = _graph(frame, ("crop", f"{size}:{crop.left}:{crop.top}:exact=1"))
        graph.vpush(frame)
        return graph.vpull()

    def _turned_as(self, frame: Any) -> Orientation:
        """As the stream's first frame."""
        if self._orientation is None:
            data = _side_data(frame)
            if "DOVI_RPU_BUFFER" in data and int(self._stream.codec_context.color_trc) == UNSPECIFIED:
                raise NotShown("it is Dolby Vision without a base layer for other players")
            self._orientation = _orientation(data.get("DISPLAYMATRIX"))
        return self._orientation

    def _colours(self, frame: Any, height: int, width: int) -> Any:
        """uint8 sRGB ``[height, width, 3]``, of the stored orientation."""
        matrix = int(frame.colorspace)
        if matrix in CONSTANT_LUMINANCE:
            raise NotShown(f"its colours are {CONSTANT_LUMINANCE[matrix]}, which is not converted")
        context = self._stream.codec_context
        transfer, primaries = int(context.color_trc), int(context.color_primaries)
        if _may_have_alpha(frame):
            frame = self._on_white(frame)
        if not WideColours.needed(transfer, primaries):
            return self._scaled(frame, "rgb24", height, width)
        if self._wide is None or (self._wide.transfer, self._wide.primaries) != (transfer, primaries):
            self._wide = WideColours(transfer, primaries)
        return self._wide.converted(self._scaled(frame, "rgb48le", height, width))

    def _on_white(self, frame: Any) -> Any:
        """An opaque frame."""
        import av
        import numpy

        pixels = self._scaled(frame, "rgba").astype(numpy.uint32)
        alpha = pixels[..., 3:]
        if (alpha == 255).all() and not frame.format.has_palette:
            return frame
        blended = (pixels[..., :3] * alpha + WHITE * (255 - alpha) + 127) // 255
        return av.VideoFrame.from_ndarray(blended.astype(numpy.uint8), format="rgb24")

    def _scaled(self, frame: Any, format: str, height: int | None = None, width: int | None = None) -> Any:
        """Pixels ``[height, width, channels]`` of a format, of the stored orientation."""
        stored = frame.format.name, frame.height, frame.width, int(frame.colorspace), int(frame.color_range)
        size = width or frame.width, height or frame.height
        if (stored, size, format) not in self._scalers:
            scale = ("scale", f"{size[0]}:{size[1]}:flags=bicubic{_colours_of(frame)}")
            self._scalers[stored, size, format] = _graph(frame, scale, ("format", format))
        graph = self._scalers[stored, size, format]
        graph.vpush(frame)
        return graph.vpull().to_ndarray()

    def _pixel_aspect(self) -> Fraction:
        """Width of a pixel over its height, of the stored picture; 1 where it is not stated or absurd."""
        stated = self._stream.sample_aspect_ratio
        return Fraction(stated) if stated and Fraction(1, ABSURD) <= stated <= ABSURD else Fraction(1)


def _side_data(frame: Any) -> dict[str, bytes]:
    """What else the stream says of a frame, by the names that FFmpeg has for it."""
    try:
        listed = list(frame.side_data)
    except ValueError:  # PyAV raises it for kinds that its FFmpeg knows and it does not, such as EXIF
        graph = _graph(frame, *(("sidedata", f"mode=delete:type={kind}") for kind in UNKNOWN_KINDS))
        graph.vpush(frame)
        listed = list(graph.vpull().side_data)
    return {data.type.name: bytes(data) for data in listed}


def _graph(frame: Any, *filters: tuple[str, str]) -> Any:
    """A filter graph for frames like this one. Each filter is its name and its options."""
    import av

    graph = av.filter.Graph()
    with contextlib.suppress(AttributeError):  # PyAV 13 to 16
        graph.threads = 1
    size = {"width": frame.width, "height": frame.height, "format": frame.format.name}
    source = graph.add_buffer(**size, time_base=frame.time_base or 1)
    nodes = [source, *(graph.add(*filter) for filter in filters), graph.add("buffersink")]
    graph.link_nodes(*nodes).configure()
    return graph


def _colours_of(frame: Any) -> str:
    """What the scaler is to take a frame's numbers for: its matrix and range, or FFmpeg's defaults."""
    if frame.format.is_rgb or frame.format.has_palette:
        return ""
    full = int(frame.color_range) == FULL or frame.format.name.startswith("yuvj")
    return f":in_color_matrix={MATRICES.get(int(frame.colorspace), BT601)}:in_range={'pc' if full else 'tv'}"


def _orientation(matrix: bytes | None) -> Orientation:
    """How frames are turned and mirrored. Raises ``NotShown`` for another angle than a quarter turn's multiple."""
    if matrix is None:
        return Orientation()
    a, b, _, c, d = struct.unpack("=9i", matrix)[:5]
    straight, across = min(abs(a), abs(d)), min(abs(b), abs(c))
    if not any((a, b, c, d)):
        return Orientation()
    if straight and max(abs(b), abs(c)) <= SKEW * straight:
        return Orientation(_sign(a), 0, 0, _sign(d))
    if across and max(abs(a), abs(d)) <= SKEW * across:
        return Orientation(0, _sign(b), _sign(c), 0)
    raise NotShown("it is to be shown at an angle that is no quarter turn")


def deinterlaced(frames: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Frames with their times; from the first interlaced one on, those that are interlaced become progressive (bwdif).

    As many come out as go in.
    """
    for time, frame in frames:
        if frame.interlaced_frame:
            yield from _filtered(time, frame, frames)
            return
        yield time, frame


def _filtered(time: Any, frame: Any, frames: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    import collections
    import itertools

    import av

    graph = _graph(frame, ("bwdif", "mode=send_frame:deint=interlaced"))
    times: collections.deque[Any] = collections.deque()
    for moment, field_pair in itertools.chain([(time, frame)], frames, [(None, None)]):
        graph.vpush(field_pair)
        if field_pair is not None:
            times.append(moment)
        while times:
            try:
                picture = graph.vpull()
            except (av.error.BlockingIOError, av.error.EOFError):
                break
            yield times.popleft(), picture


def _may_have_alpha(frame: Any) -> bool:
    return frame.format.has_palette or any(component.is_alpha for component in frame.format.components)


def _sign(number: int) -> int:
    return 1 if number > 0 else -1
