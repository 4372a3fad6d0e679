"""A tensor of one rank's tokens that is gathered when anything but a block or a view reads it.

Between the blocks of factorised attention a model folds frames into the batch, then places. Such views are taken of
the rank's own tokens. Where a block wants them dealt out in another way, they are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.kernels.attention.exchange import Dealt, gather_tokens, redistribute
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split
from arachnec.tracing.record import COPIES, PERMUTATIONS, TOKEN_VIEWS

# Answered without gathering: the complete tensor would answer the same.
METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


class ShardedTokens(Tensor):
    """This rank's tokens of a tensor along one dimension; its shape is that of the complete tensor.

    The dimension is ``outer x tokens x inner``, flattened: the tokens alone, or merged with their neighbours.
    """

    local: Tensor
    token_dim: int
    shard: SequenceShard
    merged: tuple[int, int]  # what lies before and behind the tokens in their dimension
    _gathered: Tensor | None
    _view: tuple[ShardedTokens, Callable[[Tensor], Tensor]] | None  # of which it is one

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, shard: SequenceShard, outer: int = 1, inner: int = 1) -> ShardedTokens:
        sizes = (*local.shape[:dim], outer * shard.total * inner, *local.shape[dim + 1 :])
        needs_grad = local.requires_grad
        tokens: ShardedTokens = Tensor._make_wrapper_subclass(
            cls, sizes, dtype=local.dtype, device=local.device, requires_grad=needs_grad
        )
        tokens.local, tokens.token_dim, tokens.shard, tokens._gathered = local, dim, shard, None
        tokens.merged, tokens._view = (outer, inner), None
        if needs_grad:
            with torch._C.DisableTorchFunctionSubclass():
                tokens.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return tokens

    def gathered(self) -> Tensor:
        """All tokens, on every rank. Collective over the ranks of the shard; gathered once, and once for gradients."""
        tracked = self.local.requires_grad and torch.is_grad_enabled()
        if self._gathered is None or (tracked and not self._gathered.requires_grad):
            if self._view is None:
                self._gathered = gather_tokens(self.local, self.token_dim, self.shard)
            else:
                base, view = self._view
                self._gathered = view(base.gathered())
        return self._gathered

    def dealt(self, dim: int, shard: SequenceShard) -> Tensor:
        """This rank's own of all tokens when they are dealt out along ``dim``. Collective where these are others."""
        sizes, here = tuple(self.shape), self.token_dim
        first, last = min(here, dim), max(here, dim) + 1
        before = Dealt(
            math.prod(sizes[first:here]) * self.merged[0],
            self.shard.tokens,
            self.merged[1] * math.prod(sizes[here + 1 : last]),
        )
        after = Dealt(math.prod(sizes[first:dim]), shard.tokens, math.prod(sizes[dim + 1 : last]))
        merged = self.local.flatten(first, last - 1)
        moved = redistribute(merged, first, before, after, shard)
        shape = (*sizes[:dim], shard.local, *sizes[dim + 1 :])
        return moved.reshape(shape)

    def viewed(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> ShardedTokens | None:
        """A view of it, or a copy; None where its tokens do not stay in one dimension."""
        if func in COPIES:
            view = ShardedTokens(func(self.local, *args, **kwargs), self.token_dim, self.shard, *self.merged)
        elif func in PERMUTATIONS:
            like = torch.empty_strided(self.shape, tuple(range(1, self.ndim + 1)), device="meta")
            order = [stride - 1 for stride in func(like, *args, **kwargs).stride()]
            local = self.local.permute(order)
            view = ShardedTokens(local, order.index(self.token_dim), self.shard, *self.merged)
        else:
            sizes = tuple(func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape)
            tokens = self if self._place_in(sizes) is not None else self._split_for(sizes)
            place = None if tokens is None else tokens._place_in(sizes)
            if tokens is None or place is None:
                return None
            dim, outer, inner = place
            shape = (*sizes[:dim], outer * tokens.shard.local * inner, *sizes[dim + 1 :])
            view = ShardedTokens(tokens.local.reshape(shape), dim, tokens.shard, outer, inner)
        view._view = self, lambda whole: func(whole, *args, **kwargs)
        return view

    def _place_in(self, sizes: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Where its tokens are after a reshape: the dimension, and what they are merged with there."""
        outer = math.prod(self.shape[: self.token_dim]) * self.merged[0]
        inner = self.merged[1] * math.prod(self.shape[self.token_dim + 1 :])
        for dim, size in enumerate(sizes):
            before, after = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
            if 0 in (before, after) or outer % before or inner % after:
                continue
            if size == outer // before * self.shard.total * (inner // after):
                return dim, outer // before, inner // after
        return None

    def _split_for(self, sizes: tuple[int, ...]) -> ShardedTokens | None:
        """Dealt out over the largest of the factors that a reshape splits its tokens into (rows of all clips into
        clips and places)."""
        here = self.token_dim
        before, after = math.prod(self.shape[:here]), math.prod(self.shape[here + 1 :])
        factors = []
        for dim, size in enumerate(sizes):
            outer, inner = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
            if before and after and outer % before == 0 and inner % after == 0:
                factors.append((size, outer // before, inner // after))
        if not factors:
            return None
        size, outer, inner = max(factors)
        shard = replace(self.shard, tokens=even_split(size, self.shard.degree))
        old, new = Dealt(self.merged[0], self.shard.tokens, self.merged[1]), Dealt(outer, shard.tokens, inner)
        return ShardedTokens(redistribute(self.local, here, old, new, self.shard), here, shard, outer, inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        other_type = any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))  # `view` has two meanings
        if func in TOKEN_VIEWS and isinstance(args[0], ShardedTokens) and args[0]._gathered is None and not other_type:
            view = args[0].viewed(func, args[1:], kwargs)
            if view is not None:
                return view
        args, kwargs = pytree.tree_map_only(ShardedTokens, ShardedTokens.gathered, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} got a shard of a sequence past torch's function overrides")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTokens({list(self.shape)}, tokens {self.shard.tokens} along {self.token_dim})"


def _refuse_gradient(gradient: Tensor) -> None:
    """A gradient only comes here from a custom autograd function, which read the values without their history."""
    raise RuntimeError("a custom autograd function outside the blocks took tokens that are sharded: pass it `x + 0`")
