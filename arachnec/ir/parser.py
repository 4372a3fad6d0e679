"""The text of a module, read back: ``parse_module(print_module(m)) == m``.

The grammar is ``grammar.lark`` (LALR with a contextual lexer); nodes are built while it parses. A node's span is its
head, up to its attributes; every attribute's own span is in ``Attributes.spans``.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput

from arachnec.ir import syntax_errors
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import (
    NO_ATTRIBUTES,
    Cascade,
    Clip,
    Cluster,
    Fused,
    Graph,
    GraphInput,
    GraphOp,
    Instruction,
    Level,
    Module,
    Phase,
    Program,
    Reduce,
    Stage,
    Step,
    TensorType,
)
from arachnec.ir.printer import LONGEST_RANGE
from arachnec.ir.span import Span
from arachnec.ir.syntax_diagnosis import diagnose
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value

LEVELS = ", ".join(level.word for level in Level)
LONGEST_INTEGER = 4000  # digits: Python refuses to read more
Parts: TypeAlias = list[Any]
Node = TypeVar("Node")

_WHERE: ContextVar[tuple[str, str]] = ContextVar("the file being parsed and its text")


def parse_module(text: str, file: str = "<string>") -> Module:
    """The module that ``text`` says. ``file`` is the name that spans and messages show.

    Raises UserError with one diagnostic where the text is not a module. Nothing is verified beyond the syntax: see
    ``arachnec.ir.verify``.
    """
    token = _WHERE.set((file, text))
    try:
        with _no_collection():
            return cast(Module, _lark().parse(text))
    except UnexpectedInput as error:
        raise UserError(diagnose(error, _lark(), text, file)) from None
    finally:
        _WHERE.reset(token)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nodes hold no cycles, and the collector would walk those there are again and again as their number grows."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def parse_file(path: Path) -> Module:
    """``parse_module`` of a UTF-8 file."""
    return parse_module(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _lark() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, start="module", parser="lalr", lexer="contextual", transformer=_Builder())


def _span(first: Token, last: Token | None = None) -> Span:
    file, text = _WHERE.get()
    end = first if last is None else last
    return Span(file, first.line or 1, first.column or 1, end.end_line or 1, end.end_column or 1, text)


def _name(token: Token) -> str:
    """The name of a ``@symbol`` or ``%value``."""
    return _string(token, token[1:]) if token[1] == '"' else str(token[1:])


def _string(token: Token, text: str) -> str:
    try:
        return cast(str, json.loads(text, strict=False))
    except ValueError:
        raise UserError(syntax_errors.BadEscape(_span(token))) from None


def _number(token: Token, text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UserError(syntax_errors.BadNumber(_span(token), written=text))
    return value


def _integer(token: Token) -> int:
    if len(token) > LONGEST_INTEGER:
        raise UserError(syntax_errors.BadNumber(_span(token), written=f"{token[:12]}..."))
    return int(token)


def _range(token: Token, text: str) -> range:
    first, _, last = text.partition("..")
    low, high = int(first), int(last or first)
    if high < low or high - low >= LONGEST_RANGE:
        raise UserError(syntax_errors.BadRange(_span(token), written=text, most=LONGEST_RANGE))
    return range(low, high + 1)


def _integers(values: Sequence[object], node: Span) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise UserError(syntax_errors.NotIntegers(node))
    return tuple(cast("Sequence[int]", values))


def _dimension(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else text


def _tensor_type(token: Token) -> TensorType:
    dtype, _, rest = token[:-1].partition("[")
    dims, depth, start = [], 0, 0
    for at, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            dims.append(rest[start:at])
            start = at + 1
    last = rest[start:]
    if last.strip():
        dims.append(last)
    return TensorType(str(dtype), tuple(_dimension(dim.strip()) for dim in dims))


# One pair of a block that the grammar calls PLAIN, which has said that nothing else stands there.
_PAIR = re.compile(
    r"""([A-Za-z_][A-Za-z0-9_.\-]*)[ \t\r\n]*=[ \t\r\n]*(?P<value>
        (?P<number>-?[0-9]+(?:(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\ +(?P<unit>[A-Za-z/]+)
                             |\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+))
        |(?P<whole>-?[0-9]+)|(?P<word>true|false)|"(?:\\.|[^"\\\n])*"|\[[^\]]*\])""",
    re.VERBOSE,
)


