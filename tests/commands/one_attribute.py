"""Every way in which one attribute of a module can be changed to a hostile value of its own type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from arachnec.ir.nodes import Cascade, Clip, Cluster, Instruction, Module, Program, Reduce, Stage, Step
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value

Attributed: TypeAlias = Module | Cluster | Clip | Stage | Cascade | Reduce | Step | Program | Instruction


@dataclass(frozen=True)
class Change:
    """``place`` names the nodes on the way down, each a field and its number there; ``name`` is the attribute."""

    place: tuple[tuple[str, int | None], ...]
    name: str
    value: Value

    def __str__(self) -> str:
        way = ".".join(field if number is None else f"{field}[{number}]" for field, number in self.place)
        return f"{way or 'module'}.{self.name} = {str(self.value)[:60]}"

    def on(self, module: Module) -> Module:
        changed = _changed(module, self.place, self.name, self.value)
        assert isinstance(changed, Module)
        return changed


def changes(module: Module) -> Iterator[Change]:
    """All of them."""
    for place, node in _nodes(module):
        for name, value in node.attrs.pairs:
            for other in hostile(value):
                yield Change(place, name, other)


def hostile(value: Value) -> Iterator[Value]:
    """Other values of one type: none of it, less than none, a bit more, far too much, a name that is not there."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, value - 1, 0, -1, 10**9, 10**30} - {value}
    elif isinstance(value, float):
        yield from (0.0, -value, 1e300)
    elif isinstance(value, Quantity):
        yield from (replace(value, value=number) for number in (0.0, -1.0, 1e-300, 1e300))
    elif isinstance(value, Formula):
        yield Quantity(0.0, value.unit)
        for factor in (-1.0, 1e300):
            yield Formula(tuple(Term(term.coefficient * factor, term.powers) for term in value.terms), value.unit)
        yield Formula((Term(1.0, (("S", 400),)),), value.unit)
    elif isinstance(value, str):
        yield from ("", "nonsense")
    elif isinstance(value, Symbol):
        yield Symbol("nonsense")
    elif isinstance(value, tuple) and value:
        yield from ((), value[:-1], value + value[-1:], tuple(reversed(value)))
        for number in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from ((*value[:number], other, *value[number + 1 :]) for other in hostile(value[number]))


def _nodes(module: Module) -> Iterator[tuple[tuple[tuple[str, int | None], ...], Attributed]]:
    yield (), module
    if module.cluster is not None:
        yield (("cluster", None),), module.cluster
    for field in ("clips", "stages", "cascades", "reductions", "steps", "programs"):
        for number, node in enumerate(getattr(module, field)):
            yield ((field, number),), node
            for line, step in enumerate(node.instructions) if isinstance(node, Program) else ():
                yield ((field, number), ("instructions", line)), step


def _changed(node: Attributed, place: tuple[tuple[str, int | None], ...], name: str, value: Value) -> Attributed:
    if not place:
        attrs = Attributes(tuple((key, value if key == name else old) for key, old in node.attrs.pairs))
        return replace(node, attrs=attrs)
    (field, number), *rest = place
    own = getattr(node, field)
    if number is None:
        return replace(node, **{field: _changed(own, tuple(rest), name, value)})
    inner = _changed(own[number], tuple(rest), name, value)
    return replace(node, **{field: (*own[:number], inner, *own[number + 1 :])})
