"""Manifests: what is read, and the exact text of every mistake."""

import json
from pathlib import Path

import pytest

from arachnec.data.clip import VideoClip
from arachnec.data.manifest import MOST_IN_BATCH, BatchTooLarge, demand_plannable, read_manifest
from arachnec.ir.diagnostic import UserError, render

ROW = '{"frames": 5, "height": 64, "width": 96, "text_tokens": 7}'


def written(folder: Path, text: str, name: str = "clips.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(path: Path, **options: int) -> str:
    with pytest.raises(UserError) as caught:
        read_manifest(path, **options)
    (diagnostic,) = caught.value.diagnostics
    return render(diagnostic).replace(str(path.parent) + "/", "")


def test_rows_are_clips_with_their_numbers_as_ids(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path, f"{ROW}\n\n{ROW}\n"))
    assert manifest.iterations == ((VideoClip(0, 5, 64, 96, 7), VideoClip(1, 5, 64, 96, 7)),)


def test_aliases_mean_the_same_and_a_caption_is_counted_in_bytes(tmp_path: Path) -> None:
    text = '{"num_frames": 5, "height": 64, "width": 96, "text": "a fée", "id": "x", "micro_batch": 3}'
    (clip,) = read_manifest(written(tmp_path, text)).clips
    assert clip == VideoClip("x", 5, 64, 96, len("a fée".encode()) + 1, "a fée")


def test_clips_makes_equal_clips_with_ids_of_their_own(tmp_path: Path) -> None:
    text = '{"id": "a", "clips": 3, "frames": 5, "height": 64, "width": 96, "text_tokens": 7}'
    clips = read_manifest(written(tmp_path, text)).clips
    assert [clip.id for clip in clips] == ["a.0", "a.1", "a.2"]
    assert len({clip.shape for clip in clips}) == 1


def test_iteration_groups_rows_in_order_of_first_appearance(tmp_path: Path) -> None:
    rows = [{**json.loads(ROW), "iteration": i} for i in (4, 2, 4)]
    manifest = read_manifest(written(tmp_path, "\n".join(map(json.dumps, rows))))
    assert [[clip.id for clip in iteration] for iteration in manifest.iterations] == [[0, 2], [1]]


def test_batch_takes_so_many_clips_at_a_time_and_drops_none(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path, f"{ROW}\n" * 5), batch=2)
    assert [[clip.id for clip in iteration] for iteration in manifest.iterations] == [[0, 1], [2, 3], [4]]


def test_csv_and_parquet_say_what_jsonl_says(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": "a", "frames": 5, "height": 64, "width": 96, "caption": "1, 2", "text_tokens": None},
        {"id": "b", "frames": 1, "height": 32, "width": 48, "caption": None, "text_tokens": 9},
    ]
    jsonl = written(tmp_path, "\n".join(map(json.dumps, rows)))
    csv = written(tmp_path, 'id,frames,height,width,caption,text_tokens\na,5,64,96,"1, 2",\nb,1,32,48,,9\n', "c.csv")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    expected = read_manifest(jsonl).clips
    assert read_manifest(csv).clips == expected
    assert read_manifest(tmp_path / "c.parquet").clips == expected


def test_a_row_may_stand_for_several_clips_and_iterations_have_names(tmp_path: Path) -> None:
    (tmp_path / "v.safetensors").touch()
    text = (
        '{"clips": 2, "iteration": "x", "frames": 5, "height": 64, "width": 96, "caption": "é"}\n'
        '{"iteration": "y", "frames": 1, "height": 8, "width": 8, "text_tokens": 3, "video": "v.safetensors"}'
    )
    manifest = read_manifest(written(tmp_path, text))
    assert [[clip.frames for clip in iteration] for iteration in manifest.iterations] == [[5, 5], [1]]
    assert manifest.clips[0].caption == "é"
    assert manifest.clips[2].path == tmp_path / "v.safetensors"


