"""Blocks of plain values are read as one token: the same values, places and messages as token by token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Formula, Quantity

COMMENT = "// a comment keeps the block from being one token\n"


def text(block: str) -> str:
    return f'module @m attributes {{ level = "traced" }} {{\n  stage @s frozen {block}\n}}\n'


def parsed(block: str) -> Attributes:
    return parse_module(text(block)).stages[0].attrs


def said(block: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_module(text(block))
    assert len(caught.value.diagnostics) == 1
    return render(caught.value.diagnostics[0])


plain = st.sampled_from(
    ["1", "-3", "007", "1.5", "-2e9", "1e-3", "3 ms", "-1.5e+3 GB/s", "2   us", "true", "false", '"a"', '"}, b = 1"',
     r'"\"\\u00e9"', '""', "[1, 2]", "[0..3, 7]", "[ -1 ]", '"// no comment"']
)  # fmt: skip
gaps = st.sampled_from(["", " ", "\n", "\n    ", "\t"])


@given(st.lists(st.tuples(plain, gaps, gaps, gaps), min_size=1, max_size=5), st.booleans())
def test_a_block_reads_the_same_with_and_without_a_comment_in_it(parts: list[tuple[str, ...]], trailing: bool) -> None:
    pairs = [f"{a}k_{i}.x-{i}{b}={c}{value}" for i, (value, a, b, c) in enumerate(parts)]
    body = ",".join(pairs) + ("," if trailing else "")
    once, slowly = parsed("{" + body + "\n}"), parsed("{" + body + "\n" + COMMENT + "}")
    assert once == slowly
    assert once.spans == slowly.spans
    assert [type(value) for _, value in once.pairs] == [type(value) for _, value in slowly.pairs]


@pytest.mark.parametrize(
    "body",
    [
        " a = 1, a = 2 ",
        "\n a = 1,\n  b = 2,\n   a = 3\n",
        " a = 1e999 ",
        " a = 1e999 ms ",
        "\n  b = 1,\n  a = -1e999 GB/s,\n",
        ' a = "\\q" ',
        " a = [3..1] ",
        " a = " + "9" * 4001 + " ",
        " a = 1 b = 2 ",
        " a = , ",
        " a = 1,, ",
        " = 1 ",
        ' a = "open ',
        " a = 1 ms GiB ",
        " a = 5 ms = 3",
    ],
)
def test_a_wrong_block_gets_the_message_it_would_get_token_by_token(body: str) -> None:
    once, slowly = said("{" + body + "}"), said("{" + body + "\n" + COMMENT + "}")
    assert once.splitlines()[:2] == slowly.splitlines()[:2], "title and place"


def test_values_that_are_not_plain_are_read_by_the_grammar() -> None:
    attributes = parsed("{ a = 2*S^2 + 1 ms, b = [[1, 3 ms]], c = { d = 1 }, e = @x, f = (1) ms, g = 3ms }")
    assert isinstance(attributes["a"], Formula)
    assert attributes["b"] == ((1, Quantity(3.0, "ms")),)
    assert attributes["c"] == Attributes.of(d=1)
    assert len(attributes) == 6


def test_a_block_where_none_may_stand_is_shown_by_its_brace() -> None:
    with pytest.raises(UserError) as caught:
        parse_module('module @m attributes { level = "traced" } { { a = 1 } }')
    assert "`{`" in render(caught.value.diagnostics[0]).splitlines()[0]


def test_parsing_leaves_the_garbage_collector_as_it_was() -> None:
    import gc

    assert gc.isenabled()
    assert isinstance(parse_module(text("{ a = 1 }")), Module)
    assert gc.isenabled()
    said("{ a = }")
    assert gc.isenabled()
    gc.disable()
    try:
        module = parse_module(text("{ a = 1 }"))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert replace(module, level=Level.TRACED) == module
