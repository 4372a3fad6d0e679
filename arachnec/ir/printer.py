"""The text of a module. ``arachnec.ir.parser.parse_module`` reads it back to an equal module.

What no text can say is refused with ValueError: numbers that are not finite, lone surrogates in strings, two attributes
of one name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from arachnec.ir.limits import LONGEST_RANGE
from arachnec.ir.nodes import (
    STAGE_OPS,
    Cascade,
    Clip,
    Cluster,
    Fused,
    Graph,
    GraphOp,
    Instruction,
    Module,
    Program,
    Reduce,
    Stage,
    Step,
    TensorType,
)
from arachnec.ir.tables import INSTRUCTION
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value

WIDTH = 120
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNIT = re.compile(r"[A-Za-z]+(/[A-Za-z]+)?")
_DTYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIMENSION = re.compile(r"[A-Za-z0-9_+\-*/%^. (),]+")


def print_module(module: Module) -> str:
    """The module as text, one node a line, a newline behind the last."""
    if "level" in module.attrs:
        raise ValueError("the level is a field of the module, not an attribute")
    attrs = Attributes((("level", module.level.word), *module.attrs.pairs))
    sections = (
        [_cluster(module.cluster)] if module.cluster else [],
        [_clip(clip) for clip in module.clips],
        [_stage(stage) for stage in module.stages],
        [_graph(graph) for graph in module.graphs],
        [_cascade(cascade) for cascade in module.cascades],
        [_reduce(reduce) for reduce in module.reductions] + [_step(step) for step in module.steps],
        [_program(program) for program in module.programs],
    )
    body = "\n\n".join("\n".join(section) for section in sections if section)
    head = f"module {symbol(module.name)} attributes {_attributes(attrs, indent=0)} {{"
    return f"{head}\n{body}\n}}\n" if body else f"{head}\n}}\n"


def _cluster(cluster: Cluster) -> str:
    return f"  cluster {symbol(cluster.name)}" + _wrapped(cluster.attrs, 2, 12)


def _clip(clip: Clip) -> str:
    size = f"{clip.frames} x {clip.height} x {clip.width}"
    return f"  clip {clip.id} : {size} text {clip.text} tokens {clip.tokens}" + _inline(clip.attrs)


def _stage(stage: Stage) -> str:
    kind = "trained" if stage.trained else "frozen"
    return f"  stage {symbol(stage.name)} {kind}" + _wrapped(stage.attrs, 2, 20)


def _graph(graph: Graph) -> str:
    items = [f"{percent(item.name)} : {tensor_type(item.type)}" for item in graph.inputs]
    inputs = ", ".join(items)
    if len(inputs) > WIDTH - 20:
        inputs = "\n    " + ",\n    ".join(items) + "\n  "
    head = f"  graph {symbol(graph.name)} ({inputs}) -> {_percents(graph.outputs)}" + _inline(graph.attrs)
    return _block(head, [*map(_op, graph.ops), *map(_fused, graph.fused)])


def _op(op: GraphOp) -> str:
    kind = "" if op.type is None else f" : {tensor_type(op.type)}"
    return f"    {percent(op.name)} = {string(op.target)}{_percents(op.operands)}{kind}" + _inline(op.attrs)


def _fused(fused: Fused) -> str:
    return f"    fused {symbol(fused.name)} {_percents(fused.ops)}" + _wrapped(fused.attrs, 4, WIDTH)


def _cascade(cascade: Cascade) -> str:
    what = f"{cascade.phase.value} {symbol(cascade.stage)} clips {_value(cascade.clips)}"
    size = f"{cascade.batch} x {cascade.tokens} text {cascade.text}"
    inputs = f" {_percents(cascade.inputs)}" if cascade.inputs else ""
    return f"  {percent(cascade.name)} = {what} : {size}{inputs}" + _cascade_attributes(cascade.attrs)


def _cascade_attributes(attrs: Attributes) -> str:
    """In one line, but where a row for every layer would make it long."""
    return _wrapped(attrs, 2, WIDTH) if "heads" in attrs else _inline(attrs)


def _reduce(reduce: Reduce) -> str:
    inputs = f" {_percents(reduce.inputs)}" if reduce.inputs else ""
    return f"  reduce {symbol(reduce.stage)}{inputs}" + _inline(reduce.attrs)


def _step(step: Step) -> str:
    return f"  step {symbol(step.stage)}" + _inline(step.attrs)


def _program(program: Program) -> str:
    head = f"  program rank {program.rank}" + _inline(program.attrs)
    return _block(head, (_instruction(item) for item in program.instructions))


def _instruction(item: Instruction) -> str:
    if item.op not in INSTRUCTION:
        raise ValueError(f"no such instruction: {item.op}")
    target = symbol(item.target) if item.op in STAGE_OPS else percent(item.target)
    return f"    {item.op} {target}{_peers(item)}" + _inline(item.attrs)


def _peers(item: Instruction) -> str:
    if not item.peers:
        return ""
    word = {"send": "to", "receive": "from"}.get(item.op, "on")
    lone = word != "on" and len(item.peers) == 1
    return f" {word} {item.peers[0] if lone else _rank_list(item.peers)}"


@lru_cache(maxsize=1024)
def _rank_list(ranks: tuple[int, ...]) -> str:
    """Every member of a group writes it."""
    return _list(ranks)


def _block(head: str, lines: Iterable[str]) -> str:
    body = "\n".join(lines)
    return f"{head} [\n{body}\n  ]" if body else f"{head} []"


def _inline(attrs: Attributes) -> str:
    return f" {_attributes(attrs, indent=None)}" if attrs else ""


def _wrapped(attrs: Attributes, indent: int, used: int) -> str:
    return f" {_attributes(attrs, indent=indent, used=used)}" if attrs else ""


def _attributes(attrs: Attributes, indent: int | None, used: int = 30) -> str:
    """In one line; or, where ``indent`` is a number and the line would be long, one attribute a line."""
    if len({name for name, _ in attrs.pairs}) != len(attrs.pairs):
        raise ValueError("two attributes of one name")
    items = [f"{name if _PLAIN_KEY.fullmatch(name) else string(name)} = {_value(value)}" for name, value in attrs.pairs]
    line = ", ".join(items)
    if not items:
        return "{}"
    if indent is None or len(line) + used <= WIDTH:
        return f"{{ {line} }}"
    pad = " " * indent
    items = [_broken(item, value, pad) for item, (_, value) in zip(items, attrs.pairs, strict=True)]
    return "{\n" + "".join(f"{pad}  {item},\n" for item in items) + pad + "}"


def _broken(item: str, value: Value, pad: str) -> str:
    """A long list of sentences, or of rows that begin with a list, has one in a line."""
    if len(item) <= WIDTH or not isinstance(value, tuple):
        return item
    if not all(
        type(part) is str or (isinstance(part, tuple) and part and isinstance(part[0], tuple)) for part in value
    ):
        return item
    name = item[: item.index(" = [")]
    return f"{name} = [\n" + "".join(f"{pad}    {_value(part)},\n" for part in value) + f"{pad}  ]"


def value_text(value: Value) -> str:
    """A value as the IR writes it: ``[4..7]``."""
    return _value(value)


def _value(value: Value) -> str:
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise ValueError(f"not an attribute value: {value!r}")
    return writer(value)


def _list(items: tuple[Value, ...]) -> str:
    return "[" + ", ".join(_ranges(items)) + "]"


def _ranges(items: tuple[Value, ...]) -> Iterator[str]:
    """Three or more integers that count up by one become ``4..7``."""
    at = 0
    while at < len(items):
        end = at + 1
        if type(items[at]) is int and items[at] >= 0:  # type: ignore[operator]
            first: int = items[at]  # type: ignore[assignment]
            longest = min(len(items), at + LONGEST_RANGE)
            while end < longest and type(items[end]) is int and items[end] == first + end - at:
                end += 1
        if end - at >= 3:
            yield f"{items[at]}..{items[end - 1]}"
        else:
            yield from map(_value, items[at:end])
        at = end


def number(value: float) -> str:
    """Shortest text that reads back as the same float; whole numbers without their ``.0``."""
    if not math.isfinite(value):
        raise ValueError(f"not a finite number: {value!r}")
    if abs(value) < 1e15 and value == int(value) and str(value) != "-0.0":
        return str(int(value))
    return repr(float(value))


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"not a finite number: {value!r}")
    return repr(value)


def _quantity(value: Quantity) -> str:
    return f"{number(value.value)} {_unit(value.unit)}"


def formula_text(value: Formula) -> str:
    """``1.9e-09*B*S^2 + 1.1 ms``; one that has no variable stands in parentheses, as ``1.1 ms`` is a quantity."""
    parts: list[str] = []
    for term in value.terms:
        sign = math.copysign(1.0, term.coefficient) < 0
        text = _term(Term(abs(term.coefficient), term.powers))
        parts.append((" - " if sign else " + ") + text if parts else ("-" if sign else "") + text)
    total = "".join(parts)
    if not any(term.powers for term in value.terms):
        total = f"({total})"
    return f"{total} {_unit(value.unit)}"


def _term(term: Term) -> str:
    names = [name for name, _ in term.powers]
    if not all(_VARIABLE.fullmatch(name) for name in names):
        raise ValueError(f"not a variable: {names}")
    return "*".join([number(term.coefficient)] + [n if p == 1 else f"{n}^{p}" for n, p in term.powers])


def _unit(unit: str) -> str:
    if not _UNIT.fullmatch(unit):
        raise ValueError(f"not a unit: {unit!r}")
    return unit


def string(text: str) -> str:
    """A quoted string, escaped as JSON does."""
    text.encode("utf-8")
    return json.dumps(text, ensure_ascii=not text.isprintable())


def symbol(name: str) -> str:
    """``@name``, quoted where the name is no plain word."""
    return "@" + (name if _PLAIN_NAME.fullmatch(name) else string(name))


def percent(name: str) -> str:
    """``%name``, quoted where the name is no plain word."""
    return "%" + (name if _PLAIN_NAME.fullmatch(name) else string(name))


def _percents(names: tuple[str, ...]) -> str:
    return f"({', '.join(map(percent, names))})"


def tensor_type(kind: TensorType) -> str:
    """``f32[B, 2*S, 64]``."""
    if not _DTYPE.fullmatch(kind.dtype):
        raise ValueError(f"not a dtype: {kind.dtype!r}")
    return f"{kind.dtype}[{', '.join(map(_dimension, kind.dims))}]"


def _dimension(dim: int | str) -> str:
    if isinstance(dim, int):
        return str(dim)
    number_like = re.fullmatch(r"-?[0-9]+", dim)
    if not _DIMENSION.fullmatch(dim) or dim != dim.strip() or number_like or not _commas_are_inside(dim):
        raise ValueError(f"not a dimension: {dim!r}")
    return dim


def _commas_are_inside(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0 or (char == "," and depth == 0):
            return False
    return depth == 0


_WRITERS: dict[type, Callable[..., str]] = {
    bool: lambda value: "true" if value else "false",
    int: str,
    float: _float,
    str: string,
    Quantity: _quantity,
    Symbol: lambda value: symbol(value.name),
    Formula: formula_text,
    tuple: _list,
    Attributes: lambda value: _attributes(value, indent=None),
}
