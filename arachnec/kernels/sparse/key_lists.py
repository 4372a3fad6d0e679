"""Which key blocks every query group of every head attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.divided_heads import HeadShare
from arachnec.kernels.attention.host_tables import on_device


@dataclass(frozen=True)
class KeyLists:
    """The lists of a micro-batch of clips, one behind another: by clip, then head, then group; each ascends.

    ``indices`` [their total length] int32, numbers of key blocks; ``counts`` [B, H, G] int32, blocks of each list.
    """

    indices: Tensor
    counts: Tensor

    @property
    def bytes(self) -> int:
        return self.indices.nbytes + self.counts.nbytes

    def of_shares(self, shares: Sequence[HeadShare], device: torch.device) -> KeyLists:
        """The lists of these heads, in this order, on a device; empty for groups that a share does not have.

        Of lists on the host, so that nobody waits."""
        clips, _, groups = self.counts.shape
        starts = [0, *self.counts.view(-1).cumsum(0).tolist()]
        counts = self.counts.new_zeros(clips, len(shares), groups)
        listed = [self.indices[:0]]
        for clip in range(clips):
            for place, share in enumerate(shares):
                end = groups if share.end is None else share.end
                counts[clip, place, share.first : end] = self.counts[clip, share.head, share.first : end]
                row = (clip * self.counts.shape[1] + share.head) * groups
                listed.append(self.indices[starts[row + share.first] : starts[row + end]])
        return KeyLists(on_device(torch.cat(listed), device), on_device(counts, device))


def full_lists(clips: int, heads: int, groups: int, blocks: int) -> KeyLists:
    """Every group attends to every block."""
    indices = torch.arange(blocks, dtype=torch.int32).repeat(clips * heads * groups)
    return KeyLists(indices, torch.full((clips, heads, groups), blocks, dtype=torch.int32))


def checked_lists(lists: KeyLists, clips: int, heads: int, groups: int, blocks: int) -> KeyLists:
    """The lists, if they are such of these sizes; raises ValueError with the first thing that is wrong. Waits for
    the device."""
    indices, counts = lists.indices, lists.counts
    if tuple(counts.shape) != (clips, heads, groups):
        wanted = f"{clips} clips x {heads} heads x {groups} groups"
        raise ValueError(f"the lists count {' x '.join(map(str, counts.shape))}, where there are {wanted}")
    if counts.dtype != torch.int32 or indices.dtype != torch.int32 or indices.dim() != 1:
        raise ValueError("lists are of 32-bit integers")
    if int(counts.amin()) < 0 or int(counts.sum()) != len(indices):
        raise ValueError(f"the lists' counts add up to {int(counts.sum())} blocks, and {len(indices)} are listed")
    if len(indices) and not 0 <= int(indices.amin()) <= int(indices.amax()) < blocks:
        raise ValueError(f"the lists name block {int(indices.amax())} or one below 0, of {blocks} key blocks")
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts.view(-1))
    place = owner * blocks + indices
    falling = (place[1:] <= place[:-1]).nonzero()
    if len(falling):
        clip, head, group = (int(x) for x in torch.unravel_index(owner[falling[0, 0] + 1], counts.shape))
        raise ValueError(f"the list of clip {clip}, head {head}, group {group} repeats a block or does not ascend")
    return lists


def chosen_blocks(lists: KeyLists, blocks: int) -> Tensor:
    """[B, H, G, N] bool: whether a block is in the list."""
    counts = lists.counts
    table = torch.zeros(counts.numel(), blocks, dtype=torch.bool, device=counts.device)
    every = torch.arange(counts.numel(), device=counts.device)
    owner = torch.repeat_interleave(every, counts.view(-1), output_size=len(lists.indices))
    table[owner, lists.indices.long()] = True
    return table.view(*counts.shape, blocks)


def density(lists: KeyLists, blocks: int) -> Tensor:
    """[B, H] fp32: the share of group-block pairs that a head computes."""
    return lists.counts.float().mean(-1) / blocks
