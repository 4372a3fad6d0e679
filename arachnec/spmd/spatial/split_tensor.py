"""A tensor of which every rank of a group holds a part, and which computes as if it were whole.

Its shape is that of the whole tensor, so a module's code runs on it as it stands. What each operator does with the
parts is in the tables of ``Sharing``. Operators that nobody knows how to divide are refused: ``NotDivisible``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.spmd.spatial.layout import Factor, Layout, Unaligned, even_bounds, viewed, whole
from arachnec.spmd.spatial.peers import Peers, Span, Spans, narrowed, transfer

Rule = Callable[..., Any]


class NotDivisible(Exception):
    """The module does what ranks cannot share. ``reason`` says what."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Sharing:
    """The ranks of a grid, and what operators do with the parts that they hold.

    A rule of ``operators`` is called with the operator of ATen and its arguments, at least one of them a
    ``SplitTensor``; one of ``functions`` like the function of torch whose place it takes.
    """

    peers: Peers
    grid: tuple[int, ...]
    operators: Mapping[object, Rule]
    functions: Mapping[object, Rule]
    pointwise: Rule

    def rule(self, operator: Any) -> Rule:
        """Raises NotDivisible where there is none."""
        rule = self.operators.get(operator.overloadpacket)
        if rule is None and torch.Tag.pointwise in operator.tags:
            return self.pointwise
        if rule is None:
            raise NotDivisible(f"it calls `{operator}`, which its ranks cannot share")
        return rule


class SplitTensor(Tensor):
    """``local`` is this rank's part by the ``spread`` layout; always contiguous to look at."""

    local: Tensor
    spread: Layout
    sharing: Sharing
    copied: bool  # a view of something whose memory it does not share

    @staticmethod
    def __new__(cls, local: Tensor, spread: Layout, sharing: Sharing, copied: bool = False) -> SplitTensor:
        assert tuple(local.shape) == spread.local_shape(sharing.peers.index), (local.shape, spread)
        tensor: SplitTensor = Tensor._make_wrapper_subclass(cls, spread.shape, dtype=local.dtype, device=local.device)
        tensor.local, tensor.spread, tensor.sharing, tensor.copied = local, spread, sharing, copied
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SplitTensor({tuple(self.shape)}, here {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__class__.__name__ == "builtin_function_or_method":  # all that has a rule
                return sharing_of((args, kwargs)).functions.get(func, func)(*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        return sharing_of((args, kwargs)).rule(func)(func, *args, **kwargs)

    @property
    def place(self) -> int:
        return self.sharing.peers.index

    def like(self, local: Tensor, spread: Layout | None = None, copied: bool = False) -> SplitTensor:
        """Another tensor of the same ranks."""
        return SplitTensor(local, spread or self.spread, self.sharing, copied)

    def fetched(self, wanted: Mapping[int, Sequence[Span]]) -> Tensor:
        """This rank's part where ranks want other ranges than they hold, zeros outside the tensor.

        ``wanted`` are, by axis, the ranges for each place along it; axes not named stay. Collective, unless every rank
        has what it wants.
        """
        ranges = tuple((axis, tuple(spans)) for axis, spans in sorted(wanted.items()))
        plan = transfer(self.spread, ranges, self.place)
        if plan.nothing:
            return self.local
        flat = self.local.reshape([end - first for first, end in plan.held])
        shape = [end - first for first, end in plan.wanted]
        result = flat.new_zeros(shape) if plan.outside else flat.new_empty(shape)
        if plan.collective:
            pieces = [flat.new_empty(0) if s is None else narrowed(flat, plan.held, s) for s in plan.sent]
            shapes = [(0,) if spans is None else _lengths(spans) for spans in plan.received]
            for spans, piece in zip(plan.received, self.sharing.peers.exchange(pieces, shapes), strict=True):
                if spans is not None:
                    narrowed(result, plan.wanted, spans).copy_(piece)
        if plan.kept is not None:
            narrowed(result, plan.wanted, plan.kept).copy_(narrowed(flat, plan.held, plan.kept))
        lengths, position = [], 0
        for dim in self.spread.dims:
            lengths.append(math.prod(shape[position : position + len(dim)]))
            position += len(dim)
        return result.reshape(lengths)

    def gathered(self, axes: frozenset[int] | None = None) -> Tensor:
        """With these axes, or all, on every rank: a plain tensor where none is cut any more. Collective."""
        axes = self.spread.axes if axes is None else axes & self.spread.axes
        if not axes:
            return self
        spans = {axis: [(0, self.spread.factor_of(axis).size)] * self.spread.grid[axis] for axis in axes}
        local, spread = self.fetched(spans), self.spread.without(axes)
        return self.like(local, spread) if spread.axes else local

    def cut_at(self, axis: int, bounds: tuple[int, ...]) -> SplitTensor:
        """The same tensor with an axis cut at other bounds. Collective, unless it is cut there."""
        if self.spread.factor_of(axis).bounds == bounds:
            return self
        return self.like(self.fetched({axis: list(pairwise(bounds))}), self.spread.with_bounds(axis, bounds))

    def viewed(self, shape: Sequence[int]) -> Tensor:
        """``view``; ranks exchange what cuts through what they hold."""
        current: Tensor = self
        while isinstance(current, SplitTensor):
            try:
                spread = viewed(current.spread, shape)
            except Unaligned as unaligned:
                if not unaligned.multiple:
                    current = current.gathered(frozenset({unaligned.axis}))
                    continue
                bounds, multiple = current.spread.factor_of(unaligned.axis).bounds, unaligned.multiple
                current = current.cut_at(unaligned.axis, tuple(-(-bound // multiple) * multiple for bound in bounds))
                continue
            local = current.local.reshape(spread.local_shape(self.place))
            if not spread.axes:
                return local
            storages = (x.untyped_storage()._cdata for x in (local, self.local))
            return current.like(local, spread, copied=len(set(storages)) > 1)
        return current.reshape(tuple(shape))


def sharing_of(arguments: object) -> Sharing:
    return next(leaf.sharing for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, SplitTensor))


def split(x: Tensor, cuts: Mapping[int, int], sharing: Sharing) -> SplitTensor:
    """A tensor that every rank has in full, cut evenly: ``cuts`` are the axes by dimension."""
    dims = [
        (Factor(size, cuts[position], even_bounds(size, sharing.grid[cuts[position]])),)
        if position in cuts
        else whole(size)
        for position, size in enumerate(x.shape)
    ]
    spread = Layout(tuple(dims), sharing.grid)
    return SplitTensor(local_part(x, spread, sharing.peers.index), spread, sharing)


def local_part(x: Tensor, spread: Layout, index: int) -> Tensor:
    """What the rank at ``index`` holds by ``spread`` of a tensor that it has in full; a size of 1 stands for any."""
    for position, dim in enumerate(spread.dims):
        if x.shape[position] == 1 or all(factor.axis is None for factor in dim):
            continue
        x = x.unflatten(position, [factor.size for factor in dim])  # type: ignore[no-untyped-call]
        for offset, factor in enumerate(dim):
            first, end = spread.span(factor, index)
            x = x.narrow(position + offset, first, end - first)
        x = x.flatten(position, position + len(dim) - 1)
    return x


def _lengths(spans: Spans) -> list[int]:
    return [end - first for first, end in spans]
