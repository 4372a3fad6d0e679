"""Manifests: what is read, and the exact text of every mistake."""

import json
from pathlib import Path

import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.data.manifest import demand_plannable, read_manifest
from arachnec.data.video_file import write_video
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.limits import MOST_IN_BATCH

ROW = '{"frames": 5, "height": 64, "width": 96, "text_tokens": 7}'


def written(folder: Path, text: str, name: str = "clips.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(path: Path, **options: object) -> str:
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
  help: did you mean `height`? --columns height=hieght reads it as that, values=hieght gives it to `sample`, in \
`clip.values`""",
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
    text = "frames,height,width,text_tokens,mood\n5,64,96,7,\n"
    assert message(written(tmp_path, text, "c.csv")).splitlines()[:2] == [
        "error: unknown key `mood`",
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
    assert str(told.value).startswith(f"global batch 0 of `{file}` has {MOST_IN_BATCH + 1} clips")


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


SIZE = {"frames": 5, "height": 64, "width": 96}
# The columns of public data sets, each with what a row of it says.
PUBLIC = {
    "DiffSynth.csv": 'video,prompt\nplain.mp4,"from sunset to night, a small town"\n',
    "fastvideo.json": '[{"path": "plain.mp4", "resolution": {"width": 160, "height": 96}, "fps": 24.0,'
    ' "duration": 1.375, "cap": ["a cat on a wall", "a grey cat"]}]',
    "floats.csv": "path,caption,num_frames,height,width\nplain.mp4,a,33.0,96.0,160.0\n",
    "metadata.jsonl": '{"file_name": "plain.mp4", "caption": "a cat"}',
    "ltx.json": '[\n  {"caption": "a cat",\n "media_path": "plain.mp4"}\n]\n',
    "musubi.jsonl": '{"video_path": "plain.mp4", "caption": "a cat"}',
    "opensora.csv": "\ufeffpath,id,relpath,num_frames,height,width,aspect_ratio,fps,resolution,aes,text,"
    "num_frames_y\r\n"
    "plain.mp4,scene-0,elsewhere.mp4,33,96,160,0.6,24.0,15360,4.68,bunny,33\r\n",
    "openvid.csv": "video,caption,aesthetic score,motion score,temporal consistency score,camera motion,frame,"
    "fps,seconds\n"
    'plain.mp4,"a woman,\nsmiling",5.1,3.2,0.99,static,33,24.0,1.375\n',
    "vace.csv": 'video,vace_video,vace_video_mask,prompt\nplain.mp4,other.mp4,other.mp4,"Outpaint."\n',
    "videox.json": '[{"file_path": "plain.mp4", "text": "a cat", "type": "video", "width": 160, "height": 96}]',
    "pandas.csv": ",Path,Caption\n0,plain.mp4,a cat\n",
    "filled.jsonl": '{"video": "", "path": "", "file_name": "plain.mp4", "text": "", "prompt": "a cat"}',
    "cases.csv": "Path,path,caption\nother.mp4,plain.mp4,a cat\n",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_manifests_of_public_data_sets_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    write_video(tmp_path / "plain.mp4", torch.zeros(3, 33, 96, 160), 24)
    (tmp_path / "other.mp4").touch()
    (tmp_path / name).write_bytes(PUBLIC[name].encode())
    manifest = read_manifest(tmp_path / name)
    (clip,) = manifest.clips
    assert (clip.path, clip.shape[:3]) == (tmp_path / "plain.mp4", (33, 96, 160))
    assert clip.caption
    assert not any("``" in note for note in manifest.notes)
    if name == "opensora.csv":
        assert clip.values["aes"] == 4.68 and clip.id == "scene-0" and "relpath" in manifest.extras
    if name == "openvid.csv":
        assert clip.caption == "a woman,\nsmiling" and clip.values["camera motion"] == "static"
    if name == "vace.csv":
        assert clip.values == {"vace_video": tmp_path / "other.mp4", "vace_video_mask": tmp_path / "other.mp4"}


def test_of_several_columns_for_one_key_the_first_with_a_value_is_taken(tmp_path: Path) -> None:
    rows = [{**SIZE, "text": "b", "caption": "a"}, {**SIZE, "text": "b", "caption": None}, {**SIZE, "prompt": "c"}]
    clips = read_manifest(written(tmp_path, "\n".join(map(json.dumps, rows)))).clips
    assert [clip.caption for clip in clips] == ["a", "b", "c"]
    assert [dict(clip.values) for clip in clips] == [{"text": "b"}, {}, {}]


def test_an_empty_text_is_no_file_and_a_named_column_may_come_in_a_later_row(tmp_path: Path) -> None:
    rows = [{**SIZE, "text_tokens": 3, "audio": ""}, {**SIZE, "prompt": "a cat"}]
    path = written(tmp_path, "\n".join(map(json.dumps, rows)))
    clips = read_manifest(path, columns="caption=prompt").clips
    assert [(clip.caption, dict(clip.values)) for clip in clips] == [(None, {}), ("a cat", {})]
    assert "no column `lnog`" in message(path, columns="caption=lnog")


def test_what_may_be_part_of_a_name_stays_a_text(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_text(
        "frames,height,width,text_tokens,id,videoid,hash,score,flow\n"
        "5,64,96,3,001,00123,1e10,4.50,1e-05\n5,64,96,3,1,17,1_0,0.5,2.5e-05\n"
    )
    first, second = read_manifest(path).clips
    assert (first.id, second.id) == ("001", 1)
    assert dict(first.values) == {"videoid": "00123", "hash": "1e10", "score": 4.5, "flow": 1e-05}
    assert dict(second.values) == {"videoid": 17, "hash": "1_0", "score": 0.5, "flow": 2.5e-05}


def test_columns_say_which_are_read_and_what_is_unknown_is_kept_where_asked_for(tmp_path: Path) -> None:
    (tmp_path / "d.png").touch()
    path = written(tmp_path, json.dumps({**SIZE, "long": "a cat", "caption": "cat", "lens": 35, "depth": "d.png"}))
    (clip,) = read_manifest(path, columns="caption=long,values=lens,files=depth").clips
    assert clip.caption == "a cat"
    assert clip.values == {"caption": "cat", "lens": 35, "depth": tmp_path / "d.png"}
    (clip,) = read_manifest(path, columns="values=*").clips
    assert clip.values == {"long": "a cat", "lens": 35, "depth": "d.png"}
    assert "--columns values=lens" in message(path, columns="caption=long")
    assert "no column `lnog`" in message(path, columns="caption=lnog")
    assert "there is no key `capton`" in message(path, columns="capton=long")
    assert "is no pair" in message(path, columns="caption")
    assert "the column `long` is both `caption` and `id`" in message(path, columns="caption=long,id=long")


def test_captions_are_a_list_and_the_longest_is_planned_for(tmp_path: Path) -> None:
    (clip,) = read_manifest(written(tmp_path, json.dumps({**SIZE, "cap": ["a", "a cat", "cat"]}))).clips
    assert (clip.caption, clip.captions, clip.text_tokens) == ("a", ("a", "a cat", "cat"), len("a cat") + 1)


def test_what_is_wrong_with_a_file_of_rows_is_said(tmp_path: Path) -> None:
    for text, separator in (("path;caption\na.mp4;x\n", "semicolons"), ("path\tcaption\na.mp4\tx\n", "tabs")):
        assert f"is separated by {separator}" in message(written(tmp_path, text, "c.csv"))
    assert "error: this row is not JSON\n  --> c.json:2:1" in message(
        written(tmp_path, "[" + ROW + "\n" + ROW, "c.json")
    )
    bad = "[\n" + ROW + ',\n{"frames": 5,\n "hieght": 3}]'
    assert "error: unknown key `hieght`\n  --> c.json:4:2" in message(written(tmp_path, bad, "c.json"))
    assert "arachnec manifest" in message(tmp_path)
    (tmp_path / "v.mp4").touch()
    assert "a file that is there" in message(written(tmp_path, json.dumps({**SIZE, "caption": "", "mask": "no.png"})))
