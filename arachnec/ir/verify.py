"""The verifier. In: a module. Out: every mistake in it.

Attributes are held to ``arachnec.ir.tables``; the structure to ``name_rules`` and ``plan_rules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TypeAlias

from arachnec.ir import kinds, tables
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span, UserError, close_to, shown
from arachnec.ir.kinds import out_of_bounds
from arachnec.ir.limits import MOST_MISTAKES
from arachnec.ir.names import NAME_RULES, index_of, label
from arachnec.ir.nodes import (
    Cascade,
    Clip,
    Cluster,
    Fused,
    Instruction,
    Level,
    Module,
    Program,
    Reduce,
    Stage,
    Step,
)
from arachnec.ir.plan_rules import PLAN_RULES
from arachnec.ir.values import Formula, Quantity, Value

Attributed: TypeAlias = Module | Cluster | Clip | Stage | Fused | Cascade | Reduce | Step | Program | Instruction
Tables: TypeAlias = tuple[Mapping[str, tables.Row], tuple[tables.Row, ...]]


def verify(module: Module) -> tuple[Diagnostic, ...]:
    """Every mistake up to ``MOST_MISTAKES``, in the order of the text; empty where the module is right.

    Names are checked only when every attribute is right, and plans only when every name is: one mistake gives one
    message.
    """
    if problems := tuple(islice(_attributes(module), MOST_MISTAKES)):
        return problems
    index = index_of(module)
    if problems := tuple(islice((problem for rule in NAME_RULES for problem in rule(index)), MOST_MISTAKES)):
        return problems
    return tuple(islice((problem for rule in PLAN_RULES for problem in rule(index)), MOST_MISTAKES))


def check_module(module: Module) -> None:
    """Raises UserError with all that ``verify`` finds."""
    if problems := verify(module):
        raise UserError(*problems)


def _attributes(module: Module) -> Iterator[Diagnostic]:
    per_kind = {kind: _split(table, module.level) for kind, table in _TABLES.items()}
    per_op = {op: _split(table, module.level) for op, table in tables.INSTRUCTION.items()}
    yield from _node(module, per_kind[Module], module.level)
    if module.cluster:
        yield from _node(module.cluster, per_kind[Cluster], module.level)
    nodes: tuple[tuple[Attributed, ...], ...] = (
        module.clips,
        module.stages,
        tuple(region for graph in module.graphs for region in graph.fused),
        module.cascades,
        module.reductions,
        module.steps,
    )
    for group in nodes:
        for node in group:
            yield from _node(node, per_kind[type(node)], module.level)
    for program in module.programs:
        yield from _node(program, per_kind[Program], module.level)
        for item in program.instructions:
            yield from _node(item, per_op[item.op], module.level)


_TABLES: dict[type, Mapping[str, tables.Row]] = {
    Module: tables.MODULE,
    Cluster: tables.CLUSTER,
    Clip: tables.CLIP,
    Stage: tables.STAGE,
    Fused: tables.FUSED,
    Cascade: tables.CASCADE,
    Reduce: tables.REDUCE,
    Step: tables.STEP,
    Program: tables.PROGRAM,
}


def _split(table: Mapping[str, tables.Row], level: Level) -> Tables:
    return table, tuple(row for row in table.values() if row.required and row.since <= level)


def _node(node: Attributed, rows: Tables, level: Level) -> Iterator[Diagnostic]:
    table, required = rows
    names = set()
    for name, value in node.attrs.pairs:
        names.add(name)
        row = table.get(name)
        if row is None:
            close = _close(name, table, level)
            names.update(close)  # a misspelt attribute is not reported as missing too
            yield _unknown(node, name, close, table, level)
        elif row.since > level:
            yield Mistake(
                _place(node, name),
                f"{label(node)} cannot have `{name}` yet: the module is {level.word}",
                label=f"only from level {row.since.word} on",
                help=f'remove it, or say `level = "{row.since.word}"`',
            )
        elif not kinds.test(row.kind)(value):
            yield _mismatch(node, row, value)
        elif type(value) is Formula and not isinstance(node, Fused):  # a graph has symbols of its own
            yield from _variables(node, name, value)
        if row is not None and kinds.test(row.kind)(value) and (wrong := out_of_bounds(row.kind)(value)):
            found, expected = wrong
            yield Mistake(
                _place(node, name),
                f"`{name}` of {label(node)} has {found}",
                label=f"expected {expected}",
                help=f"`{name}`: {row.meaning}",
            )
    for row in required:
        if row.name not in names:
            yield Mistake(
                node.span,
                f"{label(node)} lacks the attribute `{row.name}`",
                label=f"a {level.word} module needs it",
                help=f"`{row.name}` is {kinds.name(row.kind)}: {row.meaning}",
            )


def _close(name: str, table: Mapping[str, tables.Row], level: Level) -> list[str]:
    return close_to(name, [row.name for row in table.values() if row.since <= level])


def _unknown(
    node: Attributed, name: str, close: list[str], table: Mapping[str, tables.Row], level: Level
) -> Diagnostic:
    known = [row.name for row in table.values() if row.since <= level]
    listed = f"its attributes are {', '.join(known)}" if known else "it has no attributes"
    remedy = f"did you mean `{close[0]}`?" if close else str(shown(listed))
    return Mistake(
        _place(node, name), f"{label(node)} has no attribute `{name}`", label="no such attribute", help=remedy
    )


def _mismatch(node: Attributed, row: tables.Row, value: Value) -> Diagnostic:
    unit = kinds.unit_of(row.kind)
    place = _place(node, row.name)
    if unit is not None and isinstance(value, Quantity | Formula) and value.unit != unit:
        written = kinds.in_unit(value, unit) if isinstance(value, Quantity) else ""
        remedy = f"write `{row.name} = {written}`" if written else f"`{row.name}`: {row.meaning}"
        return Mistake(
            place,
            f"`{row.name}` of {label(node)} is in {value.unit}, not in {unit}",
            label=f"expected {unit}",
            help=remedy,
        )
    return Mistake(
        place,
        f"`{row.name}` of {label(node)} is {kinds.describe(value)}",
        label=f"expected {kinds.name(row.kind)}",
        help=f"`{row.name}`: {row.meaning}",
    )


def _variables(node: Attributed, name: str, value: Formula) -> Iterator[Diagnostic]:
    for term in value.terms:
        for variable, _ in term.powers:
            if variable not in kinds.VARIABLES:
                yield Mistake(
                    _place(node, name),
                    f"the formula `{name}` of {label(node)} speaks of `{variable}`",
                    label="no such variable",
                    help="variables are B (clips in the micro-batch), S (tokens of a clip), T (text tokens of a clip)",
                )
                return


def _place(node: Attributed, name: str) -> Span | None:
    return node.attrs.span(name) or node.span
