"""Dimensions. In: one size in several recordings. Out: the expression in clips B, tokens S and text T that it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import sympy

B, S, T = (sympy.Symbol(name, integer=True, positive=True) for name in "BST")

# Simplest first. A joint mask is S + T long, a flattened batch B*S or B*(S + T).
CANDIDATES: tuple[tuple[sympy.Expr, ...], ...] = (
    (S,), (T,), (B,), (S, sympy.Integer(1)), (T, sympy.Integer(1)), (S, T), (S, T, sympy.Integer(1)),
    (B * S,), (B * T,), (B * S, B * T), (B * S, B), (B * T, B), (B * S, B * T, B),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What one recording was made with. ``clip`` names the pixel shape: equal clips have equal S."""

    clip: tuple[int, ...]
    batch: int
    text: int
    tokens: int = 0

    @property
    def values(self) -> dict[sympy.Symbol, int]:
        return {B: self.batch, S: self.tokens, T: self.text}


def fit_dimension(values: Sequence[int], sizes: Sequence[Sizes]) -> sympy.Expr | None:
    """The simplest integer combination that gives ``values[k]`` at ``sizes[k]`` for every k, or None.

    A symbol that no recording moves explains nothing: a caption of constant length stays a number.
    """
    if len(set(values)) == 1:
        return sympy.Integer(values[0])
    constant = {symbol for symbol in (B, S, T) if len({size.values[symbol] for size in sizes}) == 1}
    for basis in CANDIDATES:
        if any(term.free_symbols & constant for term in basis):
            continue
        matrix = numpy.array([[int(term.subs(size.values)) for term in basis] for size in sizes], dtype=float)
        solution, _, rank, _ = numpy.linalg.lstsq(matrix, numpy.array(values, dtype=float), rcond=None)
        coefficients = [round(float(x)) for x in solution]
        if rank < len(basis) or not all(coefficients):
            continue
        rows = (sum(c * round(x) for c, x in zip(coefficients, row, strict=True)) for row in matrix)
        if all(row == value for row, value in zip(rows, values, strict=True)):
            return sum((c * term for c, term in zip(coefficients, basis, strict=True)), sympy.Integer(0))
    return None


def moves_with(what: str, values: Sequence[int], sizes: Sequence[Sizes]) -> bool:
    """Whether two recordings that differ in nothing but ``what``, clip, batch or text, differ in this dimension."""
    others = [name for name in ("clip", "batch", "text") if name != what]
    return any(
        a != b and getattr(x, what) != getattr(y, what) and all(getattr(x, n) == getattr(y, n) for n in others)
        for (a, x), (b, y) in itertools.combinations(zip(values, sizes, strict=True), 2)
    )


def counts_captions(sizes: Sequence[Sizes]) -> bool:
    """Whether captions are among the tokens S."""
    return moves_with("text", [size.tokens for size in sizes], sizes)
