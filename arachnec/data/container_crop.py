"""What a container has players crop from every frame: the clean aperture of an mp4 or mov file, Matroska's PixelCrop.

FFmpeg reads both, and PyAV does not pass them on. In: a file and which of its streams. Out: rows and columns. Only the
boxes on the way are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

MP4 = ((b"mdia", 0), (b"minf", 0), (b"stbl", 0), (b"stsd", 8), (None, 78), (b"clap", 0))  # and bytes of a box's fields
SEGMENT, TRACKS, TRACK, VIDEO = 0x18538067, 0x1654AE6B, 0xAE, 0xE0  # Matroska's elements
SIDES = {0x54CC: "left", 0x54BB: "top", 0x54DD: "right", 0x54AA: "bottom"}
BOXES = 10_000  # of one level: more are not looked at


@dataclass(frozen=True)
class Crop:
    """Pixels that are cut off the stored frame."""

    left: int = 0
    top: int = 0
    right: int = 0
    bottom: int = 0

    def leaves(self, height: int, width: int) -> bool:
        """Whether it cuts anything off a frame, and not all of it."""
        sides = self.left, self.top, self.right, self.bottom
        return any(sides) and min(sides) >= 0 and sides[0] + sides[2] < width and sides[1] + sides[3] < height


def container_crop(path: str | Path, kind: str, stream: int, height: int, width: int) -> Crop | None:
    """The crop of a file's stream, of frames so high and wide; None without one. ``kind`` is FFmpeg's format name."""
    read = _clean_aperture if "mp4" in kind else _pixel_crop if "matroska" in kind else None
    if read is None:
        return None
    try:
        with Path(path).open("rb") as file:
            crop = read(file, stream, height, width)
    except (OSError, struct.error, ZeroDivisionError, IndexError):  # it is damaged
        return None
    return crop if crop is not None and crop.leaves(height, width) else None


def _clean_aperture(file: BinaryIO, stream: int, height: int, width: int) -> Crop | None:
    end = file.seek(0, 2)
    movie = next((body for name, *body in _boxes(file, 0, end) if name == b"moov"), None)
    if movie is None:
        return None
    tracks = (body for name, *body in _boxes(file, *movie) if name == b"trak")
    body: Sequence[int] | None = next(islice(tracks, stream, None), None)
    for wanted, fields in MP4:
        if body is None:
            return None
        inside = (place for name, *place in _boxes(file, *body) if wanted in (None, name))
        body = next(([start + fields, stop] for start, stop in inside), None)
    if body is None:
        return None
    file.seek(body[0])
    values = struct.unpack(">8i", file.read(32))
    wide, tall, right, down = (values[i] / values[i + 1] for i in (0, 2, 4, 6))
    left, top = round((width - wide) / 2 + right), round((height - tall) / 2 + down)
    return Crop(left, top, width - left - round(wide), height - top - round(tall))


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Of the boxes between two places: name, and the place of the body and of its end."""
    for _ in range(BOXES):
        if start + 8 > end:
            return
        file.seek(start)
        size, name = struct.unpack(">I4s", file.read(8))
        body = start + 8
        if size == 1:
            (size,) = struct.unpack(">Q", file.read(8))
            body += 8
        stop = end if size == 0 else start + size
        if not body <= stop <= end:
            return
        yield name, body, stop
        start = stop


def _pixel_crop(file: BinaryIO, stream: int, height: int, width: int) -> Crop | None:
    end = file.seek(0, 2)
    body: Sequence[int] | None = [0, end]
    for wanted, number in ((SEGMENT, 0), (TRACKS, 0), (TRACK, stream), (VIDEO, 0)):
        if body is None:
            return None
        inside = (place for id, *place in _elements(file, *body) if id == wanted)
        body = next(islice(inside, number, None), None)
    if body is None:
        return None
    sides = {}
    for id, start, stop in _elements(file, *body):
        if id in SIDES:
            file.seek(start)
            sides[SIDES[id]] = int.from_bytes(file.read(min(stop - start, 8)), "big")
    return Crop(**sides)


def _elements(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Of the elements between two places: number, and the place of the body and of its end."""
    for _ in range(BOXES):
        if start + 2 > end:
            return
        file.seek(start)
        header = file.read(12)
        id_bytes = 9 - header[0].bit_length()
        size_bytes = 9 - header[id_bytes].bit_length() if id_bytes <= 4 else 9
        if size_bytes > 8:
            return
        body = start + id_bytes + size_bytes
        unknown = (1 << (7 * size_bytes)) - 1
        size = int.from_bytes(header[id_bytes : id_bytes + size_bytes], "big") & unknown
        stop = end if size == unknown else body + size
        yield int.from_bytes(header[:id_bytes], "big"), body, min(stop, end)
        start = stop
