"""Pictures are those that players show: upright, with square pixels, opaque, in the right colours."""

import itertools
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy
import pytest
import torch

from arachnec.data.manifest import read_manifest
from arachnec.data.video import read_frames, read_header
from arachnec.ir.diagnostic import UserError

HEIGHT, WIDTH = 48, 64
RED, GREEN, BLUE, GREY = (200, 30, 30), (30, 180, 30), (30, 30, 200), (128, 128, 128)
CORNERS = numpy.array([[RED, GREEN], [BLUE, GREY]], dtype=numpy.uint8)  # as stored: above, below
ONE = 1 << 16
Turning = Callable[[numpy.ndarray], numpy.ndarray]
TURNED: dict[str, tuple[tuple[int, int, int, int], Turning]] = {
    "a quarter turn clockwise": ((0, 1, -1, 0), lambda corners: numpy.rot90(corners, -1)),
    "half a turn": ((-1, 0, 0, -1), lambda corners: numpy.rot90(corners, 2)),
    "a quarter turn counterclockwise": ((0, -1, 1, 0), numpy.rot90),
    "mirrored": ((-1, 0, 0, 1), lambda corners: corners[:, ::-1]),
    "upside down and mirrored": ((1, 0, 0, -1), lambda corners: corners[::-1]),
    "transposed": ((0, 1, 1, 0), lambda corners: corners.swapaxes(0, 1)),
}


