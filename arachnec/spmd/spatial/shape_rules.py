"""Views, slices and permutations of tensors that ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from arachnec.spmd.spatial.layout import Dim, Factor, Layout, is_cut, whole
from arachnec.spmd.spatial.split_tensor import SplitTensor

ATEN = torch.ops.aten


def uncut(x: Tensor, *positions: int) -> Tensor:
    """With these dimensions on every rank. Collective."""
    if not isinstance(x, SplitTensor):
        return x
    return x.gathered(
        frozenset(factor.axis for p in positions for factor in x.spread.dims[p % x.dim()] if factor.axis is not None)
    )


def view(operator: Any, x: SplitTensor, shape: Sequence[int]) -> Tensor:
    known = -x.numel() // (math.prod(shape) or -1) if -1 in shape else 1
    return x.viewed([known if size == -1 else size for size in shape])


def permute(operator: Any, x: SplitTensor, order: Sequence[int]) -> Tensor:
    order = [position % x.dim() for position in order]
    dims = tuple(x.spread.dims[position] for position in order)
    return x.like(x.local.permute(order), replace(x.spread, dims=dims))


def transpose(operator: Any, x: SplitTensor, first: int = 0, second: int = 1) -> Tensor:
    """``transpose``, and ``t``."""
    order = list(range(x.dim()))
    if x.dim() > 1:
        a, b = first % x.dim(), second % x.dim()
        order[a], order[b] = b, a
    return permute(operator, x, order)


def pixel_unshuffle(operator: Any, x: SplitTensor, factor: int) -> Tensor:
    """Squares of pixels become channels."""
    *batch, channels, height, width = x.shape
    n = len(batch)
    squares = x.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    order = [*range(n + 1), n + 2, n + 4, n + 1, n + 3]
    return squares.permute(order).reshape(*batch, -1, height // factor, width // factor)


def pixel_shuffle(operator: Any, x: SplitTensor, factor: int) -> Tensor:
    """The reverse."""
    *batch, channels, height, width = x.shape
    n = len(batch)
    squares = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    order = [*range(n + 1), n + 3, n + 1, n + 4, n + 2]
    return squares.permute(order).reshape(*batch, -1, height * factor, width * factor)


def unsqueeze(operator: Any, x: SplitTensor, dim: int) -> Tensor:
    position = dim % (x.dim() + 1)
    dims = (*x.spread.dims[:position], (), *x.spread.dims[position:])
    return x.like(x.local.unsqueeze(position), replace(x.spread, dims=dims))


def squeeze(operator: Any, x: SplitTensor, dims: int | Sequence[int] | None = None) -> Tensor:
    chosen = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {position % x.dim() for position in chosen if x.shape[position] == 1}
    kept = [position for position in range(x.dim()) if position not in gone]
    local = uncut(x, *gone) if gone else x  # a dimension of one entry that is cut: most ranks have none
    assert isinstance(local, SplitTensor), "a cut dimension of size 1 lies with a longer one"
    spread = replace(local.spread, dims=tuple(local.spread.dims[position] for position in kept))
    return x.like(local.local.reshape(spread.local_shape(x.place)), spread, local.copied)


def expand(operator: Any, x: SplitTensor, shape: Sequence[int], **_: Any) -> Tensor:
    added = len(shape) - x.dim()
    dims: list[Dim] = []
    for position, size in enumerate(shape):
        own = x.spread.dims[position - added] if position >= added else ()
        dims.append(own if size == -1 or (position >= added and x.shape[position - added] == size) else whole(size))
    spread = Layout(tuple(dims), x.spread.grid)
    return x.like(x.local.expand(spread.local_shape(x.place)), spread)


def slice_(
    operator: Any, x: SplitTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    position = dim % x.dim()
    size = x.shape[position]
    first, last, _ = slice(start, end).indices(size)
    last = max(first, last)
    own = x.spread.dims[position]
    if is_cut(own) and (first, last, step) == (0, size, 1):
        return x.like(x.local.detach())
    if is_cut(own) and (len(own) > 1 or step != 1):
        return operator(uncut(x, position), dim, start, end, step)  # type: ignore[no-any-return]
    if is_cut(own):
        (factor,) = own
        bounds = tuple(min(max(bound, first), last) for bound in factor.bounds)
        here, there = x.spread.span(factor, x.place), x.spread.span(replace(factor, bounds=bounds), x.place)
        cut = Factor(last - first, factor.axis, tuple(bound - first for bound in bounds))
        local = x.local.narrow(position, min(max(there[0] - here[0], 0), here[1] - here[0]), there[1] - there[0])
        return x.like(local, x.spread.with_dim(position, (cut,)))
    local = ATEN.slice.Tensor(x.local, position, first, last, step)
    return x.like(local, x.spread.with_dim(position, whole(local.shape[position])))


def select(operator: Any, x: SplitTensor, dim: int, index: int) -> Tensor:
    position = dim % x.dim()
    rest = uncut(x, position)
    if not isinstance(rest, SplitTensor):
        return operator(rest, dim, index)  # type: ignore[no-any-return]
    dims = (*rest.spread.dims[:position], *rest.spread.dims[position + 1 :])
    return rest.like(rest.local.select(position, index), replace(rest.spread, dims=dims))


def parts(operator: Any, x: SplitTensor, sizes: int | Sequence[int], dim: int = 0) -> Any:
    """``split``, along a dimension that is not cut."""
    position = dim % x.dim()
    rest = uncut(x, position)
    if not isinstance(rest, SplitTensor):
        return operator(rest, sizes, dim)
    spread = rest.spread
    return [
        rest.like(piece, spread.with_dim(position, whole(piece.shape[position])))
        for piece in operator(rest.local, sizes, position)
    ]


def unbind(operator: Any, x: SplitTensor, dim: int = 0) -> list[Tensor]:
    return [select(ATEN.select.int, x, dim, number) for number in range(x.shape[dim])]


def repeat(operator: Any, x: SplitTensor, counts: Sequence[int]) -> Tensor:
    added = len(counts) - x.dim()
    rest = uncut(x, *(p for p in range(x.dim()) if counts[p + added] != 1))
    if not isinstance(rest, SplitTensor):
        return operator(rest, counts)  # type: ignore[no-any-return]
    dims = [
        rest.spread.dims[position - added]
        if position >= added and count == 1
        else whole(count * (x.shape[position - added] if position >= added else 1))
        for position, count in enumerate(counts)
    ]
    return rest.like(rest.local.repeat(*counts), replace(rest.spread, dims=tuple(dims)))


def along_one(operator: Any, x: SplitTensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
    """What mixes entries along one dimension and keeps the shape: softmax, cumsum."""
    rest = uncut(x, dim)
    if not isinstance(rest, SplitTensor):
        return operator(rest, dim, *args, **kwargs)  # type: ignore[no-any-return]
    return rest.like(operator(rest.local, dim, *args, **kwargs))


def index_select(operator: Any, x: SplitTensor, dim: int, index: Tensor) -> Tensor:
    position = dim % x.dim()
    rest = uncut(x, position)
    if not isinstance(rest, SplitTensor):
        return operator(rest, dim, index)  # type: ignore[no-any-return]
    local = operator(rest.local, position, index)
    return rest.like(local, rest.spread.with_dim(position, whole(local.shape[position])))


def new(operator: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor of another shape that takes only type and device: every rank makes all of it."""
    return operator(x.local, *args, **kwargs)  # type: ignore[no-any-return]
