"""Sparse attention of a model's blocks in one cascade: what it knows of each layer, and what it measures.

A layer is one attention of one block: its path, and its number there. Nothing here depends on the plan: what is drawn
follows from seed, step, clip and layer, and what a rank computes for its heads is what one rank computes for them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from arachnec.kernels.attention.distributed_attention import Range
from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.predictor import (
    Projections,
    held_mass,
    initial_projections,
    kept_blocks,
    measured_sparsity,
    moved,
    needed_blocks,
    predicted_scores,
    score_loss,
    true_scores,
    turns_sparse,
)
from arachnec.kernels.sparse.token_cubes import CELL, KEYS, QUERIES, Grid, TokenCubes, token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists, video_attention
from arachnec.spmd.sparse_block import Site

Layer = tuple[str, int]
ROWS = 64  # queries whose rows of scores a predictor learns from in a step


@dataclass(frozen=True)
class LayerState:
    """What is known of a layer before a step: measured sparsity of its heads, the share of key blocks that a group of
    queries needs, and whether it runs sparse."""

    site: Site
    projections: Projections
    sparsities: tuple[float, ...]
    densities: tuple[float, ...]
    sparse: bool = False


@dataclass(frozen=True)
class Measured:
    """Of the heads that were computed here, [heads] each: loss, sparsity, the share of blocks that one group needs, the
    attention that its chosen blocks hold and that share of the best choice's; and the projections' gradients."""

    loss: Tensor
    sparsity: Tensor
    needed: Tensor
    held: Tensor
    of_best: Tensor
    gradients: tuple[Tensor, Tensor]
    heads: Range  # which these are


@dataclass
class SparseCascade:
    """One cascade's attention. A layer that is not in ``layers`` is dense and learns nothing. ``replay`` are lists of
    all heads that are taken as they are, None for dense. ``lists`` are those of the heads that were computed here: what
    runs again in the backward takes them from there. ``weight`` None trains no predictor."""

    layers: Mapping[Layer, LayerState]
    grid: Grid
    draw: str  # seed/step/clip
    weight: float | None = None
    sizes: tuple[int, int, int] = (QUERIES, KEYS, CELL)  # tokens of a group, a block and a cell
    replay: Mapping[Layer, KeyLists | None] = field(default_factory=dict)
    lists: dict[Layer, KeyLists | None] = field(default_factory=dict)
    measured: dict[Layer, Measured] = field(default_factory=dict)
    _cubes: dict[tuple[int, str | None], TokenCubes] = field(default_factory=dict)

    def of_block(self, path: str) -> OfBlock:
        return OfBlock(self, path)

    def cubes(self, length: int, captions: str | None) -> TokenCubes:
        """Of a sequence of so many tokens; where it has captions in front or behind, they are what is not video.

        A sequence of another length than the clip's grid has no grid: its tokens stand in one row.
        """
        if (length, captions) not in self._cubes:
            rest = length - math.prod(self.grid)
            grid = self.grid if rest == 0 or (captions and rest > 0) else (1, 1, length)
            first = captions == "first"
            queries, keys, cell = self.sizes
            cubes = token_cubes(
                grid,
                captions=length - math.prod(grid),
                captions_first=first,
                queries=queries,
                keys=keys,
                cell=cell,
            )
            self._cubes[length, captions] = cubes
        return self._cubes[length, captions]


@dataclass(frozen=True)
class OfBlock:
    """What the graph of one block is given."""

    cascade: SparseCascade
    path: str

    def attend(
        self, site: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, heads: Range
    ) -> Tensor:
        """Attention of heads [B, heads, S, D] over all tokens."""
        cascade, layer = self.cascade, (self.path, site)
        state = cascade.layers.get(layer)
        if state is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        cubes = cascade.cubes(query.shape[2], state.site.captions)
        here = slice(*heads)
        by = Projections(state.projections.query[here], state.projections.key[here])
        if heads[0] == heads[1]:
            return video_attention(query, key, value, cubes, None, mask=mask, scale=scale)
        if layer not in cascade.lists:
            if layer in cascade.replay:
                given = cascade.replay[layer]
                cascade.lists[layer] = None if given is None else given.of_heads(*heads)
            else:
                cascade.lists[layer] = self._chosen(state, by, query, key, cubes, here) if state.sparse else None
        out = video_attention(query, key, value, cubes, cascade.lists[layer], mask=mask, scale=scale)
        if cascade.weight is None:
            return out
        if layer not in cascade.measured:
            with saved_tensors_hooks(_as_it_is, _as_it_is):  # what is saved here is none of the checkpoint's
                cascade.measured[layer] = self._measured(state, layer, by, query, key, cubes, scale, here)
        projections, gradients = state.projections, cascade.measured[layer].gradients
        beside: Tensor = _Beside.apply(  # type: ignore[no-untyped-call]
            out, projections.query, projections.key, *gradients, here, cascade.weight
        )
        return beside

    def _chosen(
        self, state: LayerState, by: Projections, query: Tensor, key: Tensor, cubes: TokenCubes, here: slice
    ) -> KeyLists:
        video = len(cubes.blocks) - 1 - cubes.captions
        return predicted_lists(query, key, by, cubes, kept_blocks(state.densities[here], video))

    def _measured(
        self,
        state: LayerState,
        layer: Layer,
        by: Projections,
        query: Tensor,
        key: Tensor,
        cubes: TokenCubes,
        scale: float,
        here: slice,
    ) -> Measured:
        """On rows of scores that are drawn for this layer, and on all rows of one group."""
        rng = torch.Generator().manual_seed(_seed(f"{self.cascade.draw}/{layer[0]}/{layer[1]}"))
        order = cubes.order[: cubes.video]
        rows = order[torch.randint(cubes.video, (min(ROWS, cubes.video),), generator=rng)].to(query.device)
        group = int(torch.randint(len(cubes.groups) - 1, (), generator=rng))
        order = order.to(query.device)
        keys = key.index_select(2, order)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (by.query, by.key)]
            queries = query.index_select(2, rows)
            true = true_scores(queries, keys, scale)
            loss = score_loss(predicted_scores(queries, keys, Projections(leaves[0], leaves[1])), true)
            of_query, of_key = torch.autograd.grad(loss.sum() / state.site.heads, leaves)
        with torch.no_grad():
            of_group = query.index_select(2, order[int(cubes.groups[group]) : int(cubes.groups[group + 1])])
            lists = self.cascade.lists[layer]
            if lists is None:
                lists = self._chosen(state, by, query, key, cubes, here)
            video = len(cubes.blocks) - 1 - cubes.captions
            chosen = chosen_blocks(lists, video + cubes.captions)[:, :, group, :video]
            scores = true_scores(of_group, keys, scale)
            held, of_best = held_mass(scores, chosen, cubes.blocks[: video + 1])
            needed = needed_blocks(scores, cubes.blocks[: video + 1])
            sparsity = measured_sparsity(true)
        heads = (here.start, here.stop)
        return Measured(loss.detach(), sparsity, needed, held, of_best, (of_query, of_key), heads)


def add_predictors(
    model: nn.Module, sites: Mapping[str, tuple[Site, ...]], rank: int, seed: int
) -> dict[Layer, LayerState]:
    """Registers the projections of every site on its block, as parameters ``sparse_query_N`` and ``sparse_key_N``.

    ``sites`` are by the blocks' paths. Raises ValueError for a rank of 0 or above the head size.
    """
    layers = {}
    for path, of_block in sites.items():
        module = model.get_submodule(path)
        device = next(module.parameters()).device
        for site in of_block:
            rng = torch.Generator().manual_seed(_seed(f"{seed}/predictor/{path}/{site.number}"))
            start = initial_projections(site.heads, site.head_size, site.head_size, rank, rng)
            query, key = (nn.Parameter(x.to(device)) for x in (start.query, start.key))
            module.register_parameter(f"sparse_query_{site.number}", query)
            module.register_parameter(f"sparse_key_{site.number}", key)
            layers[path, site.number] = LayerState(
                site, Projections(query, key), (0.0,) * site.heads, (1.0,) * site.heads
            )
    return layers


def after(state: LayerState, measured: Measured) -> LayerState:
    """What is known of a layer after a step that measured all its heads. Waits for the device."""
    sparsities = moved(state.sparsities, measured.sparsity.tolist())
    densities = moved(state.densities, measured.needed.tolist())
    sparse = turns_sparse(float(measured.loss.mean()), float(measured.of_best.mean()))
    return replace(state, sparsities=sparsities, densities=densities, sparse=sparse)


class _Beside(torch.autograd.Function):
    """``out`` as it is; in the backward the projections get gradients of their own, whatever ``out`` gets."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, query: Tensor, key: Tensor, of_query: Tensor, of_key: Tensor, here: slice, weight: float
    ) -> Tensor:
        ctx.save_for_backward(of_query, of_key)
        ctx.sizes, ctx.here, ctx.weight = (query.shape, key.shape), here, weight
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares = []
        for size, part in zip(ctx.sizes, ctx.saved_tensors, strict=True):
            share = part.new_zeros(size)
            share[ctx.here] = part * ctx.weight
            shares.append(share)
        return grad, *shares, None, None, None, None


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
