"""The executable folder: what is written is read back, and what was tampered with is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from arachnec.data.clip import VideoClip
from arachnec.executable import folder as executable_folder
from arachnec.executable import part_files
from arachnec.executable.folder import (
    FINGERPRINTED,
    HEADER,
    ClipRow,
    clip_of,
    own_profiles,
    read_executable,
    row_of,
    write_executable,
)
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import Work, clip, executable

CLIPS = (clip("a", 3), clip(7, 5, start=4))
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return executable(tmp_path / "build", [CLIPS], WORKS, 2, training=Training(lr=0.5, seed=3))


def test_clips_training_and_modules_are_read_back_as_they_were_written(folder: Path) -> None:
    read = read_executable(folder)
    assert read.clips == CLIPS
    assert read.training == Training(lr=0.5, seed=3)
    assert [cascade.clips for cascade in read.program.cascades] == [(0,), (1,)]
    assert [c.id for c in read.traced.clips] == [0, 1]
    assert read.model_file().digest == read.header.fingerprint["model.py"]


def test_no_file_of_an_executable_is_binary(folder: Path) -> None:
    """Weights, pickles and archives have bytes that no text has; a pickle of protocol 0 is text but not printable."""
    names = {path.name for path in folder.iterdir()} - {"source.py"}
    assert names == {
        "executable.json",
        "program.cascade",
        "model.cascade",
        "traced.cascade",
        "clips.jsonl",
        "model.py",
    }
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        assert text.endswith("\n"), path
        assert not [letter for letter in text if not letter.isprintable() and letter not in "\n\t"], path


@pytest.mark.parametrize("name", ["program.cascade", "traced.cascade", "model.cascade"])
def test_a_module_that_is_too_large_is_refused_before_it_is_read_and_before_it_is_written(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).write_bytes((folder / name).read_bytes().ljust(20_000, b"\xff"))
    monkeypatch.setattr(part_files, "LARGEST_PROGRAM", 20_000 - 1)
    with pytest.raises(UserError, match=rf"{name} is larger than 0 MiB, and no module is read that is"):
        read_executable(folder)
    monkeypatch.setattr(part_files, "LARGEST_PROGRAM", 100)
    with pytest.raises(UserError, match=r"program\.cascade is larger than 0 MiB"):
        executable(tmp_path / "large", [CLIPS], WORKS, 2)
    assert not (tmp_path / "large" / HEADER).exists()


def test_more_clips_than_a_module_lists_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executable_folder, "MOST_CLIPS", 2)
    assert len(read_executable(folder).clips) == 2
    monkeypatch.setattr(executable_folder, "MOST_CLIPS", 1)
    with pytest.raises(UserError, match=r"clips\.jsonl lists more than 1 clips"):
        read_executable(folder)


@pytest.mark.parametrize("name", ["model.py", "clips.jsonl", "traced.cascade"])
def test_a_part_that_was_changed_since_it_was_compiled_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        read_executable(folder)


def test_a_users_file_that_changed_since_it_was_compiled_is_known(folder: Path, tmp_path: Path) -> None:
    """The model file, and what it imports from its folder: the copies run, and a person is told."""
    own, read = tmp_path / "own", read_executable(folder)
    own.mkdir()
    (own / "helper.py").write_text("ONE = 1\n")
    (own / "model.py").write_text("import helper\n\n" + (folder / "model.py").read_text())
    model_file = load_model_file(own / "model.py")
    again = write_executable(
        tmp_path / "again",
        program=read.program,
        traced=read.traced,
        pipeline=read.header.pipeline,
        model_file=model_file,
        clips=read.clips,
    )
    assert read_executable(again).changed_since() == []
    (own / "helper.py").write_text("ONE = 2\n")
    assert read_executable(again).changed_since() == [str(own / "helper.py")]
    (own / "model.py").unlink()
    assert read_executable(again).changed_since() == [str(own / "helper.py")]


def test_a_program_edited_by_hand_is_read(folder: Path) -> None:
    path = folder / "program.cascade"
    path.write_text("// by hand\n" + path.read_text())
    assert read_executable(folder).program.name == "by_hand"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("executable.json", None, "has no executable.json"),
        ("program.cascade", None, "has no program.cascade"),
        ("executable.json", "{", "executable.json"),
        ("executable.json", '{"format": 1, "surprise": 2}', "surprise"),
        ("executable.json", '{"format": "two"}', "executable.json"),
    ],
)
def test_a_missing_or_malformed_part_is_named(folder: Path, name: str, text: str | None, expected: str) -> None:
    path = folder / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=expected):
        read_executable(folder)


def test_passes_from_outside_the_folder_are_not_loaded(folder: Path) -> None:
    path = folder / "executable.json"
    path.write_text(path.read_text().replace('"load": []', '"load": ["../evil.py"]'))
    with pytest.raises(UserError, match="outside"):
        read_executable(folder)


def test_a_profile_travels_with_the_executable_under_a_name_of_its_own(tmp_path: Path) -> None:
    profile = tmp_path / "odd name, {1}.json"
    profile.write_text("{}")
    text = f'partition{{policy=dual,profile="{profile}"}},annotate{{profile="{profile}"}},place'
    pipeline, texts = own_profiles(text)
    assert pipeline == "partition{policy=dual,profile=profile.json},annotate{profile=profile.json},place"
    assert texts == {"profile.json": "{}"}


def test_orders_travel_with_the_executable_too(tmp_path: Path) -> None:
    orders = tmp_path / "mine.csv"
    orders.write_text("0F0,0B0\n")
    pipeline, texts = own_profiles(f"annotate{{profile=h100-80g}},schedule-pipeline{{orders={orders}}}")
    assert pipeline == "annotate{profile=h100-80g},schedule-pipeline{orders=orders.csv}"
    assert texts == {"orders.csv": "0F0,0B0\n"}


def test_densities_travel_with_the_executable_and_other_files_do_not(tmp_path: Path) -> None:
    """A pass of the user's may have a `file` that it writes."""
    densities = tmp_path / "mine.json"
    densities.write_text("{}")
    assert own_profiles(f"sparsify{{file={densities},mass=0.9}}") == (
        "sparsify{file=sparsity.json,mass=0.9}", {"sparsity.json": "{}"}
    )  # fmt: skip
    assert own_profiles(f"mine{{file={densities}}},place") == (f"mine{{file={densities}}},place", {})


