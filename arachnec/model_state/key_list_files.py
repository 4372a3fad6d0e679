"""Lists of key blocks on disk: those that a run chose, to be taken as they are by another, whatever its plan.

A folder has ``step-N/rank-R.safetensors`` with what rank R computed in step N. By clip and layer: ``indices`` and
``counts`` as ``arachnec.kernels.sparse.key_lists`` has them, of one clip, and ``shares`` [n, 3] int32: a head, its
first group and the group behind its last. A layer that ran dense has ``dense`` instead, without elements: what is
lost is told apart from it. Lists name blocks by number, so a file says by which rule the grid was cut into them; those
of another rule are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.kernels.sparse.cube_sides import VERSION
from arachnec.kernels.sparse.key_lists import KeyLists, checked_lists, chosen_blocks
from arachnec.spmd.sparse_layers import Layer, SparseCascade

Key = tuple[str, str]  # a clip's id and a layer's path and number
PARTS = ("indices", "counts", "shares")
DENSE = "dense"
RULE = "cubes"  # of the file's metadata


def unreadable_error(folder: Path, step: int, reason: str) -> UserError:
    return user_error(
        f"the lists of step {step} in `{folder}` cannot be replayed: {reason}",
        help=(
            "save lists by `arachnec run --save-lists DIR` of the same model, clips, seed and steps, compiled with the "
            "same `sparsify`"
        ),
    )


@dataclass(frozen=True)
class ListSizes:
    """Of one layer and one clip."""

    heads: int
    groups: int
    blocks: int
    captions: int = 0  # of these, the last


def layer_key(layer: Layer) -> str:
    return f"{layer[0]}.{layer[1]}"


def write_lists(
    folder: Path,
    step: int,
    rank: int,
    ranks: int,
    cascades: Iterable[tuple[Sequence[str], SparseCascade]],
    dense: Iterable[tuple[str, Layer]] = (),
) -> None:
    """The lists of cascades, each with its clips' ids; and clips and layers that are ``dense`` in other cascades.
    Nothing stays that an earlier run has written of this step, on more than these ``ranks`` or by another plan. Waits
    for the device."""
    empty = torch.empty(0, dtype=torch.int32)
    tensors: dict[str, Tensor] = {f"{clip}|{layer_key(layer)}|{DENSE}": empty for clip, layer in dense}
    for clips, cascade in cascades:
        for layer, lists in cascade.lists.items():
            if lists is None:
                tensors |= {f"{clip}|{layer_key(layer)}|{DENSE}": empty for clip in clips}
                continue
            groups = lists.counts.shape[2]
            ends = [groups if share.end is None else share.end for share in cascade.shares[layer]]
            rows = [(share.head, share.first, end) for share, end in zip(cascade.shares[layer], ends, strict=True)]
            sizes = lists.counts.flatten(1).sum(1).tolist()
            for clip, indices, counts in zip(clips, torch.split(lists.indices, sizes), lists.counts, strict=True):
                parts = (indices.cpu(), counts.cpu(), torch.tensor(rows, dtype=torch.int32))  # none shares memory
                tensors |= {f"{clip}|{layer_key(layer)}|{n}": x.contiguous() for n, x in zip(PARTS, parts, strict=True)}
    place = folder / f"step-{step}"
    own = place / f"rank-{rank}.safetensors"
    others = {place / f"rank-{number}.safetensors" for number in range(ranks)}
    for file in place.glob("rank-*.safetensors"):
        if file == own or (rank == 0 and file not in others):
            file.unlink()
    if tensors:
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, own, metadata={RULE: str(VERSION)})


def read_lists(folder: Path, step: int) -> dict[Key, KeyLists | None]:
    """The lists of all heads by clip and layer, each of one clip; None for what ran dense. Raises ``UserError`` for a
    step that was not saved, for files that are damaged or of cubes that are cut otherwise, for heads of which a group
    is there twice or not at all, and for a layer that has lists and is dense."""
    files = sorted((folder / f"step-{step}").glob("rank-*.safetensors"))
    if not files:
        raise unreadable_error(folder, step, "there are none")
    pieces: dict[Key, dict[tuple[int, int], tuple[int, Tensor, Tensor]]] = {}
    dense: set[Key] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                rule = (opened.metadata() or {}).get(RULE, "1")
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise unreadable_error(folder, step, f"{file.name}: {error}") from None
        if rule != str(VERSION):
            raise unreadable_error(folder, step, f"{file.name} is of another version, whose blocks have other tokens")
        dense |= {_key(name, DENSE) for name in tensors if name.endswith(f"|{DENSE}")}
        for name in [name for name in tensors if name.endswith("|shares")]:
            of_layer = name.removesuffix("|shares")
            clip, layer = _key(name, "shares")
            indices, counts, shares = (tensors.get(f"{of_layer}|{part}", torch.empty(0)) for part in PARTS)
            if not _are_lists(indices, counts, shares):
                raise unreadable_error(folder, step, f"{file.name} has no lists for {clip}")
            own = pieces.setdefault((clip, layer), {})
            of_heads = indices.split(counts.long().sum(1).tolist())
            for (head, first, end), row, listed in zip(shares.tolist(), counts, of_heads, strict=True):
                if (head, first) in own:
                    told = f"two ranks have groups from {first} on of head {head} of {clip}"
                    raise unreadable_error(folder, step, told)
                own[head, first] = (end, row, listed)
    for clip, layer in sorted(dense & pieces.keys()):
        raise unreadable_error(folder, step, f"{clip} is dense and has lists in layer {layer}")
    whole: dict[Key, KeyLists | None] = {key: _whole(own, folder, step) for key, own in pieces.items()}
    return whole | dict.fromkeys(dense)


def _key(name: str, part: str) -> Key:
    clip, _, layer = name.removesuffix(f"|{part}").rpartition("|")
    return clip, layer


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


def _whole(pieces: Mapping[tuple[int, int], tuple[int, Tensor, Tensor]], folder: Path, step: int) -> KeyLists:
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
            raise unreadable_error(folder, step, f"head {head} has no list for group {done}")
        rows.append(row)
    return KeyLists(torch.cat(listed), torch.stack(rows)[None])


def together(lists: Sequence[KeyLists]) -> KeyLists:
    """Those of several clips of equal shape, in this order."""
    return KeyLists(torch.cat([x.indices for x in lists]), torch.cat([x.counts for x in lists]))


@dataclass
class ListFiles:
    """Folders of lists: to ``save`` those of every step, to take them from."""

    save: Path | None = None
    replay: Path | None = None
    _step: tuple[int, Mapping[Key, KeyLists | None]] | None = None

    def lists(self, step: int, clips: Sequence[str], layers: Mapping[Layer, ListSizes]) -> dict[Layer, KeyLists | None]:
        """What a cascade of these clips replays: lists, and None for a layer that was dense; nothing without a folder.
        Raises ``UserError`` for layers that were not saved, and for what are no lists of these sizes."""
        if self.replay is None:
            return {}
        replayed: dict[Layer, KeyLists | None] = {}
        for layer, sizes in layers.items():
            own = [self._of_clip(step, clip, layer, sizes) for clip in clips]
            whole = [lists for lists in own if lists is not None]
            if whole and len(whole) < len(own):
                raise self._unreadable(step, f"of clips of one shape some are dense in `{layer[0]}`, and others not")
            replayed[layer] = together(whole) if whole else None
        return replayed

    def demand_dense(self, step: int, clips: Sequence[str], layers: Iterable[Layer]) -> None:
        """Raises ``UserError`` where one of these layers, which are dense for clips so long, has lists."""
        if self.replay is None:
            return
        for layer in layers:
            for clip in clips:
                if self._known(step).get((clip, layer_key(layer))) is not None:
                    raise self._unreadable(step, f"`{layer[0]}` has lists for {clip}, and this plan runs it dense")

    def _of_clip(self, step: int, clip: str, layer: Layer, sizes: ListSizes) -> KeyLists | None:
        known, key = self._known(step), (clip, layer_key(layer))
        if key not in known:
            raise self._unreadable(step, f"`{layer[0]}` has none for {clip}, and is not dense; is a rank's file lost?")
        lists = known[key]
        if lists is None:
            return None
        try:
            return checked_lists(lists, 1, sizes.heads, sizes.groups, sizes.blocks)
        except ValueError as error:
            raise self._unreadable(step, f"`{layer[0]}` and {clip}: {error}") from None

    def _known(self, step: int) -> Mapping[Key, KeyLists | None]:
        assert self.replay is not None
        if self._step is None or self._step[0] != step:
            self._step = step, read_lists(self.replay, step)
        return self._step[1]

    def _unreadable(self, step: int, reason: str) -> UserError:
        assert self.replay is not None
        return unreadable_error(self.replay, step, reason)


def entries_that_differ(one: Mapping[Key, KeyLists | None], other: Mapping[Key, KeyLists | None]) -> tuple[int, int]:
    """List entries of two runs that are not in both, and all of both. Lists that one of them lacks count whole."""
    differing, total = 0, 0
    for key in one.keys() | other.keys():
        lists = [known for known in (one.get(key), other.get(key)) if known is not None]
        if len(lists) < 2:
            here = sum(len(known.indices) for known in lists)
            differing, total = differing + here, total + here
            continue
        blocks = 1 + max(int(x.indices.max()) if len(x.indices) else 0 for x in lists)
        tables = [chosen_blocks(known, blocks) for known in lists]
        differing += int((tables[0] ^ tables[1]).sum())
        total += sum(int(table.sum()) for table in tables)
    return differing, total
