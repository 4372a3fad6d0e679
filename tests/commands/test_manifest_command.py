"""``arachnec manifest``: what a folder of videos is listed as."""

import json
from pathlib import Path

import pytest
import torch

from arachnec.cli import run
from arachnec.data.manifest import read_manifest
from arachnec.data.video_file import write_video


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    for name, frames, height, width in (
        ("cat.mp4", 5, 32, 48),
        ("deep/in/dog.mp4", 3, 48, 32),
        ("b/fox.mp4", 2, 16, 16),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(folder / name, torch.zeros(3, frames, height, width))
    (folder / "cat.txt").write_text("\ufeffa cat\n")
    (folder / "broken.mp4").write_bytes(b"no video")
    (folder / "notes.md").write_text("of no kind that is looked at")
    return folder


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_is_listed_with_sizes_lengths_and_captions(videos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = videos.parent / "clips.jsonl"
    assert run(["manifest", str(videos), "-o", str(output)]) == 0
    printed = capfd.readouterr()
    assert "3 clips; 1 file skipped; 2 without a caption" in printed.out
    assert "broken.mp4" in printed.err
    assert rows_of(output) == [
        {"path": "videos/cat.mp4", "frames": 5, "height": 32, "width": 48, "fps": 16.0, "caption": "a cat"},
        {"path": "videos/b/fox.mp4", "frames": 2, "height": 16, "width": 16, "fps": 16.0, "caption": ""},
        {"path": "videos/deep/in/dog.mp4", "frames": 3, "height": 48, "width": 32, "fps": 16.0, "caption": ""},
    ]
    assert [clip.name for clip in read_manifest(output).clips] == ["cat", "fox", "dog"]


def test_captions_stand_in_a_table(videos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, table = videos.parent / "clips.jsonl", videos.parent / "captions.csv"
    table.write_text("file_name,long\nvideos/b/fox.mp4,a fox\ndog,a dog\nnone.mp4,nothing\n")
    words = ["manifest", str(videos), "-o", str(output), "--captions", str(table)]
    assert run([*words, "--columns", "caption=long"]) == 0
    assert "1 caption of no file" in capfd.readouterr().out
    assert [row["caption"] for row in rows_of(output)] == ["a cat", "a fox", "a dog"]
    assert run(words) == 2
    assert "unknown key `long`" in capfd.readouterr().err


def test_a_folder_without_videos_and_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", str(tmp_path), "-o", str(tmp_path / "c.jsonl")]) == 2
    assert "has no video or picture that can be read" in capfd.readouterr().err
    assert run(["manifest", str(tmp_path / "none"), "-o", str(tmp_path / "c.jsonl")]) == 2
    assert "there is no folder" in capfd.readouterr().err
