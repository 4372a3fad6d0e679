"""Hostile folders: whatever stands in one, a command that looks ends with errors of our own and runs none of it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arachnec.checkpoint.files import FileRecord, sha256
from arachnec.checkpoint.folder import COMMIT, Position, committed, is_intact, read_commit, write_commit
from arachnec.cli import run
from arachnec.data.requests import Request
from arachnec.executable.folder import HEADER, MEASURED, read_header
from arachnec.executable.sampling_folder import Settings, write_sampling_executable
from arachnec.ir.diagnostic import UserError
from arachnec.ir.limits import LONGEST_ERRORS, LONGEST_MS
from arachnec.ir.parser import parse_file
from arachnec.models.sampler_file import load_sampler_file
from arachnec.views.timeline import read_measured, scale_end
from benchmarks.trust.hostile_folders import damage, refit, tell_code
from tests.commands.test_requests import GOLDEN, SAMPLER
from tests.distributed.executor_cases import Work, clip, executable

QUICK = (("show", "--html", "page.html", "--svg", "drawn.svg"), ("check",), ("simulate",), ("explain", "--no-what-if"))
DRAWN = 24


def interval(**changes: object) -> dict[str, object]:
    return {"rank": 0, "op": "forward", "target": "0", "start": 0.0, "end": 1.0} | changes


def measured(folder: Path, **changes: object) -> Path:
    path = folder / MEASURED
    path.write_text(json.dumps({"step": 1, "intervals": [interval(**changes)]}))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One that trains, with what a run measured, and one that samples."""
    root = tmp_path_factory.mktemp("whole")
    train = executable(root / "train", [(clip("a", 3), clip(7, 5))], [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)], 2)
    measured(train)
    (root / "sampler.py").write_text(SAMPLER)
    module = parse_file(GOLDEN)
    requests = tuple(
        Request(n, None, own.frames, own.height, own.width, text_tokens=own.text)
        for n, own in enumerate(module.clips)
    )  # fmt: skip
    sampling = write_sampling_executable(
        root / "sampling", program=module, traced=parse_file(GOLDEN.with_suffix(".cascade")), pipeline="generate",
        sampler=load_sampler_file(root / "sampler.py"), requests=requests,
        settings=Settings("sampler.py", ("large", "small"), "adaptive=0.1"),
    )  # fmt: skip
    return [train, sampling]


def looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands that look: 0, or 2 with a short message that begins with an error; no code of the folder."""
    for word, *options in QUICK:
        given = [option if option.startswith("--") else str(folder.parent / option) for option in options]
        code, said = run((word, str(folder), *given)), capsys.readouterr().err
        assert code == 0 or (code == 2 and said.startswith("error: ")), (word, code, said)
        assert len(said) < 2 * LONGEST_ERRORS
        assert not (folder.parent / "ran").exists(), word


@pytest.mark.parametrize("kind", [0, 1], ids=["train", "sampling"])
def test_whole_folders_are_looked_at(
    kind: int, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(folders[kind], tmp_path / "build"))
    tell_code(folder)
    for word, *_ in QUICK:
        assert run((word, str(folder))) == 0, capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [0, 1], ids=["train", "sampling"])
def test_damaged_folders_end_with_errors_of_our_own_and_run_no_code(
    kind: int, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(DRAWN):
        rng, place = random.Random(f"{kind}/{number}"), tmp_path / str(number)
        folder = Path(shutil.copytree(folders[kind], place / "build"))
        damage(folder, [folders[1 - kind]], rng)
        if rng.random() < 0.7:
            refit(folder)
        tell_code(folder)
        looked_at(folder, capsys)
        shutil.rmtree(place)


def header_of(folder: Path, **changes: object) -> Path:
    (folder / HEADER).write_text(json.dumps(json.loads((folder / HEADER).read_text()) | changes))
    return folder


def test_check_runs_no_passes_of_an_executable_that_samples(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are code; a run that loads them holds the program's stages to them."""
    folder = Path(shutil.copytree(folders[1], tmp_path / "build"))
    (folder / "own.py").write_text("")
    header_of(folder, load=["own.py"])
    tell_code(folder)
    assert run(("check", str(folder))) == 0
    assert "stages    not held to those that the passes in own.py plan with" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["check", "run", "explain"])
@pytest.mark.parametrize("kind", [0, 1], ids=["train", "sampling"])
def test_a_header_that_is_cut_short_is_told_so(
    kind: int, command: str, folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(folders[kind], tmp_path / "build"))
    whole = (folder / HEADER).read_bytes()
    for size in (0, 40, len(whole) // 2, len(whole) - 3):
        (folder / HEADER).write_bytes(whole[:size])
        assert run((command, str(folder))) == 2
        said = capsys.readouterr().err
        assert "executable.json is cut short or damaged" in said, size
        assert "help: " in said


@pytest.mark.parametrize("value", ['"\\q"', '"\x01"', '"', '"a"b'])
def test_an_option_of_the_pipeline_that_is_no_string_is_no_traceback(
    value: str, folders: list[Path], tmp_path: Path
) -> None:
    """As it stands it names no file; the pipeline's own reader says what is wrong with it."""
    folder = header_of(
        Path(shutil.copytree(folders[0], tmp_path / "build")), pipeline=f"annotate{{profile={value}}},lower"
    )
    assert read_header(folder).pipeline.startswith("annotate")
    assert run(("explain", str(folder), "--budget", "1ms")) in (0, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1},
        {"rank": 2**17},
        {"start": 2.0},
        {"end": 2 * LONGEST_MS},
        {"start": -2 * LONGEST_MS},
        {"rank": "0"},
    ],
)
def test_a_measured_timeline_that_nobody_measured_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"measured\.json is not a measured timeline"):
        read_measured(measured(tmp_path, **changes))


@pytest.mark.parametrize("changes", [{"start": -5.0}, {"start": 0.0, "end": 5e-324}, {"start": -LONGEST_MS}])
def test_a_measured_timeline_of_odd_clocks_is_shown(
    changes: dict[str, object], folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "build"))
    measured(folder, **changes)
    assert run(("show", str(folder), "--svg", str(tmp_path / "drawn.svg"))) == 0
    assert "measured, step 1" in capsys.readouterr().out


def test_an_axis_ends_with_what_lasts_longest_and_never_at_nothing() -> None:
    assert scale_end(2.0, 3.0) == 3.0
    assert scale_end() == scale_end(0.0) == scale_end(5e-324) == 1.0


def checkpoint(folder: Path, *records: FileRecord) -> Path:
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"x")
    own = FileRecord("rank-00000.safetensors", 1, sha256(folder / "rank-00000.safetensors"))
    write_commit(folder, Position(steps=3, seed=0, model="m"), [own, *records])
    return folder


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("stand_in", [piped, endless])
def test_a_commit_that_is_no_file_is_not_waited_for(stand_in: Callable[[Path], None], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step-00000003")
    assert committed(tmp_path) == [path]
    stand_in(path / COMMIT)
    assert read_commit(path) is None and committed(tmp_path) == []


@pytest.mark.parametrize("stand_in", [piped, endless])
def test_a_file_of_a_checkpoint_that_is_none_is_not_read(stand_in: Callable[[Path], None], tmp_path: Path) -> None:
    """Both say that they have no bytes, as the record does."""
    path = checkpoint(tmp_path / "step-00000003")
    stand_in(path / "rank-00000.safetensors")
    assert not is_intact(path, FileRecord("rank-00000.safetensors", 0, ""))


def test_a_commit_that_names_no_file_any_system_has_is_none(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step-00000003", FileRecord("a\0b", 0, ""))
    assert read_commit(path) is None