MISTAKES = {
    "a key stands once in a row": (
        '{"frames": 5, "height": 64, "caption": "\\"frames\\"", "width": 96, "frames": 9}',
        """\
error: `frames` is given twice
  --> clips.jsonl:1:67
   |
 1 | {"frames": 5, "height": 64, "caption": "\\"frames\\"", "width": 96, "frames": 9}
   |                                                                   ^^^^^^^^ the second one
  help: keep one of them; to list another clip, write another row""",
    ),
    "an unknown key gets a suggestion": (
        '{"frames": 5, "hieght": 64, "width": 96, "text_tokens": 7}',
        """\
error: unknown key `hieght`
  --> clips.jsonl:1:15
   |
 1 | {"frames": 5, "hieght": 64, "width": 96, "text_tokens": 7}
   |               ^^^^^^^^ no such key
  help: did you mean `height`?""",
    ),
    "a clip has at least one frame": (
        ROW + '\n{"frames": 0, "height": 64, "width": 96, "text_tokens": 7}',
        """\
error: `frames` is 0, expected at least 1
  --> clips.jsonl:2:2
   |
 2 | {"frames": 0, "height": 64, "width": 96, "text_tokens": 7}
   |  ^^^^^^^^ expected at least 1
  help: an image is a clip of 1 frame""",
    ),
    "sizes are positive": (
        '{"frames": 5, "height": -64, "width": 96, "text_tokens": 7}',
        """\
error: `height` is -64, expected at least 1
  --> clips.jsonl:1:15
   |
 1 | {"frames": 5, "height": -64, "width": 96, "text_tokens": 7}
   |               ^^^^^^^^ expected at least 1
  help: the smallest `height` is 1""",
    ),
    "frames are whole": (
        '{"num_frames": 5.5, "height": 64, "width": 96, "text_tokens": 7}',
        """\
error: `frames` is 5.5, expected an integer of at least 1
  --> clips.jsonl:1:2
   |
 1 | {"num_frames": 5.5, "height": 64, "width": 96, "text_tokens": 7}
   |  ^^^^^^^^^^^^ expected an integer of at least 1
  help: write `frames` as a whole number""",
    ),
    "a size is not missing": (
        '{"frames": 5, "height": 64, "text_tokens": 7}',
        """\
error: the clip has no `width`
  --> clips.jsonl:1:1
   |
 1 | {"frames": 5, "height": 64, "text_tokens": 7}
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ missing here
  help: add `width`, or the `path` of a video to read it from""",
    ),
    "the text is not missing": (
        '{"frames": 5, "height": 64, "width": 96}',
        """\
error: the clip has no `text_tokens`
  --> clips.jsonl:1:1
   |
 1 | {"frames": 5, "height": 64, "width": 96}
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ missing here
  help: add `caption`, or `text_tokens` (0 for a model that reads no text)""",
    ),
    "one thing is not given twice": (
        '{"frames": 5, "num_frames": 5, "height": 64, "width": 96, "text_tokens": 7}',
        """\
error: `frames` and `num_frames` are two names of one thing
  --> clips.jsonl:1:15
   |
 1 | {"frames": 5, "num_frames": 5, "height": 64, "width": 96, "text_tokens": 7}
   |               ^^^^^^^^^^^^ given twice
  help: keep `frames`""",
    ),
    "ids differ": (
        '{"id": "a", "frames": 5, "height": 64, "width": 96, "text_tokens": 7}\n' * 2,
        """\
error: two clips have the id `a`
  --> clips.jsonl:2:2
   |
 2 | {"id": "a", "frames": 5, "height": 64, "width": 96, "text_tokens": 7}
   |  ^^^^ the other is in row 1, counted from 1
  help: ids seed a clip's noise and must differ; leave `id` out to use the row's number""",
    ),
    "a line is JSON": (
        ROW[:-1],
        """\
error: this row is not JSON
  --> clips.jsonl:1:58
   |
 1 | {"frames": 5, "height": 64, "width": 96, "text_tokens": 7
   |                                                          ^ expecting ',' delimiter
  help: a manifest line is one complete JSON object""",
    ),
    "a line is an object": (
        "[5, 64, 96, 7]",
        """\
error: this row is not a JSON object
  --> clips.jsonl:1:1
   |
 1 | [5, 64, 96, 7]
   | ^^^^^^^^^^^^^^ a list
  help: write one object of keys and values""",
    ),
    "iteration is given everywhere or nowhere": (
        ROW[:-1] + ', "iteration": 0}\n' + ROW,
        """\
error: the clip has no `iteration`
  --> clips.jsonl:2:1
   |
 2 | {"frames": 5, "height": 64, "width": 96, "text_tokens": 7}
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ missing here
  help: give `iteration` in every row, or in none""",
    ),
    "a path leads to a file": (
        '{"path": "gone.mp4", "caption": "a"}',
        """\
error: `path` is 'gone.mp4', expected a file that is there
  --> clips.jsonl:1:2
   |
 1 | {"path": "gone.mp4", "caption": "a"}
   |  ^^^^^^ expected a file that is there
  help: correct the path; a relative one starts at the manifest's folder""",
    ),
    "a manifest lists clips": (
        "\n\n",
        """\
error: the manifest `clips.jsonl` lists no clips
  help: add a line such as {"frames": 81, "height": 480, "width": 832, "text_tokens": 226}""",
    ),
}


