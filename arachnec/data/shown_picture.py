"""One decoded frame as the picture that players show: upright, with square pixels, opaque, in sRGB.

What is applied, in this order: the container's crop is cut off; transparent pixels are laid on white; colours are
converted by the stream's matrix and range (without one BT.601, limited, as FFmpeg does); pixels that are not square are
stretched in width; then the display matrix, which is also what FFmpeg makes of EXIF orientation, turns and mirrors.
High dynamic range and wide gamuts are converted in ``arachnec/data/shown_picture.py``. What cannot be shown is a
``NotShown``, by its name.

Of high dynamic range PQ (SMPTE ST 2084) and HLG (ARIB STD-B67, at its nominal peak of 1,000 cd/m2, BT.2100) become
light, whose largest component is tone-mapped by BT.2390's curve from 1,000 to 203 cd/m2 (BT.2408's reference white): up
to 90 cd/m2 nothing changes, and hues do not. Primaries become those of BT.709; what lies outside is clipped.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arachnec.data.container_crop import Crop

PQ, HLG = 16, 18  # AVColorTransferCharacteristic
BT2020, DCI_P3, DISPLAY_P3 = 9, 11, 12  # AVColorPrimaries
WHITES = {DCI_P3: (0.314, 0.351)}  # else D65
D65 = (0.3127, 0.3290)
CHROMATICITIES = {  # of red, green, blue
    1: ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060)),
    BT2020: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),
    DCI_P3: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
    DISPLAY_P3: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
PEAK, SDR_PEAK = 1000.0, 203.0  # cd/m2
LUMINANCE_2020 = (0.2627, 0.6780, 0.0593)
GAMMA = 2.2  # of SDR, there and back: greys stay what they are
CODES = 1 << 16


class WideColours:
    """Converts pictures of one transfer and one set of primaries, by their numbers in FFmpeg (H.273)."""

    HDR = (PQ, HLG)

    def __init__(self, transfer: int, primaries: int) -> None:
        import numpy

        self.transfer, self.primaries = transfer, primaries
        codes = numpy.arange(CODES, dtype=numpy.float64) / (CODES - 1)
        self._light = _LIGHT.get(transfer, lambda signal: signal**GAMMA)(codes).astype(numpy.float32)
        gamut = primaries if primaries in CHROMATICITIES else BT2020
        self._to_bt709 = (numpy.linalg.inv(_to_xyz(1)) @ _to_xyz(gamut)).astype(numpy.float32)
        encode = _srgb if transfer in self.HDR else lambda light: light ** (1 / GAMMA)
        self._encoded = numpy.rint(255 * encode(codes)).astype(numpy.uint8)
        self._mapped = (_bt2390(codes * PEAK) / SDR_PEAK).astype(numpy.float32)

    @staticmethod
    def needed(transfer: int, primaries: int) -> bool:
        """Whether these colours are not shown as they are."""
        return transfer in WideColours.HDR or primaries in (BT2020, DCI_P3, DISPLAY_P3)

    def converted(self, pixels: Any) -> Any:
        """uint16 ``[height, width, 3]`` to uint8."""
        import numpy

        light = self._light[pixels]
        if self.transfer in self.HDR:
            if self.transfer == HLG:  # light of the scene until here
                luminance = light @ numpy.array(LUMINANCE_2020, numpy.float32)
                light *= luminance[..., None] ** numpy.float32(0.2)
            brightest = numpy.minimum(light.max(axis=-1), 1)
            mapped = self._mapped[numpy.rint(brightest * (CODES - 1)).astype(numpy.int32)]
            light *= (mapped / numpy.maximum(brightest, numpy.float32(1e-6)))[..., None]
        shown = numpy.clip(light @ self._to_bt709.T, 0, 1)
        return self._encoded[numpy.rint(shown * (CODES - 1)).astype(numpy.int32)]


def _to_xyz(primaries: int) -> Any:
    """The matrix of linear RGB to XYZ, where white is (1, 1, 1)."""
    import numpy

    columns = numpy.array([(x / y, 1, (1 - x - y) / y) for x, y in CHROMATICITIES[primaries]]).T
    x, y = WHITES.get(primaries, D65)
    return columns * numpy.linalg.solve(columns, numpy.array([x / y, 1, (1 - x - y) / y]))


def _pq(nits: Any) -> Any:
    """PQ's signal of light in cd/m2."""
    power = (nits / 10000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def _from_pq(signal: Any) -> Any:
    """cd/m2."""
    import numpy

    power = signal ** (1 / 78.84375)
    return 10000 * (numpy.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)) ** (1 / 0.1593017578125)


def _from_hlg(signal: Any) -> Any:
    """Light of the scene, 1 at most."""
    import numpy

    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return numpy.where(signal <= 0.5, signal**2 / 3, (numpy.exp((signal - c) / a) + b) / 12)


def _bt2390(nits: Any) -> Any:
    """The tone curve of BT.2390 (section 5.4.1, EETF), from ``PEAK`` to ``SDR_PEAK``, black at 0."""
    import numpy

    peak = _pq(PEAK)
    most = _pq(SDR_PEAK) / peak
    knee = 1.5 * most - 0.5
    signal = numpy.minimum(_pq(nits) / peak, 1)
    t = (numpy.maximum(signal, knee) - knee) / (1 - knee)
    bent = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (3 * t**2 - 2 * t**3) * most
    return _from_pq(numpy.where(signal < knee, signal, bent) * peak)


def _srgb(light: Any) -> Any:
    import numpy

    return numpy.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


_LIGHT = {PQ: lambda signal: _from_pq(signal) / PEAK, HLG: _from_hlg}


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
