"""Lists of key blocks on disk: those that a run chose, to be taken as they are by another, whatever its plan.

A folder has ``step-N/rank-R.safetensors`` with what rank R computed in step N. By clip and layer: ``indices`` and
``counts`` as ``arachnec.kernels.sparse.key_lists`` has them, of one clip, and ``shares`` [n, 3] int32: a head, its
first group and the group behind its last. A layer that ran dense has no lists, and is dense again. Lists name blocks by
number, so a file says by which rule the grid was cut into them; those of another rule are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.kernels.sparse.cube_sides import VERSION
from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.spmd.sparse_layers import Layer, SparseCascade

Key = tuple[str, str]  # a clip's id and a layer's path and number
PARTS = ("indices", "counts", "shares")
RULE = "cubes"  # of the file's metadata


@dataclass(frozen=True)
class ListsUnreadable(Diagnostic):
    title: ClassVar[str] = "the lists of step {step} in `{folder}` cannot be replayed: {reason}"
    help: ClassVar[str] = "save lists by `arachnec run --save-lists DIR` of the same model, clips, seed and steps"
    folder: str
    step: int
    reason: str


def layer_key(layer: Layer) -> str:
    return f"{layer[0]}.{layer[1]}"


def write_lists(folder: Path, step: int, rank: int, cascades: Iterable[tuple[Sequence[str], SparseCascade]]) -> None:
    """The lists of cascades, each with its clips' ids; waits for the device."""
    tensors: dict[str, Tensor] = {}
    for clips, cascade in cascades:
        for layer, lists in cascade.lists.items():
            if lists is None:
                continue
            groups = lists.counts.shape[2]
            ends = [groups if share.end is None else share.end for share in cascade.shares[layer]]
            rows = [(share.head, share.first, end) for share, end in zip(cascade.shares[layer], ends, strict=True)]
            sizes = lists.counts.flatten(1).sum(1).tolist()
            for clip, indices, counts in zip(clips, torch.split(lists.indices, sizes), lists.counts, strict=True):
                parts = (indices.cpu(), counts.cpu(), torch.tensor(rows, dtype=torch.int32))  # none shares memory
                tensors |= {f"{clip}|{layer_key(layer)}|{n}": x.contiguous() for n, x in zip(PARTS, parts, strict=True)}
    place = folder / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / f"rank-{rank}.safetensors", metadata={RULE: str(VERSION)})


def read_lists(folder: Path, step: int) -> dict[Key, KeyLists]:
    """The lists of all heads by clip and layer, each of one clip. Raises ``UserError`` for a step that was not saved,
    for files that are damaged or of cubes that are cut otherwise, and for heads of which a group is there twice or not
    at all."""
    files = sorted((folder / f"step-{step}").glob("rank-*.safetensors"))
    if not files:
        raise UserError(ListsUnreadable(None, str(folder), step, "there are none"))
    pieces: dict[Key, dict[tuple[int, int], tuple[int, Tensor, Tensor]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                rule = (opened.metadata() or {}).get(RULE, "1")
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(ListsUnreadable(None, str(folder), step, f"{file.name}: {error}")) from None
        if rule != str(VERSION):
            told = f"{file.name} is of another version, whose blocks have other tokens"
            raise UserError(ListsUnreadable(None, str(folder), step, told))
        for name in [name for name in tensors if name.endswith("|shares")]:
            of_layer = name.removesuffix("|shares")
            clip, _, layer = of_layer.rpartition("|")
            indices, counts, shares = (tensors.get(f"{of_layer}|{part}", torch.empty(0)) for part in PARTS)
            if not _are_lists(indices, counts, shares):
                raise UserError(ListsUnreadable(None, str(folder), step, f"{file.name} has no lists for {clip}"))
            own = pieces.setdefault((clip, layer), {})
            of_heads = indices.split(counts.long().sum(1).tolist())
            for (head, first, end), row, listed in zip(shares.tolist(), counts, of_heads, strict=True):
                if (head, first) in own:
                    told = f"two ranks have groups from {first} on of head {head} of {clip}"
                    raise UserError(ListsUnreadable(None, str(folder), step, told))
                own[head, first] = (end, row, listed)
    return {key: _whole(own, str(folder), step) for key, own in pieces.items()}


def _are_lists(indices: Tensor, counts: Tensor, shares: Tensor) -> bool:
    """Whether these have the form that ``write_lists`` gives them: each row of counts within the groups of its share,
    and as many indices as they say."""
    if not all(x.dtype is torch.int32 and (x.numel() == 0 or int(x.min()) >= 0) for x in (indices, counts, shares)):
        return False
    if indices.dim() != 1 or counts.dim() != 2 or shares.dim() != 2 or 0 in counts.shape:
        return False
    if tuple(shares.shape) != (len(counts), 3) or int(counts.sum()) != len(indices):
        return False
    groups = torch.arange(counts.shape[1])
    inside = (groups >= shares[:, 1:2]) & (groups < shares[:, 2:3])
    return not bool(counts[~inside].any())


def _whole(pieces: Mapping[tuple[int, int], tuple[int, Tensor, Tensor]], folder: str, step: int) -> KeyLists:
    rows, listed = [], []
    groups = len(next(iter(pieces.values()))[1])
    heads = max(head for head, _ in pieces) + 1
    for head in range(heads):
        done, row = 0, torch.zeros(groups, dtype=torch.int32)
        for (_, first), (end, counts, indices) in sorted((k, v) for k, v in pieces.items() if k[0] == head):
            if first != done or len(counts) != groups:
                break
            row[first:end] = counts[first:end]
            listed.append(indices)
            done = end
        if done != groups:
            raise UserError(ListsUnreadable(None, folder, step, f"head {head} has no list for group {done}"))
        rows.append(row)
    return KeyLists(torch.cat(listed), torch.stack(rows)[None])


def together(lists: Sequence[KeyLists]) -> KeyLists:
    """Those of several clips of equal shape, in this order."""
    return KeyLists(torch.cat([x.indices for x in lists]), torch.cat([x.counts for x in lists]))


def share_that_differs(one: Mapping[Key, KeyLists], other: Mapping[Key, KeyLists]) -> float:
    """Of the list entries of two runs, those that are not in both. Lists that one of them lacks count whole."""
    differing, total = 0, 0
    for key in one.keys() | other.keys():
        if key not in one or key not in other:
            here = len((one.get(key) or other[key]).indices)
            differing, total = differing + here, total + here
            continue
        blocks = 1 + max(int(x.indices.max()) if len(x.indices) else 0 for x in (one[key], other[key]))
        tables = [chosen_blocks(x[key], blocks) for x in (one, other)]
        differing += int((tables[0] ^ tables[1]).sum())
        total += sum(int(table.sum()) for table in tables)
    return differing / max(1, total)
