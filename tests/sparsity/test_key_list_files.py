"""Files of key lists from elsewhere: what is no list is one message, whatever the tensors are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from arachnec.ir.diagnostic import UserError
from arachnec.kernels.sparse.cube_sides import VERSION
from arachnec.model_state.key_list_files import RULE, read_lists

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
