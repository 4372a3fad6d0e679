"""Loads, chooses and launches generated kernels: a few variants for all shapes, picked by a rule made at compile time.

After DISC (arXiv 2103.05288): no size is a constant of a kernel but the width of a row that no clip changes. A variant
says whether rows are dense (loads are vectorised) and, where only a run knows how wide a row is, whether it is held
whole (one pass) or gone over in blocks (two passes).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Unsupported
from arachnec.codegen.triton.operations import reduced_dims, shape_of, value_of
from arachnec.codegen.triton.rows import Target
from arachnec.codegen.triton.sizes import Sizes
from arachnec.codegen.triton.text import Source, tiles_for, write_source
from arachnec.kernels.rowwise.row_launch import on_device_of

PROGRAMS = 132 * 8


def is_dense(values: Sequence[Tensor]) -> bool:
    """Read from strides and addresses at run time, never from the number of rows."""
    return all(
        (x.stride(-1) == 1 or x.shape[-1] == 1)
        and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
        and x.data_ptr() % 16 == 0
        for x in values
        if x.ndim
    )


class Launcher:
    """Runs the kernel of ``targets``, which have their rows in common. Raises ``Unsupported``, and ``Cut`` at joins."""

    def __init__(self, targets: Sequence[Target], ends: frozenset[fx.Node], sizes: Sizes, name: str) -> None:
        sources = {widest: write_source(targets, ends, tiling) for widest, tiling in tiles_for(targets).items()}
        self.sources = {widest: _titled(source, name) for widest, source in sources.items()}
        source = next(iter(self.sources.values()))
        self.reads, self.stores, self.sums, self.groups = source.reads, source.stores, source.sums, source.groups
        self._numbers = {w: [sizes.position(size) for size in s.numbers] for w, s in self.sources.items()}
        self._rows = [sizes.position(size) for size in source.rows]
        lane = targets[0].lane
        self._width = None if lane is None else sizes.position(targets[0].sizes[lane])
        self.kernels: dict[int, Any] = {}

    def chosen(self, numbers: Sequence[int]) -> int:
        """The guard: the first variant that takes rows as wide as these."""
        if self._width is None:
            return 0
        return next(widest for widest in self.sources if not widest or numbers[self._width] <= widest)

    def kernel(self, widest: int) -> Any:
        """Loaded when it is first called."""
        if widest not in self.kernels:
            self.kernels[widest] = load_kernel(self.sources[widest])
        return self.kernels[widest]

    def __call__(self, read: Sequence[Tensor], stored: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Writes into ``stored``; gives each sum over its rows, [rows kept, width of a row], in a fixed order."""
        widest = self.chosen(numbers)
        source = self.sources[widest]
        counts = [numbers[position] for position in self._rows]
        groups, rows_of_sum = _product(counts[: self.groups]), _product(counts[self.groups :])
        run = max(1, -(-rows_of_sum // max(1, PROGRAMS // max(groups, 1))))
        programs = groups * -(-rows_of_sum // run)
        tiling, like = source.tiling, (*read, *stored)[0]
        width = source.space.outer_size * source.space.inner_size
        double = any(x.dtype == torch.float64 for x in read)
        total = torch.float64 if double else torch.float32
        shape = (programs, len(self.sums), width)
        partials = [torch.empty(shape, dtype=total, device=like.device)] if self.sums else []
        if programs:
            tensors = [*read, *stored]
            grid = (programs, -(-width // tiling.q) if tiling.spread else 1)
            strides = [stride for x in tensors for stride in x.stride()]
            with on_device_of(like):
                self.kernel(widest)[grid](
                    *tensors, *partials, *strides, *(numbers[position] for position in self._numbers[widest]),
                    groups * rows_of_sum, rows_of_sum, run,
                    P=tiling.p, Q=tiling.q, DENSE=is_dense(tensors), num_warps=tiling.warps,
                )  # fmt: skip
        runs = programs // max(groups, 1)
        totals = []
        for number, target in enumerate(self.sums):
            part = partials[0][:, number, : target.width]  # one of equal lanes, where a row has one value
            totals.append(part.reshape(groups, runs, target.width).sum(1) if target.kept else part.sum(0))
        return totals


class ColumnSum:
    """What the pieces of one sum over rows add up to, as the node's value: the second stage."""

    def __init__(self, pieces: Sequence[Target], sizes: Sizes) -> None:
        node = pieces[0].sum
        assert node is not None
        target = pieces[0]
        operand, gone = shape_of(value_of(target.node)), set(reduced_dims(node))
        dims = [dim for dim in range(len(operand)) if dim not in gone]
        self.node, self.dtype = node, value_of(node).dtype
        self._shape = [sizes.position(size) for size in shape_of(value_of(node))]
        self._lanes = [(dim, int(operand[dim])) for dim in target.lanes]
        self._gone = [k for k, (dim, _) in enumerate(self._lanes) if dim in gone]
        kept = {target.steps[k][0] for k in target.kept}
        self._kept = [(dim, sizes.position(operand[dim])) for dim in sorted(kept)]
        laid = [dim for dim, _ in self._kept] + [dim for dim in target.lanes if dim not in gone]
        if [dim for dim in dims if operand[dim] != 1] != [dim for dim in sorted(laid) if operand[dim] != 1]:
            raise Unsupported(f"`{node.name}` adds up rows in a way that is not known")
        self._order = sorted(range(len(laid)), key=laid.__getitem__)
        self._pieces = [self._piece(piece, sizes) for piece in pieces]

    def _piece(self, piece: Target, sizes: Sizes) -> list[tuple[int, int, int, int]]:
        """For every kept coordinate: its dimension among those kept, elements of it, where it begins, how many."""
        dims = [dim for dim, _ in self._kept]
        return [
            (dims.index(piece.steps[k][0]), sizes.position(piece.steps[k][1]), sizes.position(piece.starts[k]),
             sizes.position(piece.sizes[k]))
            for k in piece.kept
        ]  # fmt: skip

    def __call__(self, parts: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
        lanes = [size for _, size in self._lanes]
        whole = [numbers[position] for _, position in self._kept]
        if len(parts) == 1:
            total = parts[0].view([*whole, *lanes])
        else:
            total = parts[0].new_zeros([*whole, *lanes])
            for part, coordinates in zip(parts, self._pieces, strict=True):
                here = total
                for dim, step, start, size in coordinates:
                    if numbers[step] != 1:
                        raise RuntimeError("a piece of rows that are counted by more than one coordinate")
                    here = here.narrow(dim, numbers[start], numbers[size])
                here += part.view(here.shape)
        if self._gone:
            total = total.sum([len(whole) + k for k in self._gone])
        return total.permute(self._order).reshape([numbers[p] for p in self._shape]).to(self.dtype)


def _product(sizes: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def _titled(source: Source, name: str) -> Source:
    return source.named(f"{name}_{hashlib.sha256(source.text.encode()).hexdigest()[:12]}")


@functools.cache
def _loaded(name: str, text: str) -> Any:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arachnec" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".py", delete=False, encoding="utf-8") as draft:
        draft.write(text)
    Path(draft.name).replace(path)
    spec = importlib.util.spec_from_file_location(f"arachnec_generated_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_kernel(source: Source) -> Any:
    """The kernel of a text, from a file that anyone can read: equal texts are one kernel."""
    return _loaded(source.name, source.text)