def painted(corners: numpy.ndarray = CORNERS, height: int = HEIGHT, width: int = WIDTH) -> numpy.ndarray:
    return corners.repeat(height // 2, 0).repeat(width // 2, 1)


def corners_of(picture: torch.Tensor) -> numpy.ndarray:
    """The middle of each quarter of a picture ``[3, 1, height, width]``."""
    height, width = picture.shape[2:]
    rows, columns = [height // 4, 3 * height // 4], [width // 4, 3 * width // 4]
    return picture[:, 0][:, rows][:, :, columns].permute(1, 2, 0).numpy()


def written(
    path: Path,
    pixels: numpy.ndarray,
    codec: str = "mpeg4",
    pix_fmt: str = "yuv420p",
    *,
    stored: str = "rgb24",
    turn: tuple[int, int, int, int] | None = None,
    aspect: Fraction | None = None,
    prepare: Callable[[av.VideoFrame], av.VideoFrame] = lambda frame: frame,
) -> Path:
    """A file of three equal frames; of a still image's format, of one."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], pix_fmt
        stream.codec_context.qmin = stream.codec_context.qmax = 1
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        frame = prepare(av.VideoFrame.from_ndarray(pixels, format=stored))
        if turn is not None:
            a, b, c, d = (ONE * sign for sign in turn)
            stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
        stream.codec_context.color_range, stream.codec_context.colorspace = frame.color_range, frame.colorspace
        for number in range(1 if path.suffix in (".png", ".jpg", ".tiff") else 3):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def shown(path: Path) -> numpy.ndarray:
    header = read_header(path)
    return corners_of(read_frames(path, 0, 1, header.height, header.width))


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
@pytest.mark.parametrize("how", TURNED)
def test_a_display_matrix_turns_and_mirrors(tmp_path: Path, how: str, suffix: str) -> None:
    matrix, turned = TURNED[how]
    path = written(tmp_path / f"phone.{suffix}", painted(), turn=matrix)
    expected = turned(CORNERS)
    header = read_header(path)
    assert (header.height, header.width) == ((WIDTH, HEIGHT) if matrix[0] == 0 else (HEIGHT, WIDTH))
    numpy.testing.assert_allclose(shown(path).astype(int), expected, atol=6)


def test_sizes_of_a_row_are_those_of_the_shown_picture(tmp_path: Path) -> None:
    written(tmp_path / "phone.mp4", painted(), turn=(0, 1, -1, 0))
    (tmp_path / "clips.jsonl").write_text('{"path": "phone.mp4", "caption": "upright"}')
    (clip,) = read_manifest(tmp_path / "clips.jsonl").clips
    assert clip.shape[:3] == (3, WIDTH, HEIGHT)


def test_another_angle_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "tilted.mp4", painted(), turn=(1, 0, 0, 1))
    content = path.read_bytes()
    straight = struct.pack(">9i", ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30)
    place = content.rindex(straight)  # the track's: the movie's comes before
    tilted = struct.pack(">9i", 46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30)
    path.write_bytes(content[:place] + tilted + content[place + len(tilted) :])
    with pytest.raises(UserError, match=r"tilted.mp4` cannot be shown: .* no quarter turn"):
        read_header(path)


@pytest.mark.parametrize(
    ("turn", "sizes"), [(None, (HEIGHT, 4 * WIDTH // 3)), ((0, 1, -1, 0), (4 * WIDTH // 3, HEIGHT))]
)
def test_pixels_that_are_not_square_are_stretched_in_stored_width(
    tmp_path: Path, turn: tuple[int, int, int, int] | None, sizes: tuple[int, int]
) -> None:
    path = written(tmp_path / "wide.mp4", painted(), aspect=Fraction(4, 3), turn=turn)
    header = read_header(path)
    assert (header.height, header.width) == sizes
    assert read_frames(path, 0, 1, 24, 24).shape == (3, 1, 24, 24)
    expected = CORNERS if turn is None else numpy.rot90(CORNERS, -1)
    numpy.testing.assert_allclose(shown(path).astype(int), expected, atol=6)


def test_a_circle_stays_one_where_pixels_are_not_square(tmp_path: Path) -> None:
    down, across = numpy.mgrid[0:96, 0:96]
    disc = ((down - 48) ** 2 + ((across - 48) * 4 / 3) ** 2 < 30**2).astype(numpy.uint8) * 255
    path = written(tmp_path / "disc.mp4", disc[..., None].repeat(3, 2), aspect=Fraction(4, 3))
    picture = read_frames(path, 0, 1, 96, 128)[0, 0] > 127
    assert abs(int(picture.any(0).sum()) - int(picture.any(1).sum())) <= 2


def with_clean_aperture(content: bytes) -> bytes:
    """An mp4 file of ``HEIGHT`` x ``WIDTH`` that shows 40 x 24, 4 to the right of the middle and 2 above it."""
    values = (24, 1, 40, 1, 4, 1, -2, 1)
    box = struct.pack(">I4s8i", 40, b"clap", *values)
    moov = content.index(b"moov")
    entry = content.index(b"mp4v", moov)
    end = entry - 4 + struct.unpack(">I", content[entry - 4 : entry])[0]
    patched = bytearray(content[:end] + box + content[end:])
    places = [patched.index(name, moov) for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd")]
    for place in (*places, entry):
        (size,) = struct.unpack(">I", patched[place - 4 : place])
        patched[place - 4 : place] = struct.pack(">I", size + len(box))
    return bytes(patched)


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_what_the_container_crops_is_not_shown(tmp_path: Path, suffix: str) -> None:
    down, across = numpy.mgrid[0:HEIGHT, 0:WIDTH]
    ramps = numpy.stack([4 * across, 5 * down, 0 * down], axis=2).astype(numpy.uint8)
    path = written(tmp_path / "aperture.mp4", ramps)
    path.write_bytes(with_clean_aperture(path.read_bytes()))
    if suffix == "mkv":
        path = remuxed(path, tmp_path / "aperture.mkv")
    header = read_header(path)
    assert (header.height, header.width) == (40, 24)
    left, top = (WIDTH - 24) // 2 + 4, (HEIGHT - 40) // 2 - 2
    picture = read_frames(path, 0, 1, 40, 24)[:, 0].permute(1, 2, 0).numpy()
    numpy.testing.assert_allclose(picture.astype(int), ramps[top : top + 40, left : left + 24], atol=8)


def remuxed(source: Path, path: Path) -> Path:
    with av.open(str(source)) as whole, av.open(str(path), "w") as container:
        (stream,) = whole.streams.video
        copied = container.add_stream_from_template(stream)
        for packet in whole.demux(stream):
            if packet.size:
                packet.stream = copied
                container.mux(packet)
    return path


def exif_png(path: Path, orientation: int) -> Path:
    """A PNG with an EXIF block, put before its pixels."""
    content = written(path, painted(), "png", "rgb24").read_bytes()
    block = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    chunk = struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    place = content.index(b"IDAT") - 4
    path.write_bytes(content[:place] + chunk + content[place:])
    return path


def exif_jpeg(path: Path, orientation: int) -> Path:
    content = written(path, painted(), "mjpeg", "yuvj444p").read_bytes()
    block = b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    path.write_bytes(content[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + content[2:])
    return path


@pytest.mark.parametrize("make", [exif_jpeg, exif_png])
@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, lambda corners: corners),
        (2, lambda corners: corners[:, ::-1]),
        (3, lambda corners: corners[::-1, ::-1]),
        (4, lambda corners: corners[::-1]),
        (5, lambda corners: corners.swapaxes(0, 1)),
        (6, lambda corners: numpy.rot90(corners, -1)),
        (7, lambda corners: corners[::-1, ::-1].swapaxes(0, 1)),
        (8, numpy.rot90),
    ],
)
def test_exif_orientation_turns_stills(
    tmp_path: Path,
    make: Callable[[Path, int], Path],
    orientation: int,
    turned: Callable[[numpy.ndarray], numpy.ndarray],
) -> None:
    path = make(tmp_path / ("still.jpg" if make is exif_jpeg else "still.png"), orientation)
    header = read_header(path)
    assert (header.frames, header.fps) == (1, None)
    assert (header.height, header.width) == ((WIDTH, HEIGHT) if orientation > 4 else (HEIGHT, WIDTH))
    numpy.testing.assert_allclose(shown(path).astype(int), turned(CORNERS), atol=6)


def test_transparent_pixels_are_laid_on_white(tmp_path: Path) -> None:
    alpha = numpy.array([[[255], [127]], [[0], [255]]], dtype=numpy.uint8)
    pixels = painted(numpy.concatenate([CORNERS, alpha], axis=2))
    path = written(tmp_path / "sticker.png", pixels, "png", "rgba", stored="rgba")
    half = [round((colour * 127 + 255 * 128) / 255) for colour in GREEN]
    assert read_header(path).alpha
    numpy.testing.assert_allclose(shown(path).astype(int), [[RED, half], [(255,) * 3, GREY]], atol=1)


@pytest.mark.parametrize("tag", ["alpha_mode", "ALPHA_MODE"])  # the latter where a file was copied into Matroska
@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_transparency_of_vp8_and_vp9_is_read(tmp_path: Path, codec: str, tag: str) -> None:
    corners = numpy.concatenate([CORNERS, numpy.array([[[255], [0]], [[0], [255]]], numpy.uint8)], axis=2)
    path = tmp_path / "sticker.webm"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options={"auto-alt-ref": "0", "crf": "4", "b": "2M"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuva420p"
        stream.metadata[tag] = "1"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(painted(corners), format="rgba")))
        container.mux(stream.encode())
    assert read_header(path).alpha and read_header(path).frames == 3
    numpy.testing.assert_allclose(shown(path).astype(int), [[RED, (255,) * 3], [(255,) * 3, GREY]], atol=12)
    assert torch.equal(read_frames(path, 1, 2, 16, 16), read_frames(path, 0, 3, 16, 16)[:, 1:])


def test_an_opaque_picture_has_no_alpha_though_its_format_could(tmp_path: Path) -> None:
    opaque = numpy.concatenate([CORNERS, numpy.full((2, 2, 1), 255, numpy.uint8)], axis=2)
    assert not read_header(written(tmp_path / "a.png", painted(opaque), "png", "rgba", stored="rgba")).alpha


MATRICES = {1: (0.2126, 0.0722), 5: (0.299, 0.114), 9: (0.2627, 0.0593), 2: (0.299, 0.114)}  # unspecified: BT.601


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("pix_fmt", "bits"), [("yuv444p", 8), ("yuv444p10le", 10)])
def test_colours_are_those_of_the_streams_matrix_range_and_depth(
    tmp_path: Path, matrix: int, full: bool, pix_fmt: str, bits: int
) -> None:
    red, blue = MATRICES[matrix]
    colours = CORNERS / 255
    luma = colours @ numpy.array([red, 1 - red - blue, blue])
    differences = (colours[..., 2] - luma) / (2 * (1 - blue)), (colours[..., 0] - luma) / (2 * (1 - red))
    scale, offset, chroma = (255, 0, 255) if full else (219, 16, 224)
    levels = [luma * scale + offset, *(part * chroma + 128 for part in differences)]
    dtype = numpy.uint8 if bits == 8 else numpy.uint16
    planes = [painted((2 ** (bits - 8) * level).round().astype(dtype)) for level in levels]

    def prepared(_: av.VideoFrame) -> av.VideoFrame:
        frame = av.VideoFrame(WIDTH, HEIGHT, pix_fmt)
        for plane, values in zip(frame.planes, planes, strict=True):
            rows = numpy.zeros((HEIGHT, plane.line_size // values.itemsize), dtype)
            rows[:, :WIDTH] = values
            plane.update(rows.tobytes())
        frame.color_range, frame.colorspace = 2 if full else 1, matrix
        return frame

    path = written(tmp_path / "colours.mkv", painted(), "ffv1", pix_fmt, prepare=prepared)
    numpy.testing.assert_allclose(shown(path).astype(int), CORNERS, atol=2)


def test_interlaced_fields_become_progressive_frames_whatever_the_start(tmp_path: Path) -> None:
    path = tmp_path / "fields.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"flags": "+ildct+ilme", "x264-params": "tff=1"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for number in range(6):
            pixels = numpy.zeros((HEIGHT, WIDTH, 3), numpy.uint8)
            for field in range(2):  # a bar that moves from field to field
                pixels[field::2, 8 * number + 4 * field : 8 * number + 4 * field + 8] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        assert all(frame.interlaced_frame for frame in container.decode(video=0))
        container.seek(0)
        woven = next(itertools.islice(container.decode(video=0), 2, None)).to_ndarray(format="rgb24")
    frames = read_frames(path, 0, 6, HEIGHT, WIDTH)
    assert torch.equal(frames[:, 3:5], read_frames(path, 3, 2, HEIGHT, WIDTH))

    def combing(picture: torch.Tensor) -> float:
        return float((picture[:, 1:] - picture[:, :-1]).abs().mean())

    combed = torch.from_numpy(woven.copy()).permute(2, 0, 1).float()
    assert combing(frames[:, 2].float()) < combing(combed) / 3


@pytest.mark.parametrize("codec", ["gif", "apng"])
def test_animated_images_are_clips(tmp_path: Path, codec: str) -> None:
    path = written(tmp_path / f"moving.{codec}", painted(), codec, "rgb8" if codec == "gif" else "rgb24")
    header = read_header(path)
    assert (header.frames, header.height, header.width) == (3, HEIGHT, WIDTH)
    assert read_frames(path, 0, 3, HEIGHT, WIDTH).shape == (3, 3, HEIGHT, WIDTH)


def test_an_animated_webp_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "moving.webp"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libwebp_anim", rate=24)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for number in range(3):
            pixels = numpy.full((HEIGHT, WIDTH, 3), 80 * number, numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    with pytest.raises(UserError) as caught:
        read_header(path)
    assert "moving.webp` cannot be shown: this FFmpeg does not decode animated WebP" in str(caught.value)
