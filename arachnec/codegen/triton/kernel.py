"""Loads, chooses and launches generated kernels: a few variants for all shapes, picked by a rule made at compile time.
Sizes are solved from the inputs at hand.

After DISC (arXiv 2103.05288): no size is a constant of a kernel but the width of a row that no clip changes. A variant
says whether rows are dense (loads are vectorised) and, where only a run knows how wide a row is, whether it is held
whole (one pass) or gone over in blocks (two passes).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Size, Unsupported, tidy
from arachnec.codegen.triton.operations import is_fixed, reduced_dims, shape_of, size_of, value_of
from arachnec.codegen.triton.rows import Target
from arachnec.codegen.triton.text import Source, tiles_for, write_source
from arachnec.kernels.rowwise.row_launch import on_device_of


class Sizes:
    """Registers numbers made of sizes, each by its position; ``of`` gives them all for one call's inputs."""

    def __init__(self, placeholders: Sequence[fx.Node]) -> None:
        self._observed: list[tuple[int, int | None]] = []
        self._solved: list[tuple[sympy.Symbol, int, Callable[..., Any] | None]] = []
        self._wanted: dict[Size, int] = {}
        self._evaluate: Callable[..., Sequence[int]] | None = None
        self._solve(_seen(placeholders))

    def _solve(self, seen: list[tuple[int, int | None, Size]]) -> None:
        """Dimensions that are symbols first; then those in which one symbol is left, which they are linear in."""
        known: list[sympy.Symbol] = []
        front = sorted(seen, key=lambda candidate: (not candidate[2].is_Symbol, str(candidate[2])))
        while True:
            ready = [(i, dim, e, e.free_symbols - set(known)) for i, dim, e in front]
            one = next(((i, dim, e, next(iter(new))) for i, dim, e, new in ready if len(new) == 1), None)
            if one is None:
                break
            position, dim, expression, symbol = one
            front.remove((position, dim, expression))
            form = sympy.Poly(expression, symbol) if expression.is_polynomial(symbol) else None
            if form is None or form.degree() != 1:
                continue
            factor, rest = form.all_coeffs()
            solve = None
            if expression != symbol:
                solve = sympy.lambdify([*known], [factor, rest], "math")
            self._observed.append((position, dim))
            self._solved.append((symbol, len(known), solve))
            known.append(symbol)
        unsolved = {e: (i, dim) for i, dim, e in front if not e.free_symbols <= set(known)}
        self._whole = {expression: sympy.Dummy() for expression in unsolved}  # sizes whose parts nothing tells apart
        for expression, symbol in self._whole.items():
            self._observed.append(unsolved[expression])
            self._solved.append((symbol, len(known), None))
        self.symbols = [*known, *self._whole.values()]

    def position(self, size: Size) -> int:
        size = self._whole.get(size, tidy(size))
        if not is_fixed(size) and not size.free_symbols <= set(self.symbols):
            raise Unsupported(f"no input has the size {size}")
        if not is_fixed(size) and not size.is_polynomial(*self.symbols):
            raise Unsupported(f"a size of {size}")
        self._evaluate = None
        return self._wanted.setdefault(size, len(self._wanted))

    def of(self, values: Sequence[Any]) -> list[int]:
        sizes: list[int] = []
        for (position, dim), (_, count, solve) in zip(self._observed, self._solved, strict=True):
            value = values[position]
            size = int(value if dim is None else value.shape[dim])
            if solve is not None:
                factor, rest = solve(*sizes[:count])
                size = (size - int(rest)) // int(factor)
            sizes.append(size)
        if self._evaluate is None:
            self._evaluate = sympy.lambdify(self.symbols, list(self._wanted), "math")
        return [int(number) for number in self._evaluate(*sizes)]


def _seen(placeholders: Sequence[fx.Node]) -> list[tuple[int, int | None, Size]]:
    sizes: list[tuple[int, int | None, Size]] = []
    for position, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            sizes += [(position, dim, size) for dim, size in enumerate(shape_of(value)) if not is_fixed(size)]
        elif isinstance(value, torch.SymInt) and not is_fixed(size_of(value)):
            sizes.append((position, None, size_of(value)))
    return sizes


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
        groups, rows_of_sum = math.prod(counts[: self.groups]), math.prod(counts[self.groups :])
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
