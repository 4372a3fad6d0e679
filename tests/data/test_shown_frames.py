"""Frames are counted, and taken, as they are shown."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy
import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.data.header_check import hold_against_headers
from arachnec.data.manifest import read_manifest
from arachnec.data.video import count_frames, read_frames, read_header
from arachnec.ir.diagnostic import UserError

HEIGHT, WIDTH = 48, 64
MILLISECOND = Fraction(1, 1000)


def written(
    path: Path,
    times: Sequence[int],
    *,
    base: Fraction = MILLISECOND,
    rate: int | None = None,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
) -> Path:
    """A video whose frame ``i`` is of grey ``4 i``, shown at ``times[i]``."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate or 1 / (base * (times[1] - times[0])), options=options or {})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.codec_context.time_base = stream.time_base = base
        for number, time in enumerate(times):
            pixels = numpy.full((HEIGHT, WIDTH, 3), 4 * number, numpy.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def cut(source: Path, path: Path, first_time: Fraction) -> Path:
    """What ``ffmpeg -ss T -i SOURCE -c copy PATH`` makes: from the keyframe before T on, and negative time stamps."""
    with av.open(str(source)) as whole, av.open(str(path), "w") as container:
        (stream,) = whole.streams.video
        copied = container.add_stream_from_template(stream)
        whole.seek(int(first_time / stream.time_base), stream=stream, backward=True)
        for packet in whole.demux(stream):
            if packet.size:
                packet.pts -= int(first_time / packet.time_base)
                packet.dts -= int(first_time / packet.time_base)
                packet.stream = copied
                container.mux(packet)
    return path


def numbers(frames: torch.Tensor) -> list[int]:
    """Which frame of the fixture each one is."""
    return (frames.float().mean(dim=(0, 2, 3)) / 4).round().int().tolist()


def taken(path: Path, start: int, frames: int, **how: float) -> list[int]:
    return numbers(read_frames(path, start, frames, HEIGHT, WIDTH, **how))


GOP = {"x264-params": "keyint=12:min-keyint=12:bframes=3:scenecut=0"}
AT_24 = range(50)
TICK = Fraction(1, 24)


def test_frames_before_an_edit_list_are_neither_counted_nor_shown(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.mp4", AT_24, base=TICK, options=GOP)
    path = cut(whole, tmp_path / "cut.mp4", Fraction(30, 24))
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 50 - 24  # from the keyframe on
    assert read_header(path).frames == count_frames(path) == 20
    assert taken(path, 0, 20) == list(range(30, 50))
    assert taken(path, 7, 5) == list(range(37, 42))
    with pytest.raises(UserError, match="gave 20 of the 21 frames") as caught:
        read_frames(path, 0, 21, 16, 16)
    assert caught.value.diagnostics[0].remedy == "take fewer frames or an earlier start"


def test_a_truncated_file_is_told_though_an_edit_list_hides_frames(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.mp4", AT_24, base=TICK, options=GOP)
    path = cut(whole, tmp_path / "cut.mp4", Fraction(30, 24))
    content = path.read_bytes()
    with av.open(str(path)) as container:
        half = sorted(packet.pos for packet in container.demux(video=0) if packet.size)[12]
    index = content.index(b"moov") - 4
    path.write_bytes(content[:half] + bytes(index - half) + content[index:])  # the pixels are lost, the index is there
    with pytest.raises(UserError) as caught:
        read_frames(path, 0, 20, 16, 16)
    assert "its header promises 20: the file is truncated or damaged" in caught.value.diagnostics[0].remedy


@pytest.mark.parametrize("suffix", ["mkv", "ts"])
def test_frames_that_refer_to_what_was_cut_off_are_not_counted(tmp_path: Path, suffix: str) -> None:
    open_gop = {"x265-params": "keyint=12:min-keyint=12:bframes=3:open-gop=1:scenecut=0:log-level=none"}
    whole = written(tmp_path / f"whole.{suffix}", AT_24, base=TICK, codec="libx265", options=open_gop)
    path = tmp_path / f"late.{suffix}"
    with av.open(str(whole)) as source, av.open(str(path), "w") as container:
        (stream,) = source.streams.video
        copied = container.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        second = [place for place, packet in enumerate(packets) if packet.is_keyframe][1]
        assert any(packet.pts < packets[second].pts for packet in packets[second:])
        for packet in packets[second:]:
            packet.stream = copied
            container.mux(packet)
    with av.open(str(path)) as container:
        decoded = sum(1 for _ in container.decode(video=0))
    assert read_header(path).frames == count_frames(path) == decoded < len(packets) - second
    everything = taken(path, 0, decoded)
    assert taken(path, 5, decoded - 5) == everything[5:]


def test_a_raw_stream_without_times_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "raw.h264", AT_24, base=TICK, options=GOP)
    assert read_header(path).frames == 50
    assert taken(path, 13, 4) == [13, 14, 15, 16]


def test_a_fragmented_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "fragments.mp4"
    whole = written(tmp_path / "whole.mp4", AT_24, base=TICK, options=GOP)
    with (
        av.open(str(whole)) as source,
        av.open(str(path), "w", options={"movflags": "frag_keyframe+empty_moov"}) as container,
    ):
        (stream,) = source.streams.video
        copied = container.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.size:
                packet.stream = copied
                container.mux(packet)
    assert read_header(path).frames == 50


SIXTY = [round(1000 * number / 60) for number in range(60)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize("target", [16, 24, 30, 60, 23.976])
def test_frames_are_those_shown_at_the_times_of_the_target_rate(tmp_path: Path, suffix: str, target: float) -> None:
    if suffix == "mp4":
        path = written(tmp_path / "sixty.mp4", range(60), base=Fraction(1, 60), options=GOP)
    else:
        path = written(tmp_path / "sixty.mkv", SIXTY, rate=60, options=GOP)
    expected = [int(Fraction(k) / Fraction(str(target)) * 60 + Fraction(1, 10)) for k in range(100)]
    expected = [number for number in expected if number < 60]
    (tmp_path / "clips.jsonl").write_text(f'{{"path": "{path.name}", "target_fps": {target}, "text_tokens": 0}}')
    (clip,) = read_manifest(tmp_path / "clips.jsonl").clips
    assert (clip.frames, clip.target_fps, clip.frame_rate) == (len(expected), target, target)
    assert clip.fps == pytest.approx(60, rel=0.001)
    assert taken(path, 0, clip.frames, target_fps=target) == expected
    with pytest.raises(UserError, match=f"gave {len(expected)} of the {len(expected) + 1} frames"):
        read_frames(path, 0, len(expected) + 1, 16, 16, target_fps=target)


def test_of_a_variable_rate_the_frame_that_is_shown_then_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "phone.mkv", [0, 33, 66, 500, 533, 566, 600, 900, 1000, 1100], options=GOP)
    #                                times: 0  100 200 300 400 500 600 700 800 900 1000 1100
    assert taken(path, 0, 12, target_fps=10) == [0, 2, 2, 2, 2, 3, 6, 6, 6, 7, 8, 9]
    assert taken(path, 3, 5, target_fps=10) == [3, 6, 6, 6, 7]
    assert taken(path, 1, 3, stride=4) == [1, 5, 9]


def test_a_slow_video_shows_a_frame_more_than_once(tmp_path: Path) -> None:
    path = written(tmp_path / "slow.mp4", range(4), base=Fraction(1, 8), options=GOP)
    assert taken(path, 0, 8, target_fps=16) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_still_image_is_one_frame_at_any_rate(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "still.png"), "w") as container:
        stream = container.add_stream("png", rate=1)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "rgb24"
        pixels = numpy.full((HEIGHT, WIDTH, 3), 40, numpy.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    (tmp_path / "clips.jsonl").write_text('{"path": "still.png", "target_fps": 60, "fps": 30, "text_tokens": 0}')
    (clip,) = read_manifest(tmp_path / "clips.jsonl").clips
    assert clip.frames == 1 and taken(tmp_path / "still.png", 0, 1, target_fps=60.0) == [10]
    assert hold_against_headers([clip]) == []


def test_a_stride_counts_frames_of_the_file(tmp_path: Path) -> None:
    written(tmp_path / "a.mp4", AT_24, base=TICK, options=GOP)
    (tmp_path / "clips.csv").write_text("path,start,stride,text_tokens\na.mp4,4,5,0\n")
    (clip,) = read_manifest(tmp_path / "clips.csv").clips
    assert (clip.frames, clip.frame_rate) == (10, 24 / 5)
    assert taken(tmp_path / "a.mp4", 4, 10, stride=5) == list(range(4, 50, 5))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('"target_fps": 0', "`target_fps` is 0, expected a number of frames a second, from 0.001 to 1000"),
        ('"fps": "24"', "`fps` is '24', expected a number of frames a second"),
        ('"stride": 0', "`stride` is 0, expected at least 1"),
        ('"stride": 2, "target_fps": 16', "`stride` is 2, expected no `stride` beside `target_fps`"),
    ],
)
def test_a_rate_that_cannot_be_is_told(tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "c.jsonl").write_text(f'{{"frames": 5, "height": 48, "width": 64, "text_tokens": 0, {row}}}')
    with pytest.raises(UserError) as caught:
        read_manifest(tmp_path / "c.jsonl")
    assert said in str(caught.value)


