"""From what was counted to the IR's formulas."""

from __future__ import annotations

import math

import sympy

from arachnec.ir.values import Formula, Term
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.memory import fit_polynomial

GIB = 2**30
TERA = 10**12


def polynomial(expression: sympy.Expr, unit: str, scale: int) -> Formula:
    """A sympy polynomial in B, S and T, divided by ``scale``, as the IR's formula; highest powers first."""
    expression = sympy.expand(expression)
    if not expression.is_polynomial(B, S, T):  # sizes that were divided and rounded: what it comes to at even ones
        points = [{B: b, S: s, T: t} for b in (1, 2) for s in (4096, 5120, 7168) for t in (64, 224)]
        expression = fit_polynomial([float(expression.subs(point)) for point in points], points)
    poly = sympy.Poly(expression, B, S, T)
    terms = []
    for powers, coefficient in sorted(poly.terms(), key=lambda term: (-sum(term[0][1:]), [-p for p in term[0][1:]])):
        value = float(coefficient) / scale
        if value and math.isfinite(value):
            named = tuple((name, power) for name, power in zip("BST", powers, strict=True) if power)
            terms.append(Term(value, named))
    return Formula(tuple(terms), unit)