@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_is_shown_where_it_is(tmp_path: Path, rule: str) -> None:
    text, expected = MISTAKES[rule]
    assert message(written(tmp_path, text)) == expected


def test_a_csv_row_has_as_many_fields_as_the_header(tmp_path: Path) -> None:
    text = "frames,height,width,text_tokens\n5,64,96,7\n5,64,96\n"
    assert (
        message(written(tmp_path, text, "c.csv"))
        == """\
error: this row is not complete
  --> c.csv:3:1
   |
 3 | 5,64,96
   | ^^^^^^^ 3 fields under 4 names
  help: give every row as many fields as the first line"""
    )


def test_an_unknown_csv_column_is_an_error_even_where_it_is_empty(tmp_path: Path) -> None:
    text = "frames,height,width,text_tokens,fps\n5,64,96,7,\n"
    assert message(written(tmp_path, text, "c.csv")).splitlines()[:2] == [
        "error: unknown key `fps`",
        "  --> c.csv:1:33",
    ]


def test_a_parquet_mistake_names_the_row(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"frames": n, "height": 64, "width": 96, "text_tokens": 7} for n in (5, 0)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    assert (
        message(tmp_path / "c.parquet")
        == """\
error: `frames` is 0, expected at least 1
  --> c.parquet (row 2):1:1
   = expected at least 1
  help: an image is a clip of 1 frame"""
    )


@pytest.mark.parametrize("name", ["clips.txt", "clips"])
def test_an_unknown_extension_is_refused(tmp_path: Path, name: str) -> None:
    assert "manifests end in .jsonl, .csv or .parquet" in message(written(tmp_path, ROW, name))


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "gone.jsonl").splitlines()[0] == "error: there is no manifest `gone.jsonl`"


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clips.jsonl"
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8 at byte 0" in message(path)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    assert "cannot be read" in message(written(tmp_path, "PAR1", "c.parquet"))


@pytest.mark.parametrize(("batch", "refused"), [(None, True), (MOST_IN_BATCH, False), (MOST_IN_BATCH + 1, True)])
def test_a_batch_has_as_many_clips_as_are_planned_at_once_and_no_more(
    tmp_path: Path, batch: int | None, refused: bool
) -> None:
    file = tmp_path / "clips.jsonl"
    row = {"frames": 1, "height": 16, "width": 16, "text_tokens": 0, "clips": MOST_IN_BATCH + 1}
    file.write_text(json.dumps(row) + "\n")
    manifest = read_manifest(file, batch)
    if not refused:
        assert demand_plannable(manifest) is manifest
        return
    with pytest.raises(UserError) as told:
        demand_plannable(manifest)
    (problem,) = told.value.diagnostics
    assert isinstance(problem, BatchTooLarge)
    assert (problem.number, problem.clips) == (0, MOST_IN_BATCH + 1)


def test_clips_are_named_by_their_files_stem_and_where_stems_are_equal_by_more(tmp_path: Path) -> None:
    for name in ("a/cat.mp4", "b/cat.mp4", "b/dog.mp4", "fox.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    size = {"frames": 5, "height": 16, "width": 16, "caption": ""}
    paths = ("a/cat.mp4", "b/cat.mp4", "b/dog.mp4", "fox.mp4", "fox.mp4", None)
    (tmp_path / "clips.jsonl").write_text(
        "".join(json.dumps(size | ({"path": path} if path else {})) + "\n" for path in paths)
    )
    clips = read_manifest(tmp_path / "clips.jsonl").clips
    assert [clip.name for clip in clips] == ["a/cat", "b/cat", "dog", "fox#3", "fox#4", "5"]
    assert [clip.id for clip in clips] == list(range(6))