class _Builder(Transformer[Token, Module]):
    """Called by lark once per rule, with the rule's parts in order; an absent optional part is None."""

    # values

    def integer(self, parts: Parts) -> int:
        return _integer(parts[0])

    def floating(self, parts: Parts) -> float:
        return _number(parts[0], parts[0])

    def quantity(self, parts: Parts) -> Quantity:
        value, _, unit = parts[0].partition(" ")
        return Quantity(_number(parts[0], value), unit.strip())

    def text(self, parts: Parts) -> str:
        return _string(parts[0], parts[0])

    def true(self, parts: Parts) -> bool:
        return True

    def false(self, parts: Parts) -> bool:
        return False

    def reference(self, parts: Parts) -> Symbol:
        return Symbol(_name(parts[0]))

    def integers(self, parts: Parts) -> tuple[int, ...]:
        token = parts[0]
        items = token[1:-1].split(",")
        if ".." not in token:
            return tuple(map(int, items))
        return tuple(value for item in items for value in _range(token, item.strip()))

    def integer_range(self, parts: Parts) -> range:
        return _range(parts[0], parts[0])

    def list(self, parts: Parts) -> tuple[Value, ...]:
        found: Parts = []
        for part in parts:
            if isinstance(part, range):
                found.extend(part)
            elif part is not None:
                found.append(part)
        return tuple(found)

    def formula(self, parts: Parts) -> Formula:
        terms, unit = parts
        return Formula(terms or (), str(unit))

    def sum(self, parts: Parts) -> tuple[Term, ...]:
        terms = [parts[0]]
        for sign, term in zip(parts[1::2], parts[2::2], strict=True):
            terms.append(term if sign == "+" else Term(-term.coefficient, term.powers))
        return tuple(terms)

    def sign(self, parts: Parts) -> str:
        return str(parts[0])

    def term(self, parts: Parts) -> Term:
        coefficient, powers = 1.0, []
        for part in parts:
            if isinstance(part, tuple):
                powers.append(part)
            elif part.type == "VARIABLE":
                powers.append((str(part), 1))
            else:
                coefficient *= _number(part, part)
        return Term(coefficient, tuple(powers))

    def power(self, parts: Parts) -> tuple[str, int]:
        return str(parts[0]), _integer(parts[1])

    def attr(self, parts: Parts) -> tuple[Token, Value]:
        return parts[0], parts[1]

    def attrs(self, parts: Parts) -> Attributes:
        pairs, spans = [], []
        seen = set()
        for key, value in filter(None, parts):
            name = _string(key, key) if key.type == "STRING" else str(key)
            if name in seen:
                raise UserError(syntax_errors.TwiceGiven(_span(key), what=f"attribute `{name}`"))
            seen.add(name)
            pairs.append((name, value))
            spans.append(_span(key))
        return Attributes(tuple(pairs), tuple(spans))

    def plain(self, parts: Parts) -> Attributes:
        """A whole block that is one token: the same as ``attrs``, without a token for each brace, name and comma."""
        block = parts[0]
        file, source = _WHERE.get()
        line, first, last = block.line, -block.column, 0  # ``first`` is where the row begins, counted in the block
        pairs, spans, names = [], [], set()
        for found in _PAIR.finditer(block):
            at = found.start()
            breaks = block.count("\n", last, at)
            if breaks:
                line, first = line + breaks, block.rindex("\n", last, at)
            last, column = at, at - first
            name, number, unit, whole, word = found.group(1, "number", "unit", "whole", "word")
            span = Span(file, line, column, line, column + len(name), source)
            value: Value
            if number is not None and math.isfinite(amount := float(number.partition(" ")[0])):
                value = amount if unit is None else Quantity(amount, unit)
            elif whole is not None and len(whole) < LONGEST_INTEGER:
                value = int(whole)
            elif word is not None:
                value = word == "true"
            else:
                value = self._plain_value(found, line, first)
            if name in names:
                raise UserError(syntax_errors.TwiceGiven(span, what=f"attribute `{name}`"))
            names.add(name)
            pairs.append((name, value))
            spans.append(span)
        return Attributes(tuple(pairs), tuple(spans))

    def _plain_value(self, found: re.Match[str], line: int, first: int) -> Value:
        """A string, a list, or a number that is none, by the rule for its token."""
        start, end = found.span("value")
        token = Token("", found["value"], line=line, column=start - first, end_line=line, end_column=end - first)
        if token[0] == '"':
            return self.text([token])
        if token[0] == "[":
            return self.integers([token])
        if found["whole"] is not None:
            return self.integer([token])
        return self.floating([token]) if found["unit"] is None else self.quantity([token])

    def values(self, parts: Parts) -> tuple[str, ...]:
        return tuple(_name(part) for part in parts if part is not None)

    # nodes

    def cluster(self, parts: Parts) -> Cluster:
        word, name, attrs = parts
        return Cluster(_name(name), attrs or NO_ATTRIBUTES, _span(word, name))

    def clip(self, parts: Parts) -> Clip:
        word, *numbers, attrs = parts
        clip, frames, height, width, text, tokens = map(_integer, numbers)
        return Clip(clip, frames, height, width, text, tokens, attrs or NO_ATTRIBUTES, _span(word, numbers[-1]))

    def stage(self, parts: Parts) -> Stage:
        word, name, kind, attrs = parts
        return Stage(_name(name), kind == "trained", attrs or NO_ATTRIBUTES, _span(word, kind))

    def graph(self, parts: Parts) -> Graph:
        word, name, inputs, outputs, attrs, *body = parts
        ops = tuple(item for item in body if isinstance(item, GraphOp))
        fused = tuple(item for item in body if isinstance(item, Fused))
        return Graph(_name(name), inputs or (), ops, outputs, attrs or NO_ATTRIBUTES, _span(word, name), fused)

    def graph_inputs(self, parts: Parts) -> tuple[GraphInput, ...]:
        return tuple(part for part in parts if part is not None)

    def graph_input(self, parts: Parts) -> GraphInput:
        return GraphInput(_name(parts[0]), _tensor_type(parts[1]))

    def op(self, parts: Parts) -> GraphOp:
        name, target, operands, kind, attrs = parts
        result = None if kind is None else _tensor_type(kind)
        span = _span(name, target)
        return GraphOp(_name(name), _string(target, target), operands, result, attrs or NO_ATTRIBUTES, span)

    def fused(self, parts: Parts) -> Fused:
        word, name, ops, attrs = parts
        return Fused(_name(name), ops, attrs or NO_ATTRIBUTES, _span(word, name))

    def cascade(self, parts: Parts) -> Cascade:
        name, phase, stage, clips, batch, tokens, text, inputs, attrs = parts
        span = _span(name, tokens if text is None else text)
        return Cascade(
            _name(name),
            Phase(str(phase)),
            _name(stage),
            _integers(clips, span),
            _integer(batch),
            _integer(tokens),
            0 if text is None else _integer(text),
            inputs or (),
            attrs or NO_ATTRIBUTES,
            span,
        )

    def reduction(self, parts: Parts) -> Reduce:
        word, stage, inputs, attrs = parts
        return Reduce(_name(stage), inputs or (), attrs or NO_ATTRIBUTES, _span(word, stage))

    def step(self, parts: Parts) -> Step:
        word, stage, attrs = parts
        return Step(_name(stage), attrs or NO_ATTRIBUTES, _span(word, stage))

    def program(self, parts: Parts) -> Program:
        word, rank, attrs, *instructions = parts
        return Program(_integer(rank), tuple(instructions), attrs or NO_ATTRIBUTES, _span(word, rank))

    def instruction(self, parts: Parts) -> Instruction:
        word, target, peers, attrs = parts
        span = _span(word, target)
        if isinstance(peers, Token):
            peers = (_integer(peers),)
        elif peers is not None:
            peers = _integers(peers, span)
        return Instruction(str(word), _name(target), peers or (), attrs or NO_ATTRIBUTES, span)

    def module(self, parts: Parts) -> Module:
        name, attrs, *items = parts
        kinds: dict[type, Parts] = {kind: [] for kind in _KINDS}
        for item in items:
            kinds[type(item)].append(item)
        if len(kinds[Cluster]) > 1:
            raise UserError(syntax_errors.TwiceGiven(kinds[Cluster][1].span, what="the cluster"))
        return Module(
            name=_name(name),
            level=_level(attrs, name),
            cluster=next(iter(kinds[Cluster]), None),
            clips=tuple(kinds[Clip]),
            stages=tuple(kinds[Stage]),
            graphs=tuple(kinds[Graph]),
            cascades=tuple(kinds[Cascade]),
            reductions=tuple(kinds[Reduce]),
            steps=tuple(kinds[Step]),
            programs=tuple(kinds[Program]),
            attrs=_without(attrs, "level"),
            span=_span(name),
        )


_KINDS = (Cluster, Clip, Stage, Graph, Cascade, Reduce, Step, Program)


def _without(attrs: Attributes, name: str) -> Attributes:
    kept = [(pair, span) for pair, span in zip(attrs.pairs, attrs.spans, strict=True) if pair[0] != name]
    return Attributes(tuple(pair for pair, _ in kept), tuple(span for _, span in kept))


def _level(attrs: Attributes, module: Token) -> Level:
    if "level" not in attrs:
        raise UserError(syntax_errors.NoLevel(_span(module), name=_name(module), levels=LEVELS))
    word = attrs["level"]
    for level in Level:
        if level.word == word:
            return level
    raise UserError(syntax_errors.UnknownLevel(attrs.span("level"), found=json.dumps(str(word)), levels=LEVELS))
