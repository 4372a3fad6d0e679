"""Convolutions, pooling, padding and enlarging, along heights and widths that are cut: ranks exchange halos.

The result is cut where the middle of the window falls, so that a padded convolution of stride 1 keeps its cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arachnec.spmd.spatial.layout import Factor, Layout, has_empty, is_cut, whole
from arachnec.spmd.spatial.peers import Span
from arachnec.spmd.spatial.shape_rules import uncut
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor


@dataclass(frozen=True)
class Window:
    """How an operator goes along one dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation

    def results(self, size: int) -> int:
        return max(0, (size + 2 * self.padding - self.reach - 1) // self.stride + 1)

    def bounds(self, factor: Factor) -> tuple[int, ...]:
        """Where the results are cut."""
        count = self.results(factor.size)
        middle = self.reach // 2 - self.padding
        inner = (min(max(-(-(bound - middle) // self.stride), 0), count) for bound in factor.bounds[1:-1])
        return (0, *inner, count)

    def read(self, results: Span) -> Span:
        """What these results are made of; it may begin before the first entry and end behind the last."""
        first, end = results
        if first == end:
            return 0, 0
        return first * self.stride - self.padding, (end - 1) * self.stride - self.padding + self.reach + 1


def halved(x: SplitTensor, windows: dict[int, Window]) -> tuple[Tensor, Layout] | None:
    """What this rank reads for its part of the results, padded with zeros, and the layout of the results.

    ``windows`` are those of the dimensions. None where nothing is cut any more. Collective.
    """
    several = [p for p in windows if is_cut(x.spread.dims[p]) and len(x.spread.dims[p]) > 1]
    rest = uncut(x, *several)
    if not isinstance(rest, SplitTensor):
        return None
    wanted: dict[int, list[Span]] = {}
    dims = list(rest.spread.dims)
    for position, window in windows.items():
        dim = rest.spread.dims[position]
        if not is_cut(dim):
            dims[position] = whole(window.results(rest.shape[position]))
            continue
        (factor,) = dim
        assert factor.axis is not None
        bounds = window.bounds(factor)
        spans = list(pairwise(bounds))
        wanted[factor.axis] = [
            window.read(span) if span[0] < span[1] else (factor.bounds[place], factor.bounds[place])
            for place, span in enumerate(spans)
        ]
        dims[position] = (Factor(window.results(factor.size), factor.axis, bounds),)
    return rest.fetched(wanted), replace(rest.spread, dims=tuple(dims))


def convolution(
    operator: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    if not isinstance(x, SplitTensor) or isinstance(weight, SplitTensor) or isinstance(bias, SplitTensor):
        raise NotDivisible("the weights of a convolution are computed from what its ranks share")
    rest = uncut(x, 1)
    cut = [p for p in range(2, x.dim()) if isinstance(rest, SplitTensor) and is_cut(rest.spread.dims[p])]
    if transposed and cut:
        raise NotDivisible("it calls a transposed convolution along what its ranks share")
    windows = {p: Window(weight.shape[p], stride[p - 2], padding[p - 2], dilation[p - 2]) for p in range(2, x.dim())}
    read = halved(rest, windows) if isinstance(rest, SplitTensor) and not transposed else None
    if read is None:
        whole_x = rest.gathered() if isinstance(rest, SplitTensor) else rest
        return operator(whole_x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)  # type: ignore[no-any-return]
    local, spread = read
    spread = spread.with_dim(1, whole(weight.shape[0]))
    here = spread.local_shape(x.place)
    if 0 in here:
        return x.like(local.new_empty(here), spread)
    pads = [0 if is_cut(spread.dims[p]) else padding[p - 2] for p in windows]
    return x.like(operator(local, weight, bias, stride, pads, dilation, False, output_padding, groups), spread)


def average_pool(
    operator: Any,
    x: SplitTensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    *rest: Any,
) -> Tensor:
    if ceil_mode or any(padding) or any(value is not None and value is not True for value in rest):
        raise NotDivisible(f"it calls `{operator}` with padding, `ceil_mode` or a divisor of its own")
    count = x.dim() - (2 if operator.overloadpacket is torch.ops.aten.avg_pool2d else 3)
    sizes = {p: kernel[(p - count) % len(kernel)] for p in range(count, x.dim())}
    steps = {p: stride[(p - count) % len(stride)] if stride else sizes[p] for p in sizes}
    read = halved(x, {p: Window(sizes[p], steps[p], 0) for p in sizes})
    if read is None:
        return operator(x.gathered(), kernel, stride)  # type: ignore[no-any-return]
    local, spread = read
    here = spread.local_shape(x.place)
    return x.like(local.new_empty(here) if 0 in here else operator(local, kernel, stride), spread)


def pad(operator: Any, x: SplitTensor, padding: Sequence[int], value: float = 0.0) -> Tensor:
    """Constant padding: the ranks at the borders add it."""
    return padded(x, padding, lambda local, pads: F.pad(local, pads, "constant", value), needs_entries=0)


def replication_pad(operator: Any, x: SplitTensor, padding: Sequence[int]) -> Tensor:
    return padded(x, padding, lambda local, pads: F.pad(local, pads, "replicate"), needs_entries=1)


def reflection_pad(operator: Any, x: SplitTensor, padding: Sequence[int]) -> Tensor:
    return padded(x, padding, lambda local, pads: F.pad(local, pads, "reflect"), needs_entries=1 + max(padding))


def padded(x: SplitTensor, padding: Sequence[int], run: Any, needs_entries: int) -> Tensor:
    """``run`` pads what a rank holds; at a border it needs so many entries of the border's rank."""
    pairs = {x.dim() - 1 - i: (padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)}
    touched = [p for p, pair in pairs.items() if any(pair) and is_cut(x.spread.dims[p])]
    rest = uncut(x, *(p for p in touched if not _can_pad(x, p, pairs[p], needs_entries)))
    if not isinstance(rest, SplitTensor):
        return run(rest, list(padding))  # type: ignore[no-any-return]
    dims, here = list(rest.spread.dims), {}
    for position, (low, high) in pairs.items():
        dim = rest.spread.dims[position]
        if not is_cut(dim):
            dims[position], here[position] = whole(rest.shape[position] + low + high), (low, high)
            continue
        if not (low or high):
            continue
        (factor,) = dim
        assert factor.axis is not None
        place, last = rest.spread.places(x.place)[factor.axis], len(factor.bounds) - 2
        here[position] = (low if place == 0 else 0, high if place == last else 0)
        size = factor.size + low + high
        bounds = (0, *(bound + low for bound in factor.bounds[1:-1]), size)
        dims[position] = (Factor(size, factor.axis, bounds),)
    spread = replace(rest.spread, dims=tuple(dims))
    pads = [width for i in range(len(padding) // 2) for width in here.get(x.dim() - 1 - i, (0, 0))]
    shape = spread.local_shape(x.place)
    local = rest.local.new_empty(shape) if 0 in shape else run(rest.local, pads) if any(pads) else rest.local.clone()
    return rest.like(local, spread)


def _can_pad(x: SplitTensor, position: int, pair: tuple[int, int], needs_entries: int) -> bool:
    dim = x.spread.dims[position]
    if len(dim) > 1 or min(pair) < 0 or (needs_entries and has_empty(dim[0])):
        return False
    bounds = dim[0].bounds
    return min(bounds[1] - bounds[0], bounds[-1] - bounds[-2]) >= needs_entries


def enlarge(operator: Any, x: SplitTensor, size: Sequence[int] | None, *scales: Any) -> Tensor:
    """Nearest neighbours, by whole numbers."""
    count = len(size) if size else len(scales[0])
    first = x.dim() - count
    target = [int(s) for s in size] if size else [int(x.shape[first + i] * scales[0][i]) for i in range(count)]
    times = [target[i] // x.shape[first + i] for i in range(count)]
    exact = all(target[i] == times[i] * x.shape[first + i] for i in range(count))
    several = [first + i for i in range(count) if len(x.spread.dims[first + i]) > 1]
    rest = uncut(x, *(range(first, x.dim()) if not exact else several))
    if not isinstance(rest, SplitTensor):
        return operator(rest, size, *scales)  # type: ignore[no-any-return]
    dims = list(rest.spread.dims)
    for i in range(count):
        dim = dims[first + i]
        if is_cut(dim):
            (factor,) = dim
            dims[first + i] = (Factor(target[i], factor.axis, tuple(bound * times[i] for bound in factor.bounds)),)
        else:
            dims[first + i] = whole(target[i])
    spread = replace(rest.spread, dims=tuple(dims))
    here = spread.local_shape(x.place)
    if 0 in here:
        return rest.like(rest.local.new_empty(here), spread)
    mode = "nearest-exact" if "exact" in operator.name() else "nearest"
    return rest.like(F.interpolate(rest.local, here[first:], mode=mode), spread)
