"""Sparse attention of a model's blocks in one cascade: what it knows of each layer, and what it measures.

A layer is one attention of one block: its path, and its number there. Nothing here depends on the plan: what is drawn
follows from seed, step, clip and layer, and what a rank computes for its heads is what one rank computes for them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from arachnec.ir.head_density import HeadPart
from arachnec.kernels.attention.divided_heads import Division, HeadShare
from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.critical_keys import critical_keys
from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.predictor import (
    LARGEST_LOSS,
    MASS,
    Projections,
    block_mass,
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
from arachnec.kernels.sparse.token_cubes import CELL, KEYS, QUERIES, Grid, TokenCubes, order_on, token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists, video_attention
from arachnec.sparsity.head_shares import independent
from arachnec.spmd.chosen_fetch import LayerFetch, Room
from arachnec.spmd.sparse_block import Shares, Site

Layer = tuple[str, int]
ROWS = 64  # queries whose rows of scores a predictor learns from in a step
SCORES = 1 << 26  # of some heads, that exist at one time while a layer is measured: 256 MiB


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
    """Of the heads that were computed here, [heads] each, means over clips: 1 where the drawn group was, else 0; loss
    and sparsity, of a head that is cut the part of its own queries; of the drawn group the share of blocks that it
    needs, the attention that its chosen blocks hold and that share of the best choice's; the blocks that the groups
    here chose together, and those that as many would, if each chose by itself; and the projections' gradients. Over the
    ranks of a clip these add up to those of one rank, but for ``taken`` and ``alone``: of a head that is cut they are
    of its parts."""

    counted: Tensor
    loss: Tensor
    sparsity: Tensor
    needed: Tensor
    held: Tensor
    of_best: Tensor
    taken: Tensor
    alone: Tensor
    gradients: tuple[Tensor, Tensor]
    heads: tuple[int, ...]  # which these are


@dataclass
class SparseCascade:
    """One cascade's attention. A layer that is not in ``layers`` is dense and learns nothing. ``replay`` are lists of
    all heads that are taken as they are, None for dense. ``lists`` are those of the heads that were computed here: what
    runs again in the backward takes them from there. ``weight`` None trains no predictor. ``parts`` say which rank of a
    clip computes which of so many ``groups`` of which head, of layers that run sparse; heads of others, and of a
    sequence that is cut into another number of groups, go by number. Sparse layers with ``room`` get only the keys that
    they chose, and must be among the ``resting``, as they do not see the others; ``overflowed`` says for each whether a
    key had no room. Layers that are ``resting`` measure and learn nothing, and of clips that are set
    ``aside``, by their places in the micro-batch, none does."""

    layers: Mapping[Layer, LayerState]
    grid: Grid
    draws: tuple[str, ...]  # seed/step/clip, of every clip of a micro-batch
    weight: float | None = None
    sizes: tuple[int, int, int] = (QUERIES, KEYS, CELL)  # tokens of a group, a block and a cell
    replay: Mapping[Layer, KeyLists | None] = field(default_factory=dict)
    mass: float = MASS  # of a group's attention, that its blocks are to hold
    parts: Mapping[Layer, Sequence[HeadPart]] = field(default_factory=dict)
    groups: int = 0
    room: Mapping[Layer, Room] = field(default_factory=dict)
    resting: Set[Layer] = frozenset()
    aside: Set[int] = frozenset()
    overflowed: list[Tensor] = field(default_factory=list)
    lists: dict[Layer, KeyLists | None] = field(default_factory=dict)
    shares: dict[Layer, Shares] = field(default_factory=dict)  # whose lists these are
    measured: dict[Layer, Measured] = field(default_factory=dict)
    fetched: set[Layer] = field(default_factory=set)  # whose lists are known on all ranks
    _cubes: dict[tuple[int, str | None], TokenCubes] = field(default_factory=dict)
    _divisions: dict[tuple[Layer, int], Division | None] = field(default_factory=dict)

    def of_objective(self, objective: Tensor) -> Tensor:
        """The objective, or nan where a key had no room: then no gradient is finite, and nothing is updated."""
        if not self.overflowed:
            return objective
        return objective * torch.where(torch.stack(self.overflowed).any(), math.nan, 1.0).to(objective.dtype)

    def for_another_forward(self) -> SparseCascade:
        """The same with no lists yet."""
        return replace(self, lists={}, shares={}, measured={}, fetched=set(), overflowed=[])

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

    def division(self, site: int, tokens: int, places: int) -> Division | None:
        """Who computes which queries of which heads; None where heads go by number."""
        cascade, layer = self.cascade, (self.path, site)
        if (layer, tokens) not in cascade._divisions:
            cascade._divisions[layer, tokens] = self._divided(layer, tokens, places)
        return cascade._divisions[layer, tokens]

    def _divided(self, layer: Layer, tokens: int, places: int) -> Division | None:
        cascade, parts = self.cascade, self.cascade.parts.get(layer)
        state = cascade.layers.get(layer)
        if not parts or state is None or not cascade.replay.get(layer, state.sparse):
            return None
        cubes = cascade.cubes(tokens, state.site.captions)
        return divided(tuple(parts), cubes, places) if len(cubes.groups) - 1 == cascade.groups else None

    def fetch(self, site: int, tokens: int, ranks: Sequence[int]) -> LayerFetch | None:
        """How a layer that runs sparse gets its keys on these ranks; None where it gets all of them."""
        cascade, layer = self.cascade, (self.path, site)
        state, room = cascade.layers.get(layer), cascade.room.get(layer)
        if state is None or room is None or not cascade.replay.get(layer, state.sparse):
            return None
        if len({rank // room.node for rank in ranks}) == 1:
            return None
        cubes, by = cascade.cubes(tokens, state.site.captions), state.projections

        def lists(query: Tensor | None, key: Tensor | None, heads: Shares) -> KeyLists:
            if layer not in cascade.lists:
                cascade.shares[layer] = heads
                given = cascade.replay.get(layer)
                if given is not None:
                    cascade.lists[layer] = given.of_shares(heads, by.query.device)
                else:
                    assert query is not None and key is not None
                    cascade.lists[layer] = critical_keys(query, key, cubes, *self._kept(state, cubes, heads))
            known = cascade.lists[layer]
            assert known is not None, "a layer that is dense fetches no keys"
            return known

        predicts = layer not in cascade.replay and layer not in cascade.fetched
        cascade.fetched.add(layer)
        return LayerFetch(cubes, by.key, by.query, state.densities, room, predicts, lists, cascade.overflowed)

    def attend(
        self, site: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, heads: Shares
    ) -> Tensor:
        """Attention of heads [B, heads, S, D] over all tokens, of those that are cut for their own queries."""
        cascade, layer = self.cascade, (self.path, site)
        state = cascade.layers.get(layer)
        if state is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        cubes = cascade.cubes(query.shape[2], state.site.captions)
        if not heads:
            return video_attention(query, key, value, cubes, None, mask=mask, scale=scale)
        here = on_device(torch.tensor([share.head for share in heads]), query.device)
        by = Projections(state.projections.query[here], state.projections.key[here])
        if layer not in cascade.lists:
            cascade.shares[layer] = heads
            if layer in cascade.replay:
                given = cascade.replay[layer]
                cascade.lists[layer] = None if given is None else given.of_shares(heads, query.device)
            else:
                cascade.lists[layer] = self._chosen(state, by, query, key, cubes, heads) if state.sparse else None
        out = video_attention(query, key, value, cubes, cascade.lists[layer], mask=mask, scale=scale)
        if cascade.weight is None or layer in cascade.resting:
            return out
        if layer not in cascade.measured:
            with saved_tensors_hooks(_as_it_is, _as_it_is):  # what is saved here is none of the checkpoint's
                cascade.measured[layer] = self._measured(state, layer, by, query, key, cubes, scale, heads)
        projections, gradients = state.projections, cascade.measured[layer].gradients
        output: Tensor = _WithPredictorGradients.apply(  # type: ignore[no-untyped-call]
            out, projections.query, projections.key, *gradients, here, cascade.weight
        )
        return output

    def _chosen(
        self, state: LayerState, by: Projections, query: Tensor, key: Tensor, cubes: TokenCubes, heads: Shares
    ) -> KeyLists:
        return predicted_lists(query, key, by, cubes, *self._kept(state, cubes, heads))

    @staticmethod
    def _kept(state: LayerState, cubes: TokenCubes, heads: Shares) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks that each share keeps, and its groups."""
        video, groups = len(cubes.blocks) - 1 - cubes.captions, len(cubes.groups) - 1
        kept = kept_blocks([state.densities[share.head] for share in heads], video)
        return kept, [(share.first, groups if share.end is None else share.end) for share in heads]

    def _measured(
        self,
        state: LayerState,
        layer: Layer,
        by: Projections,
        query: Tensor,
        key: Tensor,
        cubes: TokenCubes,
        scale: float,
        heads: Shares,
    ) -> Measured:
        """On rows of scores that are drawn for this layer and each clip, and on all rows of one group: of a head that
        is cut on those that are here."""
        draws = [_drawn(f"{draw}/{layer[0]}/{layer[1]}", cubes) for draw in self.cascade.draws]
        # A model that attends to its clips twice, as one that repeats its batch, has the same draws twice.
        rows, groups = map(torch.stack, zip(*(draws[n % len(draws)] for n in range(query.shape[0])), strict=True))
        here = [torch.ones_like(rows) if s.rows is None else torch.isin(rows, s.rows) for s in heads]
        drawn_in = [torch.ones_like(groups) if s.end is None else (groups >= s.first) & (groups < s.end) for s in heads]
        used = torch.tensor([n % len(draws) not in self.cascade.aside for n in range(query.shape[0])])
        own_rows = torch.stack(here, 1).bool() & used[:, None, None]
        tables = (own_rows, torch.stack(drawn_in, 1).bool() & used[:, None], groups, rows, used)
        own, counted, group, rows, teaches = (on_device(table, query.device) for table in tables)
        of_group, weights = (on_device(table, query.device) for table in _of_groups(cubes, groups))
        order = order_on(cubes, query.device)[: cubes.video]
        with torch.no_grad():
            lists = self.cascade.lists[layer]
            if lists is None:
                lists = self._chosen(state, by, query, key, cubes, heads)
            video = len(cubes.blocks) - 1 - cubes.captions
            table = chosen_blocks(lists, video + cubes.captions)[..., :video]
            taken = (table.any(2) & teaches[:, None, None]).float().mean((0, 2))
            spans = self._kept(state, cubes, heads)[1]
            by_itself = [independent(state.densities[s.head], b - a) for s, (a, b) in zip(heads, spans, strict=True)]
            alone = on_device(torch.tensor(by_itself) * used.float().mean(), taken.device)
        scores = query.shape[0] * cubes.video * max(rows.shape[1], of_group.shape[1])
        drawn_rows = DrawnRows(rows, of_group, weights, order, cubes.blocks[: video + 1], scale, self.cascade.mass)
        clip = torch.arange(query.shape[0], device=query.device)
        chosen = table[clip, :, group]
        parts = [
            _of_heads(
                query[:, some],
                key[:, some],
                Projections(by.query[some], by.key[some]),
                own[:, some],
                counted[:, some],
                chosen[:, some],
                drawn_rows,
            )
            for some in _slices(len(heads), max(1, SCORES // scores))
        ]
        by_head = (torch.cat(part) for part in zip(*parts, strict=True))
        loss, sparsity, of_query, of_key, needed, held, of_best = by_head
        of_query, of_key = of_query / state.site.heads, of_key / state.site.heads
        numbers = tuple(share.head for share in heads)
        seen = counted.float().mean(0)
        return Measured(seen, loss, sparsity, needed, held, of_best, taken, alone, (of_query, of_key), numbers)


@dataclass(frozen=True)
class DrawnRows:
    """What is measured on, of every clip: the queries of some ``rows`` [B, n] and those of one ``group`` [B, m], tokens
    of the sequence, whose ``weights`` [B, m] add up to 1; and all keys of video in their ``order``; ``blocks`` are
    starts in it."""

    rows: Tensor
    group: Tensor
    weights: Tensor
    order: Tensor
    blocks: Tensor
    scale: float
    mass: float


def _of_heads(
    query: Tensor, key: Tensor, by: Projections, own: Tensor, counted: Tensor, chosen: Tensor, drawn: DrawnRows
) -> tuple[Tensor, ...]:
    """Of some heads, [heads] each, means over clips: the predictor's loss and the sparsity on ``own`` rows [B, heads,
    n], the gradients of the projections, and of the group, where it is ``counted`` [B, heads], the blocks it needs, and
    what the ``chosen`` ones hold."""
    keys = key.index_select(2, drawn.order)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (by.query, by.key)]
        queries = _rows_of(query, drawn.rows)
        true = true_scores(queries, keys, drawn.scale)
        by_row = score_loss(predicted_scores(queries, keys, Projections(leaves[0], leaves[1])), true)
        loss = torch.where(own, by_row, 0.0).mean((0, 2))
        of_query, of_key = torch.autograd.grad(loss.sum(), leaves)
    with torch.no_grad():
        sparsity = torch.where(own, measured_sparsity(true, drawn.mass), 0.0).mean((0, 2))
        of_group = true_scores(_rows_of(query, drawn.group), keys, drawn.scale)
        of_block = block_mass(of_group, drawn.blocks, drawn.weights)
        of_drawn = (needed_blocks(of_block, drawn.mass), *held_mass(of_block, chosen))
        needed, held, of_best = (torch.where(counted, x, 0.0).mean(0) for x in of_drawn)
    return loss.detach(), sparsity, of_query, of_key, needed, held, of_best


def _drawn(seed: str, cubes: TokenCubes) -> tuple[Tensor, Tensor]:
    """Some tokens of video and one group."""
    rng = torch.Generator().manual_seed(_seed(seed))
    rows = cubes.order[: cubes.video][torch.randint(cubes.video, (min(ROWS, cubes.video),), generator=rng)]
    return rows, torch.randint(len(cubes.groups) - 1, (), generator=rng)


def _of_groups(cubes: TokenCubes, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one group of every clip [B, m], and their weights: those of shorter groups are filled up with
    tokens that weigh nothing."""
    sizes = cubes.groups.diff()[groups.long()]
    place = torch.arange(int(sizes.max()))
    inside = place < sizes[:, None]
    starts = cubes.groups[groups.long()][:, None]
    tokens = cubes.order[torch.where(inside, starts + place, starts)]
    return tokens, inside / sizes[:, None].float()


def _rows_of(query: Tensor, rows: Tensor) -> Tensor:
    """[B, H, n, D]: of each clip its own rows [B, n] of queries [B, H, S, D]."""
    return query.take_along_dim(rows[:, None, :, None], 2)


def _slices(count: int, at_once: int) -> list[slice]:
    return [slice(first, first + at_once) for first in range(0, count, at_once)]


@functools.lru_cache(maxsize=1024)
def divided(parts: tuple[HeadPart, ...], cubes: TokenCubes, places: int) -> Division:
    """By place the shares of heads: groups as rows of the sequence. Captions' queries are in no group: they go with a
    head's first."""
    groups = len(cubes.groups) - 1
    shares: list[list[HeadShare]] = [[] for _ in range(places)]
    for part in sorted(parts, key=lambda part: ((part.start, part.stop) != (0, groups), part)):
        whole = (part.start, part.stop) == (0, groups)
        shares[part.place].append(HeadShare(part.head) if whole else _cut(part, cubes))
    return tuple(map(tuple, shares))


def _cut(part: HeadPart, cubes: TokenCubes) -> HeadShare:
    rows = cubes.order[int(cubes.groups[part.start]) : int(cubes.groups[part.stop])]
    captions = cubes.order[cubes.video :] if part.start == 0 else rows[:0]
    return HeadShare(part.head, torch.cat([rows, captions]).sort().values, part.start, part.stop)


def add_predictors(
    model: nn.Module, sites: Mapping[str, tuple[Site, ...]], rank: int, seed: int, here: Set[str] | None = None
) -> dict[Layer, LayerState]:
    """Registers the projections of every site on its block, as parameters ``sparse_query_N`` and ``sparse_key_N``.

    ``sites`` are by the blocks' paths. Projections of a block that is not ``here`` have no elements. Raises ValueError
    for a rank of 0 or above the head size.
    """
    layers = {}
    for path, of_block in sites.items():
        module = model.get_submodule(path)
        device = next(module.parameters()).device
        for site in of_block:
            if here is not None and path not in here:
                empty = Projections(torch.empty(0, device=device), torch.empty(0, device=device))
                layers[path, site.number] = LayerState(site, empty, *unmeasured(site.heads))
                continue
            rng = torch.Generator().manual_seed(_seed(f"{seed}/predictor/{path}/{site.number}"))
            start = initial_projections(site.heads, site.head_size, site.head_size, rank, rng)
            query, key = (nn.Parameter(x.to(device)) for x in (start.query, start.key))
            module.register_parameter(f"sparse_query_{site.number}", query)
            module.register_parameter(f"sparse_key_{site.number}", key)
            layers[path, site.number] = LayerState(site, Projections(query, key), *unmeasured(site.heads))
    return layers


def unmeasured(heads: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sparsities and densities of so many heads before the first step."""
    return (0.0,) * heads, (1.0,) * heads


def after(state: LayerState, measured: Measured, largest_loss: float = LARGEST_LOSS) -> LayerState:
    """What is known of a layer after a step that measured all its heads. Waits for the device."""
    sparsities = moved(state.sparsities, measured.sparsity.tolist())
    densities = moved(state.densities, measured.needed.tolist())
    sparse = turns_sparse(float(measured.loss.mean()), float(measured.of_best.mean()), largest_loss)
    return replace(state, sparsities=sparsities, densities=densities, sparse=sparse)


class _WithPredictorGradients(torch.autograd.Function):
    """``out`` as it is; in the backward the projections get gradients of their own, whatever ``out`` gets."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, query: Tensor, key: Tensor, of_query: Tensor, of_key: Tensor, here: Tensor, weight: float
    ) -> Tensor:
        ctx.save_for_backward(of_query, of_key)
        ctx.sizes, ctx.here, ctx.weight = (query.shape, key.shape), here, weight
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares = []
        for size, part in zip(ctx.sizes, ctx.saved_tensors, strict=True):
            share = part.new_zeros(size)
            shares.append(share.index_copy_(0, ctx.here, part * ctx.weight))
        return grad, *shares, None, None, None, None


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
