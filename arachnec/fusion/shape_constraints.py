"""Shape constraints. In: a graph with symbolic sizes. Out: which sizes are equal, divisible, likely, at every shape.

After Zhu et al., "DISC" (arXiv 2103.05288): equal dimensions and equal element counts follow from what the operations
mean. Operations can then share a loop, and a kernel can be vectorised, for all shapes at once. Sizes here are
expressions; constraints say when two different expressions are equal.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sympy

from arachnec.ir.nodes import Graph, GraphOp, Module

ELEMENTWISE = frozenset(
    f"aten.{name}.{overload}"
    for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "atan2")
    for overload in ("Tensor", "default", "Tensor_Tensor")
) | {"aten.where.self"}
RESHAPES = frozenset(
    ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
     "aten.unflatten.int", "aten.squeeze.dim", "aten.unsqueeze.default", "aten.squeeze.default")
)  # fmt: skip
OWN = ("B", "S", "T")  # the IR's symbols: others are expressed in them, never the other way round


@dataclass(frozen=True)
class Range:
    """Likely values of a size: smallest, usual, largest. Estimates, not bounds."""

    low: int
    usual: int
    high: int


LIKELY: Mapping[str, Range] = {"B": Range(1, 1, 16), "S": Range(1024, 32760, 131072), "T": Range(64, 512, 1024)}
ANY = Range(1, 1024, 131072)


@dataclass(frozen=True)
class ShapeConstraints:
    """The shapes of a graph's values in as few symbols as its operations allow.

    ``shapes`` are in terms of symbols that are free; ``equal`` says what each other one is. ``multiples[s] = n`` where
    n is known to divide s.
    """

    shapes: Mapping[str, tuple[sympy.Expr, ...]]
    equal: Mapping[sympy.Symbol, sympy.Expr]
    multiples: Mapping[sympy.Symbol, int]
    likely: Mapping[str, Range] = field(default_factory=lambda: dict(LIKELY))

    def size(self, dim: int | str) -> sympy.Expr:
        """A dimension as it stands in the text."""
        return sympy.expand(parse_size(dim).subs(self.equal))

    def count(self, name: str) -> sympy.Expr:
        """Elements of a value."""
        return sympy.expand(sympy.prod(self.shapes[name]))

    def divisor(self, size: sympy.Expr) -> int:
        """The largest number known to divide ``size`` at every shape."""
        scaled = sympy.expand(size.subs({s: n * s for s, n in self.multiples.items()}))
        if scaled.has(sympy.floor, sympy.Max, sympy.Min, sympy.Mod):
            return 1
        parts = [term.as_coeff_Mul()[0] for term in sympy.Add.make_args(scaled)]
        return math.gcd(*(int(part) for part in parts)) if all(part.is_Integer for part in parts) else 1

    def at(self, size: sympy.Expr, which: str = "usual") -> float:
        """``size`` where every symbol is at the ``low``, ``usual`` or ``high`` end of what is likely."""
        values = {s: getattr(self.likely.get(s.name, ANY), which) for s in size.free_symbols}
        return float(size.subs(values))


def constraints_of(graph: Graph, likely: Mapping[str, Range] = LIKELY) -> ShapeConstraints:
    """Every constraint that the types and the operations of ``graph`` give."""
    shapes = {item.name: _sizes(item.type.dims) for item in graph.inputs}
    shapes |= {op.name: _sizes(op.type.dims) for op in graph.ops if op.type is not None}
    equal: dict[sympy.Symbol, sympy.Expr] = {}
    multiples: dict[sympy.Symbol, int] = {}
    for op in graph.ops:
        for left, right in _equations(op, shapes):
            _learn(sympy.expand(left.subs(equal)), sympy.expand(right.subs(equal)), equal, multiples)
    known = {name: tuple(sympy.expand(size.subs(equal)) for size in dims) for name, dims in shapes.items()}
    return ShapeConstraints(known, equal, multiples, dict(likely))


def likely_sizes(module: Module) -> Mapping[str, Range]:
    """Ranges of S and T from the module's clips; those of video training in general where it has none."""
    if not module.clips:
        return LIKELY
    tokens = sorted(clip.tokens for clip in module.clips)
    text = sorted(max(clip.text, 1) for clip in module.clips)
    batches = sorted(cascade.batch for cascade in module.cascades) or [1]
    return {name: _range(values) for name, values in (("B", batches), ("S", tokens), ("T", text))}


