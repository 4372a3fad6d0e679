"""A low-rank prediction of attention scores, its loss, and what is measured of it (arXiv 2502.07590, section 4).

Scores are scaled products before the softmax. What is measured is of video keys only: captions are always kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.token_cubes import TokenCubes

RANK = 16
COSINE, NORM = 0.95, 0.05  # weights of the loss
MASS = 0.9  # of a query's attention, which its critical keys hold
MOMENTUM = 0.9  # of a head's sparsity
NUMBERS = 1 << 26  # of sources that are summed up in 32 bits at one time: 256 MiB
LARGEST_LOSS, LEAST_HELD = 0.01, 0.97  # a layer is sparse below and above these


@dataclass(frozen=True)
class Projections:
    """Of queries and keys, [H, D, r] each; their sources are [B, H or 1, S, D]."""

    query: Tensor
    key: Tensor


def initial_projections(heads: int, width: int, head_size: int, rank: int, rng: torch.Generator) -> Projections:
    """One random subspace for both, so that at first the prediction is the product seen in that subspace.

    ``width`` is the sources' size. Raises ValueError for a rank of 0 or above the head size.
    """
    if not 1 <= rank <= head_size:
        raise ValueError(f"a predictor's rank is 1 to the head size, {head_size}, not {rank}")
    basis = torch.linalg.qr(torch.randn(heads, width, rank, generator=rng)).Q * (width / rank) ** 0.5
    basis = (basis * head_size**-0.25).contiguous()
    return Projections(basis.clone(), basis.clone())


def cell_features(source: Tensor, projection: Tensor, cubes: TokenCubes) -> Tensor:
    """[B, H, C, r]: the projected means of the cells of video of a source [B, H or 1, video or S, D] in order."""
    video, sizes = cubes.video, cubes.cells.diff()
    source = source[:, :, :video].detach()
    if bool((sizes == sizes[0]).all()):
        cells = source.reshape(*source.shape[:2], len(sizes), -1, source.shape[3])
        means: Tensor = cells.mean(3, dtype=projection.dtype)
        return means @ projection
    heads = max(1, NUMBERS // (source.numel() // source.shape[1]))
    sums = torch.cat([_sums(part.to(projection.dtype), 2, cubes.cells) for part in torch.split(source, heads, 1)], 1)
    features: Tensor = (sums / on_device(sizes, source.device)[:, None]) @ projection
    return features


def _sums(values: Tensor, dim: int, starts: Tensor) -> Tensor:
    """Over the runs of a dimension that start there, in one fixed order: ``index_add_`` has none on a GPU."""
    runs = on_device(starts.long(), values.device)
    first = values.movedim(dim, 0).contiguous()
    return torch.segment_reduce(first, "sum", offsets=runs, axis=0, unsafe=True).movedim(0, dim)


def predicted_scores(rows: Tensor, keys: Tensor, projections: Projections) -> Tensor:
    """[B, H, n, S] of sources [B, H or 1, n, D] and [B, H or 1, S, D], which get no gradient."""
    dtype = projections.query.dtype
    query, key = rows.detach().to(dtype) @ projections.query, keys.detach().to(dtype) @ projections.key
    scores: Tensor = query @ key.mT
    return scores


def true_scores(rows: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[B, H, n, S] in fp32 of queries [B, H, n, D] and keys [B, H, S, D]."""
    scores: Tensor = rows.detach().float() @ keys.detach().float().mT * scale
    return scores


def score_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """[B, H, n]: 0.95 (1 - cosine) + 0.05 |1 - ratio of the norms| of rows of scores."""
    cosine = F.cosine_similarity(predicted, true, dim=-1)
    ratio = predicted.norm(dim=-1) / true.norm(dim=-1).clamp_min(torch.finfo(true.dtype).tiny)
    loss: Tensor = COSINE * (1 - cosine) + NORM * (1 - ratio).abs()
    return loss


def measured_sparsity(scores: Tensor, mass: float = MASS) -> Tensor:
    """[B, H, n]: of rows of scores, the share of keys outside the fewest that hold ``mass`` of the attention."""
    held = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    needed = (held < mass).sum(-1) + 1
    return 1 - needed.clamp_max(scores.shape[-1]).float() / scores.shape[-1]


def block_mass(scores: Tensor, blocks: Tensor, weights: Tensor | None = None) -> Tensor:
    """[B, H, N]: the share of one group's attention that each block holds, of the scores [B, H, n, video] of its
    queries and the blocks' starts [N + 1]. ``weights`` [B, n] of queries add up to 1; without, all weigh alike."""
    masses = scores.softmax(-1)
    of_group = masses.mean(2) if weights is None else (weights[:, None, None] @ masses)[:, :, 0]
    return _sums(of_group, 2, blocks)


def held_mass(of_block: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H] each: the attention of one group that its chosen blocks hold, and the share of that which the best choice
    of that size would hold.

    ``of_block`` [B, H, N] as ``block_mass`` gives it, ``chosen`` [B, H, N] bool.
    """
    held = (of_block * chosen).sum(-1)
    order = of_block.sort(-1, descending=True).values.cumsum(-1)
    counts = chosen.sum(-1, keepdim=True)
    best = torch.where(counts > 0, order.gather(-1, (counts - 1).clamp_min(0)), 0.0)[..., 0]
    ratio = torch.where(best > 0, held / best.clamp_min(torch.finfo(best.dtype).tiny), 1.0)
    return held, ratio


def needed_blocks(of_block: Tensor, mass: float = MASS) -> Tensor:
    """[B, H]: the fewest blocks that hold ``mass`` of one group's attention, as a share of all blocks.

    Queries of a group share one list, so a group needs more than each of its queries does.
    """
    held = of_block.sort(-1, descending=True).values.cumsum(-1)
    needed = (held < mass).sum(-1) + 1
    return needed.clamp_max(held.shape[-1]).float() / held.shape[-1]


def moved(before: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    """What is known of heads, a share of each, after one more measurement. The mean of several ranks may be above 1 by
    its rounding."""
    return tuple(min(1.0, MOMENTUM * old + (1 - MOMENTUM) * new) for old, new in zip(before, measured, strict=True))


def turns_sparse(loss: float, held: float, largest_loss: float = LARGEST_LOSS) -> bool:
    """Whether a layer runs sparse, by its predictor's mean loss and its chosen blocks' share of the best choice."""
    return loss < largest_loss and held >= LEAST_HELD


def kept_blocks(densities: Sequence[float], blocks: int) -> list[int]:
    """Blocks of video that each head keeps, of its density: 1 - sparsity; one at least. ValueError outside (0, 1]."""
    for head, share in enumerate(densities):
        if not 0 < share <= 1:
            raise ValueError(f"head {head} has density {share}, which is not in (0, 1]")
    return [min(blocks, max(1, math.ceil(share * blocks - 1e-9))) for share in densities]
