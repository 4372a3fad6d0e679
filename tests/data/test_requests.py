"""Requests: what is read, and that every mistake has its place and its remedy."""

import json
from pathlib import Path

import pytest

from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request, read_requests
from arachnec.ir.diagnostic import UserError, render

ROW = {"caption": "a fox", "frames": 5, "height": 64, "width": 96}


def written(folder: Path, *rows: dict[str, object], name: str = "requests.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_without_the_rest_has_defaults_and_its_number_as_id_and_seed(tmp_path: Path) -> None:
    first, second = read_requests(written(tmp_path, ROW, ROW))
    assert first == Request(0, "a fox", 5, 64, 96, steps=50, guidance=1.0, seed=0, arrival=0.0, text_tokens=6)
    assert (second.id, second.seed) == (1, 1)


def test_aliases_are_what_diffusers_calls_them(tmp_path: Path) -> None:
    row = {"prompt": "é", "num_frames": 5, "height": 8, "width": 8, "num_inference_steps": 4, "guidance_scale": 5}
    (request,) = read_requests(written(tmp_path, row))
    assert (request.caption, request.text_tokens, request.steps, request.guidance) == ("é", 3, 4, 5.0)


def test_csv_and_parquet_say_what_jsonl_says(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {**ROW, "id": "a", "steps": 7, "guidance": 2.5, "seed": 3, "arrival": 4, "negative_prompt": "1"}
    expected = read_requests(written(tmp_path, row))
    csv = tmp_path / "r.csv"
    csv.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "r.parquet")
    assert read_requests(csv) == expected == read_requests(tmp_path / "r.parquet")


def test_a_model_sees_a_request_as_a_clip_of_either_prompt() -> None:
    request = Request("a", "fox", 5, 64, 96, text_tokens=4, negative_prompt="bad!")
    assert request.clip() == VideoClip("a", 5, 64, 96, 4, "fox")
    assert request.clip(conditional=False) == VideoClip("a", 5, 64, 96, 5, "bad!")


MISTAKES = [
    ({**ROW, "step": 5}, "unknown key `step`", "did you mean `steps`?"),
    ({**ROW, "path": "x.mp4"}, "unknown key `path`", "the keys are"),
    ({**ROW, "steps": 0}, "`steps` is 0, expected at least 1", "the smallest `steps` is 1"),
    ({**ROW, "steps": 1.5}, "`steps` is 1.5", "write `steps` as a whole number"),
    ({**ROW, "guidance": "high"}, "`guidance` is 'high'", "write `guidance` as a number"),
    ({**ROW, "arrival": -1}, "`arrival` is -1", "correct `arrival`"),
    ({**ROW, "guidance": float("nan")}, "`guidance` is nan", "correct `guidance`"),
    ({**ROW, "seed": -1}, "`seed` is -1", "the smallest `seed` is 0"),
    ({**ROW, "id": "a/b"}, "`id` is 'a/b'", "letters, digits"),
    ({**ROW, "id": "é" * 101}, "expected a name for files", "200 bytes at most"),
    ({**ROW, "id": 10**201}, "expected a name for files", "200 bytes at most"),
    ({"frames": 5, "height": 8, "width": 8}, "the request has no `text_tokens`", "add `caption`, or `text_tokens`"),
    ({"caption": "x", "frames": 5, "height": 8}, "the request has no `width`", "in pixels"),
]


@pytest.mark.parametrize(("row", "title", "remedy"), MISTAKES)
def test_a_mistake_is_told_at_its_row_with_a_remedy(
    tmp_path: Path, row: dict[str, object], title: str, remedy: str
) -> None:
    path = written(tmp_path, ROW, row)
    with pytest.raises(UserError) as caught:
        read_requests(path)
    message = render(caught.value.diagnostics[0])
    assert title in message
    assert f"{path}:2:" in message
    assert remedy in message


def test_a_mistake_points_at_the_key_as_it_is_written(tmp_path: Path) -> None:
    path = written(tmp_path, {"frames": 5, "height": 8, "width": 8, "prompt": 3})
    with pytest.raises(UserError, match="`caption` is 3, expected a string") as caught:
        read_requests(path)
    assert f"{path}:1:40" in render(caught.value.diagnostics[0])


def test_ids_differ_and_there_is_at_least_one_request(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two requests have the id `0`"):
        read_requests(written(tmp_path, ROW, {**ROW, "id": "0"}))
    with pytest.raises(UserError, match="lists no requests"):
        read_requests(written(tmp_path))
