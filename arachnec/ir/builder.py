"""Parse tree to nodes: lark calls one method of ``ModuleBuilder`` per rule of ``grammar.lark``.

``PARSED`` says which file is being parsed. Tokens become values with a span; one that has none raises UserError.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

from lark import Token, Transformer

from arachnec.ir.diagnostic import Span, UserError, user_error
from arachnec.ir.limits import LONGEST_INTEGER, LONGEST_RANGE
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
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value

PARSED: ContextVar[tuple[str, str]] = ContextVar("name and text of the file being parsed")


def twice_given_error(span: Span | None, what: str) -> UserError:
    return user_error(f"{what} is given twice", label="the second", help="remove one of the two", span=span)


def bad_number_error(span: Span | None, written: str) -> UserError:
    return user_error(f"`{written}` is too large for a number", label="not a finite number", span=span)


def span_of(first: Token, last: Token | None = None) -> Span:
    file, text = PARSED.get()
    end = first if last is None else last
    return Span(file, first.line or 1, first.column or 1, end.end_line or 1, end.end_column or 1, text)


def name_of(token: Token) -> str:
    """The name of a ``@symbol`` or ``%value``."""
    return string_of(token, token[1:]) if token[1] == '"' else str(token[1:])


def string_of(token: Token, text: str) -> str:
    try:
        return cast(str, json.loads(text, strict=False))
    except ValueError:
        raise user_error(
            "a string with an escape that does not exist",
            label="in this string",
            help='escapes are those of JSON: `\\"`, `\\\\`, `\\n`, `\\t`, `\\u0041`',
            span=span_of(token),
        ) from None


def number_of(token: Token, text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise bad_number_error(span_of(token), written=text)
    return value


def integer_of(token: Token) -> int:
    if len(token) > LONGEST_INTEGER:
        raise bad_number_error(span_of(token), written=f"{token[:12]}...")
    return int(token)


def range_of(token: Token, text: str) -> range:
    first, _, last = text.partition("..")
    if max(len(first), len(last)) > LONGEST_INTEGER:
        raise bad_number_error(span_of(token), written=f"{text[:12]}...")
    low, high = int(first), int(last or first)
    if high < low or high - low >= LONGEST_RANGE:
        raise user_error(
            f"`{text}` is not a range",
            label="in this list",
            help=f"a range counts up, `4..7`, and has at most {LONGEST_RANGE} numbers",
            span=span_of(token),
        )
    return range(low, high + 1)


def integers_of(values: Sequence[object], node: Span) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise user_error(
            "expected a list of integers", label="its list holds something else", help="write `[0..3, 6]`", span=node
        )
    return tuple(cast("Sequence[int]", values))


def _dimension(token: Token, text: str) -> int | str:
    if not re.fullmatch(r"-?[0-9]+", text):
        return text
    return whole_number(token, text)


def whole_number(token: Token, text: str) -> int:
    """A number that stands inside a token."""
    if len(text) > LONGEST_INTEGER:
        raise bad_number_error(span_of(token), written=f"{text[:12]}...")
    return int(text)


def tensor_type_of(token: Token) -> TensorType:
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
    return TensorType(str(dtype), tuple(_dimension(token, dim.strip()) for dim in dims))


LEVELS = ", ".join(level.word for level in Level)
Parts: TypeAlias = list[Any]

# One pair of a block that the grammar calls PLAIN, which has said that nothing else stands there.
_PAIR = re.compile(
    r"""([A-Za-z_][A-Za-z0-9_.\-]*)[ \t\r\n]*=[ \t\r\n]*(?P<value>
        (?P<number>-?[0-9]+(?:(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\ +(?P<unit>[A-Za-z/]+)
                             |\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+))
        |(?P<integer>-?[0-9]+)|(?P<word>true|false)|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|\[[^\]]*\])""",
    re.VERBOSE,
)


class ModuleBuilder(Transformer[Token, Module]):
    """Called by lark once per rule, with the rule's parts in order; an absent optional part is None."""

    # values

    def integer(self, parts: Parts) -> int:
        return integer_of(parts[0])

    def floating(self, parts: Parts) -> float:
        return number_of(parts[0], parts[0])

    def quantity(self, parts: Parts) -> Quantity:
        value, _, unit = parts[0].partition(" ")
        return Quantity(number_of(parts[0], value), unit.strip())

    def text(self, parts: Parts) -> str:
        return string_of(parts[0], parts[0])

    def true(self, parts: Parts) -> bool:
        return True

    def false(self, parts: Parts) -> bool:
        return False

    def reference(self, parts: Parts) -> Symbol:
        return Symbol(name_of(parts[0]))

    def integers(self, parts: Parts) -> tuple[int, ...]:
        token = parts[0]
        items = token[1:-1].split(",")
        if ".." not in token:
            return tuple(whole_number(token, item.strip()) for item in items)
        return tuple(value for item in items for value in range_of(token, item.strip()))

    def integer_range(self, parts: Parts) -> range:
        return range_of(parts[0], parts[0])

    def list(self, parts: Parts) -> tuple[Value, ...]:
        items: Parts = []
        for part in parts:
            if isinstance(part, range):
                items.extend(part)
            elif part is not None:
                items.append(part)
        return tuple(items)

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
                coefficient *= number_of(part, part)
        return Term(coefficient, tuple(powers))

    def power(self, parts: Parts) -> tuple[str, int]:
        return str(parts[0]), integer_of(parts[1])

    def attr(self, parts: Parts) -> tuple[Token, Value]:
        return parts[0], parts[1]

    def attrs(self, parts: Parts) -> Attributes:
        pairs, spans = [], []
        seen = set()
        for key, value in filter(None, parts):
            name = string_of(key, key) if key.type == "STRING" else str(key)
            if name in seen:
                raise twice_given_error(span_of(key), what=f"attribute `{name}`")
            seen.add(name)
            pairs.append((name, value))
            spans.append(span_of(key))
        return Attributes(tuple(pairs), tuple(spans))

    def plain(self, parts: Parts) -> Attributes:
        """A whole block that is one token: the same as ``attrs``, without a token for each brace, name and comma."""
        block = parts[0]
        file, source = PARSED.get()
        line, first, last = block.line, -block.column, 0  # ``first`` is where the row begins, counted in the block
        pairs, spans, names = [], [], set()
        for pair in _PAIR.finditer(block):
            at = pair.start()
            breaks = block.count("\n", last, at)
            if breaks:
                line, first = line + breaks, block.rindex("\n", last, at)
            last, column = at, at - first
            name, number, unit, integer, word = pair.group(1, "number", "unit", "integer", "word")
            span = Span(file, line, column, line, column + len(name), source)
            value: Value
            if number is not None and math.isfinite(amount := float(number.partition(" ")[0])):
                value = amount if unit is None else Quantity(amount, unit)
            elif integer is not None and len(integer) < LONGEST_INTEGER:
                value = int(integer)
            elif word is not None:
                value = word == "true"
            else:
                value = self._plain_value(pair, line, first)
            if name in names:
                raise twice_given_error(span, what=f"attribute `{name}`")
            names.add(name)
            pairs.append((name, value))
            spans.append(span)
        return Attributes(tuple(pairs), tuple(spans))

    def _plain_value(self, pair: re.Match[str], line: int, first: int) -> Value:
        """A string, a list, or a number that is none, by the rule for its token."""
        start, end = pair.span("value")
        token = Token("", pair["value"], line=line, column=start - first, end_line=line, end_column=end - first)
        if token[0] == '"':
            return self.text([token])
        if token[0] == "[":
            return self.integers([token])
        if pair["integer"] is not None:
            return self.integer([token])
        return self.floating([token]) if pair["unit"] is None else self.quantity([token])

    def values(self, parts: Parts) -> tuple[str, ...]:
        return tuple(name_of(part) for part in parts if part is not None)

    # nodes

    def cluster(self, parts: Parts) -> Cluster:
        word, name, attrs = parts
        return Cluster(name_of(name), attrs or NO_ATTRIBUTES, span_of(word, name))

    def clip(self, parts: Parts) -> Clip:
        word, *numbers, attrs = parts
        clip, frames, height, width, text, tokens = map(integer_of, numbers)
        return Clip(clip, frames, height, width, text, tokens, attrs or NO_ATTRIBUTES, span_of(word, numbers[-1]))

    def stage(self, parts: Parts) -> Stage:
        word, name, kind, attrs = parts
        return Stage(name_of(name), kind == "trained", attrs or NO_ATTRIBUTES, span_of(word, kind))

    def graph(self, parts: Parts) -> Graph:
        word, name, inputs, outputs, attrs, *body = parts
        ops = tuple(item for item in body if isinstance(item, GraphOp))
        fused = tuple(item for item in body if isinstance(item, Fused))
        return Graph(name_of(name), inputs or (), ops, outputs, attrs or NO_ATTRIBUTES, span_of(word, name), fused)

    def graph_inputs(self, parts: Parts) -> tuple[GraphInput, ...]:
        return tuple(part for part in parts if part is not None)

    def graph_input(self, parts: Parts) -> GraphInput:
        return GraphInput(name_of(parts[0]), tensor_type_of(parts[1]))

    def op(self, parts: Parts) -> GraphOp:
        name, target, operands, kind, attrs = parts
        result = None if kind is None else tensor_type_of(kind)
        span = span_of(name, target)
        return GraphOp(name_of(name), string_of(target, target), operands, result, attrs or NO_ATTRIBUTES, span)

    def fused(self, parts: Parts) -> Fused:
        word, name, ops, attrs = parts
        return Fused(name_of(name), ops, attrs or NO_ATTRIBUTES, span_of(word, name))

    def cascade(self, parts: Parts) -> Cascade:
        name, phase, stage, clips, batch, tokens, text, inputs, attrs = parts
        span = span_of(name, tokens if text is None else text)
        return Cascade(
            name_of(name),
            Phase(str(phase)),
            name_of(stage),
            integers_of(clips, span),
            integer_of(batch),
            integer_of(tokens),
            0 if text is None else integer_of(text),
            inputs or (),
            attrs or NO_ATTRIBUTES,
            span,
        )

    def reduction(self, parts: Parts) -> Reduce:
        word, stage, inputs, attrs = parts
        return Reduce(name_of(stage), inputs or (), attrs or NO_ATTRIBUTES, span_of(word, stage))

    def step(self, parts: Parts) -> Step:
        word, stage, attrs = parts
        return Step(name_of(stage), attrs or NO_ATTRIBUTES, span_of(word, stage))

    def program(self, parts: Parts) -> Program:
        word, rank, attrs, *instructions = parts
        return Program(integer_of(rank), tuple(instructions), attrs or NO_ATTRIBUTES, span_of(word, rank))

    def instruction(self, parts: Parts) -> Instruction:
        word, target, peers, attrs = parts
        span = span_of(word, target)
        if isinstance(peers, Token):
            peers = (integer_of(peers),)
        elif peers is not None:
            peers = integers_of(peers, span)
        return Instruction(str(word), name_of(target), peers or (), attrs or NO_ATTRIBUTES, span)

    def module(self, parts: Parts) -> Module:
        name, attrs, *items = parts
        kinds: dict[type, Parts] = {kind: [] for kind in _KINDS}
        for item in items:
            kinds[type(item)].append(item)
        if len(kinds[Cluster]) > 1:
            raise twice_given_error(kinds[Cluster][1].span, what="the cluster")
        return Module(
            name=name_of(name),
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
            span=span_of(name),
        )


_KINDS = (Cluster, Clip, Stage, Graph, Cascade, Reduce, Step, Program)


def _without(attrs: Attributes, name: str) -> Attributes:
    kept = [(pair, span) for pair, span in zip(attrs.pairs, attrs.spans, strict=True) if pair[0] != name]
    return Attributes(tuple(pair for pair, _ in kept), tuple(span for _, span in kept))


def _level(attrs: Attributes, module: Token) -> Level:
    if "level" not in attrs:
        raise user_error(
            f"module `@{name_of(module)}` does not say its level",
            label="no `level` among its attributes",
            help=f'write `attributes {{ level = "traced" }}`; levels are {LEVELS}',
            span=span_of(module),
        )
    word = attrs["level"]
    for level in Level:
        if level.word == word:
            return level
    raise user_error(
        f"there is no level {json.dumps(str(word))}",
        label="not a level",
        help=f"levels are {LEVELS}",
        span=attrs.span("level"),
    )