@pytest.mark.parametrize(
    "step",
    [
        "sparsify{file=/etc/hostname}",
        'sparsify { mass=0.9, file = "/etc/hostname" }',
        "annotate{profile =/etc/hostname}",
        "annotate{ profile= ../profile.json}",
    ],
)
def test_a_pipeline_names_no_file_outside_of_its_folder(step: str, folder: Path) -> None:
    """However it is written: a command that only looks makes plans anew with these passes."""
    rewritten(folder, pipeline=f"{step},place")
    with pytest.raises(UserError, match="outside"):
        read_executable(folder)


def test_the_name_of_a_device_stays_in_the_pipeline() -> None:

    assert own_profiles("annotate{profile=h100-80g},place") == ("annotate{profile=h100-80g},place", {})


def rewritten(folder: Path, **changes: object) -> None:
    """``executable.json`` with other values, its fingerprint made to fit the files as they are."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FINGERPRINTED}
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | {"fingerprint": digests} | changes))


def test_a_fingerprint_that_leaves_a_part_out_is_refused(folder: Path) -> None:
    rewritten(folder, fingerprint={})
    with pytest.raises(UserError, match=r"leaves out model\.py"):
        read_executable(folder)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda text: text.splitlines(keepends=True)[0], "lists 1 clip"),
        (lambda text: text.replace('"frames":3', '"frames":-3'), "is not the one of"),
        (lambda text: "".join(reversed(text.splitlines(keepends=True))), "is not the one of"),
    ],
)
def test_clips_that_are_not_those_of_the_traced_module_are_refused(
    folder: Path, edit: Callable[[str], str], reason: str
) -> None:
    clips = folder / "clips.jsonl"
    changed = edit(clips.read_text())
    assert changed != clips.read_text()
    clips.write_text(changed)
    rewritten(folder)
    with pytest.raises(UserError, match=reason):
        read_executable(folder)


def test_a_clip_is_read_back_with_its_captions_and_the_other_columns_of_its_manifest() -> None:
    files = {"mask": Path("/data/mask.png"), "references": (Path("/data/a.png"), Path("/data/b.png"))}
    written = VideoClip(
        *("a", 5, 32, 32, 9, "one", Path("/data/cat.mp4")),
        values={"score": 4.5, "crop": [1, 2], **files},
        title="b/cat",
        captions=("one", "two"),
    )
    again = clip_of(msgspec.json.decode(msgspec.json.encode(row_of(written)), type=ClipRow))
    assert again == written
    assert (again.values, again.name) == (written.values, "b/cat")


GRAPH = """
  graph @Block (%x : f32[B, S, 12]) -> (%0) {} [
    %0 = "aten.neg.default"(%x) : f32[B, S, 12]
  ]
"""


@pytest.mark.parametrize("of_model", [GRAPH.replace("neg", "exp"), GRAPH.replace("@Block", "@Other"), ""])
def test_graphs_that_are_not_those_that_were_traced_are_refused(folder: Path, of_model: str) -> None:
    header = json.loads((folder / HEADER).read_text())
    for name, graph in (("traced.cascade", GRAPH), ("model.cascade", of_model)):
        text = (folder / name).read_text().rstrip().removesuffix("}") + graph + "}\n"
        (folder / name).write_text(text)
        header["fingerprint"][name] = hashlib.sha256(text.encode()).hexdigest()
    (folder / HEADER).write_text(json.dumps(header))
    with pytest.raises(UserError, match=r"model\.cascade has another graph `(Block|Other)` than traced\.cascade"):
        read_executable(folder)