def test_clips_are_held_against_their_videos_in_one_message(tmp_path: Path) -> None:
    written(tmp_path / "a.mp4", AT_24, base=TICK, options=GOP)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    path = tmp_path / "a.mp4"

    def clip(id: str, frames: int = 9, width: int = WIDTH, **keys: object) -> VideoClip:
        return VideoClip(id, frames, HEIGHT, width, 0, path=path, **keys)

    fits = [clip("a"), clip("b", 9, target_fps=4.0), clip("c", fps=23.976), VideoClip("d", 9, 480, 832, 0)]
    broken = VideoClip("e", 9, HEIGHT, WIDTH, 0, path=tmp_path / "broken.mp4")
    (note,) = hold_against_headers([*fits, broken])
    assert note.startswith("1 video cannot be read, and will be skipped: the video `")
    wrong = [clip("f", 51), clip("g", width=WIDTH + 64), clip("h", fps=16.0), clip("i", 10, target_fps=4.0, start=24)]
    with pytest.raises(UserError) as caught:
        hold_against_headers([*fits, *wrong])
    text = str(caught.value).replace(f"{tmp_path}/", "")
    assert text.splitlines() == [
        "4 clips are not as the manifest says (1 videos were looked at):",
        "  clip `a`: the video `a.mp4` has 50 frames, not 51",
        "  clip `a`: it is 48 x 128, and the video `a.mp4` is 48 x 64 (height x width)",
        "  clip `a`: its `fps` is 16, and the video `a.mp4` has 24 frames a second",
        "  clip `a`: the video `a.mp4` gives 5 frames at 4 a second from frame 24 on, not 10",
    ]
