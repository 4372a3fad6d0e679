"""The choice of key blocks: for each query group the blocks that a low-rank prediction gives the most attention.

Cells of neighbouring tokens are scored, not tokens, and a few groups at a time: of the table of cells by cells only a
strip exists (arXiv 2502.07590, section 4, scores tokens). The mass of a block for a group is the sum of the softmax
over its cells, summed over the group's cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.token_cubes import TokenCubes

STRIP = 1 << 17  # scores that exist at one time: half a megabyte stays in a core's cache


def critical_keys(query: Tensor, key: Tensor, cubes: TokenCubes, kept: Sequence[int]) -> KeyLists:
    """The lists of blocks with the largest predicted mass, ties to the lower index, and all blocks of captions.

    query, key: features of the cells of video [B, H, C, r], whose products predict scores before the softmax.
    ``kept``: blocks of video that each head keeps, 0 to all. Raises ValueError for other sizes and, on a CPU, for
    features that are not finite.
    """
    cells, video = len(cubes.cells) - 1, len(cubes.blocks) - 1 - cubes.captions
    if query.shape != key.shape or query.dim() != 4 or query.shape[2] != cells:
        raise ValueError(f"features of {cells} cells are wanted, not {tuple(query.shape)} and {tuple(key.shape)}")
    if len(kept) != query.shape[1] or not all(0 <= count <= video for count in kept):
        raise ValueError(f"each of {query.shape[1]} heads keeps 0 to {video} blocks, not {list(kept)}")
    device = query.device
    starts = (cubes.group_cells.to(device), cubes.block_cells.to(device))
    sizes = cubes.cells.diff().to(device)
    indices, counts = torch.ops.arachnec.critical_keys(query, key, *starts, sizes, list(kept), cubes.captions)
    return KeyLists(indices, counts)


def predicted_mass(query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor) -> Tensor:
    """[G, N] fp32: the attention that the groups give to each block, of one head's features [C, r].

    ``groups`` [G + 1] and ``blocks`` [N + 1] are starts in cells, ``sizes`` [C] the tokens of each cell.
    """
    weight = sizes.float().log()
    block = torch.repeat_interleave(torch.arange(len(blocks) - 1, device=query.device), blocks.diff())
    group = torch.repeat_interleave(torch.arange(len(groups) - 1, device=query.device), groups.diff())
    starts = groups.tolist()
    mass = []
    first = 0
    while first < len(starts) - 1:
        last = first + 1
        while last < len(starts) - 1 and (starts[last + 1] - starts[first]) * len(sizes) <= STRIP:
            last += 1
        rows = slice(starts[first], starts[last])
        scores = torch.addmm(weight, query[rows].float(), key.float().mT).softmax(-1)
        group = torch.repeat_interleave(
            torch.arange(last - first, device=query.device), groups[first : last + 1].diff()
        )
        of_group = scores.new_zeros(last - first, len(sizes)).index_add_(0, group, scores * sizes[rows, None])
        of_block = scores.new_zeros(len(blocks) - 1, last - first).index_add_(0, block, of_group.mT.contiguous())
        mass.append(of_block.mT)
        first = last
    return torch.cat(mass)


@torch.library.custom_op("arachnec::critical_keys", mutates_args=())
def _critical_keys(
    query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor, kept: Sequence[int], captions: int
) -> tuple[Tensor, Tensor]:
    if not query.is_cuda and not (query.isfinite().all() and key.isfinite().all()):
        raise ValueError("the predictor's scores are not finite")
    video, count = len(blocks) - 1, len(groups) - 1
    always = torch.arange(video, video + captions, device=query.device).expand(count, -1)
    indices = []
    for clip in range(query.shape[0]):
        for head, keep in enumerate(kept):
            mass = predicted_mass(query[clip, head], key[clip, head], groups, blocks, sizes)
            best = mass.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
            indices.append(torch.cat([best.sort(dim=-1).values, always], 1).reshape(-1))
    return torch.cat(indices).int(), _counts(query, groups, kept, captions)


@_critical_keys.register_fake
def _(
    query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor, kept: Sequence[int], captions: int
) -> tuple[Tensor, Tensor]:
    listed = query.shape[0] * (groups.shape[0] - 1) * (sum(kept) + captions * len(kept))
    counts = query.new_empty(query.shape[0], len(kept), groups.shape[0] - 1, dtype=torch.int32)
    return query.new_empty(listed, dtype=torch.int32), counts


def _counts(query: Tensor, groups: Tensor, kept: Sequence[int], captions: int) -> Tensor:
    of_heads = torch.tensor(kept, dtype=torch.int32, device=query.device) + captions
    return of_heads[None, :, None].expand(query.shape[0], -1, len(groups) - 1).contiguous()
