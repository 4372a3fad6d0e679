"""Decoding: the right frames, at the right size, or one message."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy
import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.data.manifest import read_manifest
from arachnec.data.video import probe, read_frames
from arachnec.ir.diagnostic import UserError, render
from arachnec.models.encoders import VideoEncoder, hold_against_header

FRAMES, HEIGHT, WIDTH = 24, 48, 80


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 frames, each of one grey that tells its number; a keyframe every 10 and reordered frames between."""
    path = tmp_path_factory.mktemp("video") / "grey.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.bit_rate = 4_000_000
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = 10, 2
        stream.codec_context.time_base = Fraction(1, 25)
        for number in range(FRAMES):
            pixels = numpy.full((HEIGHT, WIDTH, 3), 10 * number, dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def numbers(frames: torch.Tensor) -> list[int]:
    """Which frame of the fixture each one is."""
    return (frames.float().mean(dim=(0, 2, 3)) / 10).round().int().tolist()


def message(path: Path, *args: int) -> str:
    with pytest.raises(UserError) as caught:
        read_frames(path, *args)
    return render(*caught.value.diagnostics).replace(str(path.parent) + "/", "")


def test_the_header_says_how_large_a_video_is(video: Path) -> None:
    header = probe(video)
    assert (header.frames, header.height, header.width) == (FRAMES, HEIGHT, WIDTH)


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 17, 23])
def test_frames_from_any_start_are_those_in_display_order(video: Path, start: int) -> None:
    count = min(5, FRAMES - start)
    frames = read_frames(video, start, count, 16, 32)
    assert frames.shape == (3, count, 16, 32) and frames.dtype == torch.uint8
    assert numbers(frames) == list(range(start, start + count))


def test_scaling_keeps_the_aspect_and_crops_at_the_centre(tmp_path: Path) -> None:
    path = tmp_path / "halves.png"
    pixels = numpy.zeros((40, 80, 3), dtype=numpy.uint8)
    pixels[:, 20:60] = 255  # the middle square is white
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=1)
        stream.width, stream.height, stream.pix_fmt = 80, 40, "rgb24"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
    square = read_frames(path, 0, 1, 20, 20)
    assert square.float().mean() > 250
    assert probe(path).frames == 1


def test_too_short_a_video_is_named_with_what_it_gave(video: Path) -> None:
    assert (
        message(video, 20, 9, 16, 16)
        == """\
error: the video `grey.mp4` gave 4 of the 9 frames wanted from frame 20 on
  help: take fewer frames or an earlier start"""
    )


def test_a_truncated_video_is_named_with_what_it_gave(tmp_path: Path) -> None:
    path, content = tmp_path / "cut.avi", tmp_path / "whole.avi"
    with av.open(str(content), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        for _ in range(10):
            noise = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode())
    path.write_bytes(content.read_bytes()[: content.stat().st_size // 2])
    text = message(path, 0, 10, 16, 16)
    assert text.startswith("error: the video `cut.avi` gave ") and " of the 10 frames wanted from frame 0 on" in text
    assert "its header promises 10: the file is truncated or damaged" in text


def test_a_file_cut_before_its_index_is_named(video: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    assert message(path, 0, 5, 16, 16).splitlines()[0].startswith("error: the video `cut.mp4` cannot be decoded: ")


def test_a_file_that_is_no_video_is_named(tmp_path: Path) -> None:
    path = tmp_path / "note.mp4"
    path.write_text("not a video")
    assert "the video `note.mp4` cannot be decoded" in message(path, 0, 1, 16, 16)


def test_a_codec_without_a_decoder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "unknown.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        grey = numpy.full((HEIGHT, WIDTH, 3), 90, dtype=numpy.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    path.write_bytes(path.read_bytes().replace(b"V_MPEG4/ISO/ASP", b"V_NONE4/ISO/ASP"))
    assert "`unknown.mkv` cannot be shown: this FFmpeg has no decoder for its codec" in message(path, 0, 1, 16, 16)


def test_sizes_that_a_row_leaves_out_come_from_the_video(video: Path) -> None:
    manifest = video.parent / "clips.jsonl"
    manifest.write_text('{"path": "grey.mp4", "caption": "grey", "start": 3}')
    (clip,) = read_manifest(manifest).clips
    assert (clip.frames, clip.height, clip.width, clip.start) == (FRAMES - 3, HEIGHT, WIDTH, 3)


def test_a_start_behind_the_end_of_the_video_is_refused(video: Path) -> None:
    manifest = video.parent / "late.jsonl"
    manifest.write_text('{"path": "grey.mp4", "caption": "grey", "start": 24}')
    with pytest.raises(UserError, match="`start` is 24, expected less than 24"):
        read_manifest(manifest)


@pytest.mark.parametrize(
    ("start", "frames", "height", "width", "said"),
    [
        (0, FRAMES, 48, 80, None),
        (20, 4, 63, 95, None),
        (20, 5, 48, 80, "clip `grey`: the video `grey.mp4` has 24 frames, not 25"),
        (0, 5, 64, 80, "clip `grey`: it is 64 x 80, and the video `grey.mp4` is 48 x 80 (height x width)"),
        (0, 5, 80, 48, "clip `grey`: it is 80 x 48, and the video `grey.mp4` is 48 x 80 (height x width)"),
    ],
)
def test_a_clip_is_held_against_its_videos_header(
    video: Path, start: int, frames: int, height: int, width: int, said: str | None
) -> None:
    clip = VideoClip("a", frames, height, width, 0, path=video, start=start)
    if said is None:
        hold_against_header(clip)
        return
    with pytest.raises(UserError) as caught:
        hold_against_header(clip)
    assert str(caught.value).replace(str(video.parent) + "/", "") == said


def test_an_encoder_of_ones_own_is_held_against_the_header_though_it_has_no_vae(video: Path) -> None:
    class Own(VideoEncoder):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.multiple = 16

    clip = VideoClip("a", FRAMES, 48, 80, 0, path=video, start=0)
    Own().check(clip)
    assert Own().load(clip, "cpu").shape == (1, 3, FRAMES, 48, 80)
    with pytest.raises(UserError, match="has 24 frames"):
        Own().check(replace(clip, frames=FRAMES + 1))