def _range(values: list[int]) -> Range:
    return Range(values[0], values[len(values) // 2], values[-1])


def _sizes(dims: tuple[int | str, ...]) -> tuple[sympy.Expr, ...]:
    return tuple(map(parse_size, dims))


def _equations(op: GraphOp, shapes: Mapping[str, tuple[sympy.Expr, ...]]) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Pairs of sizes that this operation requires to be equal."""
    known = [shapes[name] for name in op.operands if name in shapes]
    if op.target in ELEMENTWISE:
        for dims in known[1:]:
            for a, b in zip(reversed(known[0]), reversed(dims), strict=False):
                if a != 1 and b != 1:  # a size that export left symbolic is not 1
                    yield a, b
    elif op.target in RESHAPES and known and op.name in shapes:
        yield sympy.prod(known[0]), sympy.prod(shapes[op.name])
    elif op.target == "aten.linear.default" and len(known) > 1 and known[0] and known[1]:
        yield known[0][-1], known[1][-1]


def _learn(
    left: sympy.Expr, right: sympy.Expr, equal: dict[sympy.Symbol, sympy.Expr], multiples: dict[sympy.Symbol, int]
) -> None:
    """Write down what ``left == right`` says of one symbol, after common factors are gone."""
    if sympy.expand(left - right) == 0:
        return
    over, under = sympy.fraction(sympy.cancel(left / right))
    for one, other in ((over, under), (under, over)):
        floors = list(other.atoms(sympy.floor))
        if one.is_Symbol and len(floors) == 1:  # S = n * floor(S / n)
            step = sympy.simplify(other / floors[0])
            if step.is_Integer and sympy.expand(floors[0].args[0] * step - one) == 0:
                multiples[one] = math.lcm(multiples.get(one, 1), int(step))
                return
    candidates = [s for s in (over - under).free_symbols if sympy.degree(over - under, s) == 1]
    for symbol in sorted(candidates, key=lambda s: (s.name in OWN, OWN.index(s.name) if s.name in OWN else 0, s.name)):
        solutions = sympy.solve(over - under, symbol)
        if len(solutions) == 1 and symbol not in solutions[0].free_symbols and solutions[0].is_positive is not False:
            equal.update(
                {s: sympy.expand(e.subs(symbol, solutions[0])) for s, e in equal.items()} | {symbol: solutions[0]}
            )
            numerator, denominator = sympy.fraction(sympy.together(solutions[0]))
            if denominator.is_Integer and denominator != 1 and numerator.is_Symbol:
                multiples[numerator] = math.lcm(multiples.get(numerator, 1), int(denominator))
            return


def parse_size(dim: int | str) -> sympy.Expr:
    """``2*S``, ``(S + 1)//2``, ``Max(1, S)``, ``B*S^2`` as an expression; else a symbol of its own."""
    if isinstance(dim, int):
        return sympy.Integer(dim)
    try:
        return _expression(ast.parse(dim.replace("^", "**"), mode="eval").body)
    except (SyntaxError, KeyError, TypeError):
        return sympy.Symbol(dim, integer=True, positive=True)


def _expression(node: ast.expr) -> sympy.Expr:
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id, integer=True, positive=True)
    if isinstance(node, ast.Constant):
        return sympy.Integer(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_expression(node.operand)
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_expression(node.left), _expression(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _CALLS[node.func.id](*map(_expression, node.args))
    raise TypeError(ast.dump(node))


_BINARY = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Mod: sympy.Mod,
    ast.Pow: lambda a, b: a**b,
}
_CALLS = {
    "Max": sympy.Max, "Min": sympy.Min, "Mod": sympy.Mod, "PythonMod": sympy.Mod, "floor": sympy.floor,
    "FloorDiv": lambda a, b: sympy.floor(a / b), "CleanDiv": lambda a, b: a / b, "ceiling": sympy.ceiling,
}  # fmt: skip
