"""Files of key lists from elsewhere: what is no list is one message, whatever the tensors are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from arachnec.ir.diagnostic import UserError, render
from arachnec.kernels.sparse.cube_sides import VERSION
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.model_state.key_list_files import (
    RULE,
    ListFiles,
    ListSizes,
    entries_that_differ,
    read_lists,
)

METADATA = {RULE: str(VERSION)}
# One clip and layer: a head of two groups, whose lists have two blocks and one.
RIGHT = {
    "indices": torch.tensor([0, 2, 1], dtype=torch.int32),
    "counts": torch.tensor([[2, 1]], dtype=torch.int32),
    "shares": torch.tensor([[0, 0, 2]], dtype=torch.int32),
}
DAMAGED = {
    "counts of one dimension": {"counts": RIGHT["counts"][0]},
    "counts below nothing": {"counts": torch.tensor([[4, -1]], dtype=torch.int32)},
    "counts that are fractions": {"counts": RIGHT["counts"].float()},
    "counts of no group": {"counts": RIGHT["counts"][:, :0], "indices": RIGHT["indices"][:0]},
    "counts outside their share": {"shares": torch.tensor([[0, 0, 1]], dtype=torch.int32)},
    "shares of two numbers": {"shares": RIGHT["shares"][:, :2]},
    "shares that are fractions": {"shares": RIGHT["shares"].float()},
    "shares below nothing": {"shares": torch.tensor([[-1, 0, 2]], dtype=torch.int32)},
    "shares of a far head": {"shares": torch.tensor([[2**31 - 1, 0, 2]], dtype=torch.int32)},
    "no shares": {name: value[:0] for name, value in RIGHT.items()},
    "indices below nothing": {"indices": torch.tensor([0, -2, 1], dtype=torch.int32)},
    "indices of two dimensions": {"indices": RIGHT["indices"][:, None]},
}


def written(folder: Path, tensors: dict[str, Tensor], key: str, rule: str | None = str(VERSION)) -> Path:
    (folder / "step-0").mkdir()
    file = folder / "step-0" / "rank-0.safetensors"
    named = {f"{key}|{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, file, metadata=None if rule is None else {RULE: rule})
    return folder


def test_a_clip_s_name_may_hold_the_sign_between_the_parts_of_a_key(tmp_path: Path) -> None:
    (lists,) = read_lists(written(tmp_path, RIGHT, "a|b|blocks.0.0"), 0).items()
    assert lists[0] == ("a|b", "blocks.0.0")
    assert lists[1] is not None
    assert lists[1].indices.tolist() == [0, 2, 1] and lists[1].counts.tolist() == [[[2, 1]]]


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_lists_are_one_message(case: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be replayed"):
        read_lists(written(tmp_path, RIGHT | DAMAGED[case], "a|blocks.0.0"), 0)


def test_a_key_without_its_parts_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be replayed"):
        read_lists(written(tmp_path, {"shares": RIGHT["shares"]}, ""), 0)


@pytest.mark.parametrize("rule", [None, "1", "of nothing"])
def test_lists_of_blocks_that_were_cut_otherwise_are_one_message(rule: str | None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be replayed.*of another version"):
        read_lists(written(tmp_path, RIGHT, "a|blocks.0.0", rule), 0)


LAYER, SIZES = ("blocks.0", 0), ListSizes(1, 2, 3)
DENSE = {"dense": torch.empty(0, dtype=torch.int32)}
OTHER = {  # lists that are none of the run's, though their file is sound: what the message says
    "a block twice": (
        {"indices": torch.tensor([2, 2, 1], dtype=torch.int32)},
        SIZES,
        "repeats a block or does",
    ),
    "blocks that fall": ({"indices": torch.tensor([2, 0, 1], dtype=torch.int32)}, SIZES, "repeats a block or does"),
    "a block that is not there": ({}, ListSizes(1, 2, 2), "name block 2 or one below 0, of 2 key blocks"),
    "groups of another grid": ({}, ListSizes(1, 3, 3), "the lists count 1 x 1 x 2, where there are .* 3 groups"),
    "other heads": ({}, ListSizes(2, 2, 3), "the lists count 1 x 1 x 2, where there are 1 clips x 2 heads"),
}


def replayed(folder: Path, *clips: str, sizes: ListSizes = SIZES) -> KeyLists | None:
    return ListFiles(replay=folder).lists(0, clips, {LAYER: sizes})[LAYER]


def test_lists_that_fit_are_taken_as_they_are(tmp_path: Path) -> None:
    lists = replayed(written(tmp_path, RIGHT, "a|blocks.0.0"), "a", "a")
    assert lists is not None and lists.indices.tolist() == [0, 2, 1] * 2
    assert ListFiles().lists(0, ["a"], {LAYER: SIZES}) == {}


@pytest.mark.parametrize("case", OTHER)
def test_lists_that_do_not_fit_the_run_are_one_message(case: str, tmp_path: Path) -> None:
    changed, sizes, said = OTHER[case]
    with pytest.raises(UserError, match=f"cannot be replayed: `blocks.0` and a: .*{said}") as error:
        replayed(written(tmp_path, RIGHT | changed, "a|blocks.0.0"), "a", sizes=sizes)
    (problem,) = error.value.diagnostics
    assert "--save-lists" in render(problem)


def test_what_ran_dense_is_dense_and_what_is_lost_is_one_message(tmp_path: Path) -> None:
    folder = written(tmp_path, DENSE, "a|blocks.0.0")
    assert replayed(folder, "a") is None
    with pytest.raises(UserError, match=r"`blocks.0` has none for b, and is not dense; is a rank's file lost"):
        replayed(folder, "a", "b")


def test_a_layer_that_the_plan_runs_dense_and_that_has_lists_is_one_message(tmp_path: Path) -> None:
    files = ListFiles(replay=written(tmp_path, RIGHT, "a|blocks.0.0"))
    files.demand_dense(0, ["b"], [LAYER])
    with pytest.raises(UserError, match=r"`blocks.0` has lists for a, and this plan runs it dense"):
        files.demand_dense(0, ["a"], [LAYER])


def test_clips_of_one_shape_are_all_dense_or_none(tmp_path: Path) -> None:
    folder = written(tmp_path, RIGHT, "a|blocks.0.0")
    save_file({"b|blocks.0.0|dense": DENSE["dense"]}, folder / "step-0" / "rank-1.safetensors", metadata=METADATA)
    with pytest.raises(UserError, match="of clips of one shape some are dense"):
        replayed(folder, "a", "b")
    save_file({"a|blocks.0.0|dense": DENSE["dense"]}, folder / "step-0" / "rank-1.safetensors", metadata=METADATA)
    with pytest.raises(UserError, match=r"a is dense and has lists in layer blocks.0.0"):
        replayed(folder, "a")


def test_entries_of_lists_that_are_not_in_both_runs_are_counted() -> None:
    here = KeyLists(RIGHT["indices"], RIGHT["counts"][None])
    there = KeyLists(torch.tensor([0, 1, 1], dtype=torch.int32), RIGHT["counts"][None])
    key, other, dense = ("a", "0"), ("b", "0"), ("c", "0")
    assert entries_that_differ({key: here, dense: None}, {key: here, dense: None}) == (0, 6)
    assert entries_that_differ({key: here}, {key: there}) == (2, 6)
    assert entries_that_differ({key: here, other: here}, {key: here, other: None}) == (3, 9)
    assert entries_that_differ({key: here, other: here}, {key: here}) == (3, 9)
