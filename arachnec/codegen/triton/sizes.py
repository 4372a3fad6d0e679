"""Sizes at run time: the symbols of a graph solved from the inputs at hand, and every number that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Size, Unsupported, tidy
from arachnec.codegen.triton.operations import is_fixed, shape_of, size_of


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
