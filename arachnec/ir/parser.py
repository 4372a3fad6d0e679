"""Text to module: ``parse_module(print_module(m)) == m``.

The grammar is ``grammar.lark`` (LALR with a contextual lexer), its instructions are those of ``tables``; ``builder``
makes the nodes while lark parses. A node's span is its head, up to its attributes; every attribute's own span is in
``Attributes.spans``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import cast

from lark import Lark
from lark.exceptions import UnexpectedInput

from arachnec.ir.builder import PARSED, ModuleBuilder
from arachnec.ir.diagnostic import UserError
from arachnec.ir.garbage import without_garbage_collector
from arachnec.ir.nodes import Module
from arachnec.ir.syntax_diagnosis import diagnose
from arachnec.ir.tables import CASCADE_WORDS, STAGE_WORDS


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
