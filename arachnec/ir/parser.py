"""Text to module: ``parse_module(print_module(m)) == m``.

The grammar is ``grammar.lark`` (LALR with a contextual lexer), its instructions are those of ``tables``; ``builder``
makes the nodes while lark parses. A node's span is its head, up to its attributes; every attribute's own span is in
``Attributes.spans``.
"""

from __future__ import annotations

import functools
import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from arachnec.ir.builder import PARSED, ModuleBuilder
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span, UserError, close_to
from arachnec.ir.long_computations import without_garbage_collector
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.tables import CASCADE_WORDS, STAGE_WORDS

_WORDS = {
    "SYMBOL": ["a name such as `@dit`"],
    "VALUE": ["a name such as `%0`"],
    "KEY": ["an attribute's name"],
    "STRING": ["a string"],
    "INT": ["an integer"],
    "FLOAT": ["a number"],
    "QUANTITY": ["a number with its unit"],
    "VARIABLE": ["a variable such as `S`"],
    "UNIT": ["a unit such as `ms`"],
    "TENSOR": ["a tensor type such as `f32[B, S, 64]`"],
    "INTS": ["a list of integers"],
    "RANGE": ["a range such as `0..3`"],
    "KIND": ["`trained`", "`frozen`"],
    "PHASE": [f"`{phase.value}`" for phase in Phase],
    "CASCADE_OP": [f"`{op}`" for op in CASCADE_WORDS],
    "STAGE_OP": [f"`{op}`" for op in STAGE_WORDS],
    "$END": ["the end of the text"],
}
BEGINNING = 'a module begins with `module @name attributes { level = "traced" } {`'
_VALUE_STARTS = {"INT", "FLOAT", "QUANTITY", "STRING", "SYMBOL", "LBRACE"}


def _expected(terminals: set[str], grammar: Lark) -> list[str]:
    if terminals >= _VALUE_STARTS:
        return ["a value"] + (["`]`"] if "RSQB" in terminals else [])
    terminals = terminals - {"PLAIN"}  # which is a special case of what LBRACE begins
    if "INTS" in terminals:
        terminals = terminals - {"LSQB"}
    words = []
    for name in sorted(terminals, key=lambda terminal: (terminal not in _WORDS, terminal)):
        words += _WORDS.get(name) or [f"`{grammar.get_terminal(name).pattern.value}`"]
    return list(dict.fromkeys(words))


def _joined(words: list[str]) -> str:
    if len(words) > 12:
        words = [*words[:12], "..."]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _accepted(state: Any) -> set[str]:
    """The terminals with which lark's parser could go on.

    Its table also lists terminals that fail after a few reductions; each one is tried on a copy.
    """
    silent = copy(state.parse_conf)
    silent.callbacks = {}
    accepted = set()
    for terminal in filter(str.isupper, silent.parse_table.states[state.position]):
        trial = state.copy(deepcopy_values=False)
        trial.parse_conf = silent
        try:
            trial.feed_token(Token(terminal, ""), terminal == "$END")
        except UnexpectedToken:
            continue
        accepted.add(terminal)
    return accepted


def diagnose(error: UnexpectedInput, grammar: Lark, text: str, file: str) -> Diagnostic:
    """What stands there, what was expected, and the closest expected word."""
    if not re.sub(r"//[^\n]*", "", text).strip():
        return Mistake(None, f"there is no module in {file}", help=BEGINNING)
    words = _expected(_accepted(error.state), grammar)
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        rows = text.rstrip().split("\n")
        span = Span(file, len(rows), max(1, len(rows[-1])), len(rows), len(rows[-1]) + 1, text)
        return Mistake(
            span,
            f"the text ends in the middle of a module: expected {_joined(words)}",
            label="the text ends here",
            help="the file was cut off or is still being written; a module ends with `}` on its last line",
        )
    if isinstance(error, UnexpectedCharacters):
        unexpected = text[error.pos_in_stream : (error.pos_in_stream or 0) + 1]
        span = Span(file, error.line, error.column, error.line, error.column + 1, text)
        if unexpected == '"':
            return Mistake(
                span,
                "a string without its closing quote",
                label="opened here",
                help='close it with `"` on the same line; write a line break as `\\n`',
            )
    else:
        token = cast(UnexpectedToken, error).token
        unexpected, span = "{" if token.type == "PLAIN" else str(token), _token_span(token, file, text)
        if not unexpected.startswith('"'):
            # a token may be a number with a word that was not meant as its unit
            unexpected = unexpected.split(maxsplit=1)[0]
            span = replace(span, end_line=span.line, end_column=span.column + len(unexpected))
    bare = [word.strip("`") for word in words if word.startswith("`")]
    close = close_to(unexpected, bare)
    line = unexpected.splitlines()[0] if unexpected else unexpected
    shown = "the end of the line" if unexpected == "\n" else f"`{line}`"
    if close:
        return Mistake(
            span,
            f"expected {_joined(words)}, found {shown}",
            label="not expected here",
            help=f"did you mean `{close[0]}`?",
        )
    if words == ["`module`"]:
        return Mistake(
            span,
            f"expected `module`, found {shown}",
            label="not the beginning of a module",
            help=f"{BEGINNING}; give a file that `arachnec opt` or `arachnec compile` wrote",
        )
    return Mistake(
        span,
        f"expected {_joined(words)}, found {shown}",
        label="not expected here",
        help="docs/ir.md shows how it is written; the text may also have been cut off",
    )


def _token_span(token: Token, file: str, text: str) -> Span:
    return Span(file, token.line or 1, token.column or 1, token.end_line or 1, token.end_column or 1, text)


def parse_module(text: str, file: str = "<string>") -> Module:
    """The module that ``text`` says. ``file`` is the name that spans and messages show.

    Raises UserError with one diagnostic where the text is not a module. Nothing is verified beyond the syntax: see
    ``arachnec.ir.verify``.
    """
    token = PARSED.set((file, text))
    try:
        with without_garbage_collector():
            return cast(Module, _lark().parse(text))
    except UnexpectedInput as error:
        raise UserError(diagnose(error, _lark(), text, file)) from None
    finally:
        PARSED.reset(token)


def parse_file(path: Path) -> Module:
    """``parse_module`` of a UTF-8 file."""
    return parse_module(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _lark() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    for terminal, words in (("CASCADE_OP", CASCADE_WORDS), ("STAGE_OP", STAGE_WORDS)):
        grammar += f"{terminal}: /({'|'.join(words)})\\b/\n"
    return Lark(grammar, start="module", parser="lalr", lexer="contextual", transformer=ModuleBuilder())
