"""Operators that treat every entry by itself, and those that join tensors: their operands are brought to one layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.spmd.spatial.layout import Dim, Layout, is_cut, whole
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor, local_part


def common(operands: Sequence[Tensor], free: int | None = None) -> Layout:
    """A layout for what these tensors broadcast to: of every dimension that of the first operand that is cut there.

    The dimension ``free`` is nobody's: operands need not agree there, and it is not cut.
    """
    first = next(x for x in operands if isinstance(x, SplitTensor))
    rank = max(x.dim() for x in operands)
    dims: list[Dim] = []
    taken: set[int] = set()
    for position in range(rank):
        sizes = [x.shape[position - rank] for x in operands if x.dim() >= rank - position]
        size = next((size for size in sizes if size != 1), 1)
        cut = (dim for x in operands for dim in _cut_dims(x, position - rank, size, taken))
        chosen = whole(size) if position == free else next(cut, whole(size))
        taken |= {factor.axis for factor in chosen if factor.axis is not None}
        dims.append(chosen)
    return Layout(tuple(dims), first.spread.grid)


def _cut_dims(x: Tensor, position: int, size: int, taken: set[int]) -> list[Dim]:
    if not isinstance(x, SplitTensor) or x.dim() < -position or x.shape[position] != size:
        return []
    dim = x.spread.dims[position]
    return [dim] if is_cut(dim) and not {factor.axis for factor in dim} & taken else []


def brought_to(x: Tensor, spread: Layout, like: SplitTensor) -> Tensor:
    """This rank's part of an operand of what lies by ``spread``; a dimension of size 1 stays. Collective."""
    wanted = spread.dims[len(spread.dims) - x.dim() :]
    if isinstance(x, SplitTensor):
        wrong = {
            factor.axis
            for own, dim in zip(x.spread.dims, wanted, strict=True)
            if not _same_cut(own, dim)
            for factor in own
            if factor.axis is not None
        }
        x = x.gathered(frozenset(wrong))
    if isinstance(x, SplitTensor):
        for axis in sorted(x.spread.axes):
            x = x.cut_at(axis, spread.factor_of(axis).bounds)
        wanted = tuple(() if is_cut(own) else dim for own, dim in zip(x.spread.dims, wanted, strict=True))
        x = x.local
    return local_part(x, Layout(wanted, spread.grid), like.place)


def _same_cut(own: Dim, wanted: Dim) -> bool:
    """Whether two dimensions are cut alike, but for where."""
    return [(factor.size, factor.axis) for factor in own] == [(factor.size, factor.axis) for factor in wanted]


def pointwise(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator whose result at a place depends on its operands at that place."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    like = next(x for x in operands if isinstance(x, SplitTensor))
    if operator._schema.is_mutable:
        return _in_place(operator, args, kwargs)
    spread = common(operands)
    parts = [brought_to(leaf, spread, like) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    local_args, local_kwargs = pytree.tree_unflatten(parts, tree)
    return like.like(operator(*local_args, **local_kwargs), spread)


def _in_place(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.add_(y)``: x keeps its layout."""
    target = args[0]
    if not isinstance(target, SplitTensor):
        whole_args = pytree.tree_map_only(SplitTensor, SplitTensor.gathered, (args, kwargs))
        return operator(*whole_args[0], **whole_args[1])
    if target.copied:
        raise NotDivisible(f"it calls `{operator}` on a view of what its ranks hold in other memory")
    leaves, tree = pytree.tree_flatten((args[1:], kwargs))
    parts = [brought_to(leaf, target.spread, target) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    local_args, local_kwargs = pytree.tree_unflatten(parts, tree)
    operator(target.local, *local_args, **local_kwargs)
    return target


def cat(operator: Any, items: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``cat``, along a dimension that is not cut."""
    # an empty vector stands for nothing
    operands = [x for x in items if not (x.dim() == 1 and x.shape[0] == 0)]
    like = next(x for x in operands if isinstance(x, SplitTensor))
    free = dim % like.dim()
    spread = common(operands, free)
    parts = [brought_to(x, spread.with_dim(free, whole(x.shape[free])), like) for x in operands]
    joint: Tensor = operator(parts, free)
    if not spread.axes:
        return joint
    return like.like(joint, spread.with_dim(free, whole(joint.shape[free])))


def stack(operator: Any, items: Sequence[Tensor], dim: int = 0) -> Tensor:
    like = next(x for x in items if isinstance(x, SplitTensor))
    spread, position = common(items), dim % (like.dim() + 1)
    local = operator([brought_to(x, spread, like) for x in items], position)
    dims = (*spread.dims[:position], whole(len(items)), *spread.dims[position:])
    return like.like(local, Layout(dims, spread.grid))


def alike(operator: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Tensor:
    """What makes of one tensor one of the same shape: a copy, a cast, zeros."""
    kwargs.pop("memory_format", None)
    result = x.like(operator(x.local, *args, **kwargs))
    result.copied = x.copied and operator.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.alias)
    return result
