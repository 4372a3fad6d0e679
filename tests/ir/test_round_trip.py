"""The text says all of a module."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.nodes import Cascade, Graph, GraphInput, Level, Module, Phase, TensorType
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value
from arachnec.ir.verify import verify
from tests.ir.strategies import any_module, right_module

MODULES = settings(max_examples=3 * settings.default.max_examples)  # over all levels
levels = st.sampled_from(list(Level))


@MODULES
@given(levels.flatmap(any_module))
def test_parse_of_print_is_the_module_and_prints_the_same(module: Module) -> None:
    text = print_module(module)
    again = parse_module(text)
    assert again == module
    assert repr(again) == repr(module)  # 1, 1.0 and true are equal in Python, and are not the same here
    assert print_module(again) == text


@MODULES
@given(levels.flatmap(right_module))
def test_right_modules_verify_before_and_after_their_text(module: Module) -> None:
    assert verify(module) == ()
    again = parse_module(print_module(module))
    assert again == module
    assert verify(again) == ()


def carrying(value: Value) -> Module:
    return Module("m", Level.TRACED, attrs=Attributes((("a", value),)))


def text_of(value: Value) -> str:
    return print_module(carrying(value)).partition("a = ")[2].rpartition(" } {")[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((4, 5, 6, 7, 12, 13), "[4..7, 12, 13]"),
        ((3, 2, 1), "[3, 2, 1]"),
        (tuple(range(70_000)), "[0..65535, 65536..69999]"),
        ((True, False), "[true, false]"),
        (1.0, "1.0"),
        (1e-9, "1e-09"),
        (Quantity(4950.0, "ms"), "4950 ms"),
        (Quantity(0.5, "GB/s"), "0.5 GB/s"),
        (Formula((Term(2.0, (("S", 2), ("B", 1))), Term(-1.5)), "ms"), "2*B*S^2 - 1.5 ms"),
        (Formula((Term(1.5),), "ms"), "(1.5) ms"),
        (Formula((), "GiB"), "() GiB"),
        (Symbol("Block"), "@Block"),
        (Symbol("a b"), '@"a b"'),
        ('say "hi"\n', '"say \\"hi\\"\\n"'),
        ("视频", '"视频"'),
        ((), "[]"),
        (Attributes.of(b=(Symbol("x"), 1)), "{ b = [@x, 1] }"),
    ],
)
def test_values_are_written_so(value: Value, text: str) -> None:
    assert text_of(value) == text
    assert parse_module(print_module(carrying(value))) == carrying(value)


def test_long_lists_of_graph_inputs_break_between_inputs_only() -> None:
    kind = TensorType("f32", ("B", "S", 1536))
    graph = Graph("Block", tuple(GraphInput(f"in, %{i}", kind) for i in range(9)), (), ("in, %0",))
    module = Module("m", Level.TRACED, graphs=(graph,))
    assert parse_module(print_module(module)) == module


@pytest.mark.parametrize("value", [math.inf, math.nan, Quantity(-math.inf, "ms"), Formula((Term(math.nan),), "ms")])
def test_numbers_that_are_not_finite_have_no_text(value: Value) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        print_module(carrying(value))


def test_a_lone_surrogate_has_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        print_module(carrying("\ud800"))


def test_hand_written_text_may_break_lines_and_hold_comments() -> None:
    text = """// a module
    module @m attributes { level = "partitioned", } { // its head
      %0 = train @dit clips [
        0, // the first
        1] : 2 x 64
      { times = [[1, 5 ms], [2, 3 ms],], }
    }"""
    times = ((1, Quantity(5.0, "ms")), (2, Quantity(3.0, "ms")))
    cascade = Cascade("0", Phase.TRAIN, "dit", (0, 1), 2, 64, 0, (), Attributes.of(times=times))
    assert parse_module(text) == Module("m", Level.PARTITIONED, cascades=(cascade,))


def test_a_formula_may_be_written_in_any_order() -> None:
    text = 'module @m attributes { level = "traced", a = S*2*B + S^2*3 - 4 ms } {}'
    terms = (Term(2.0, (("B", 1), ("S", 1))), Term(3.0, (("S", 2),)), Term(-4.0))
    assert parse_module(text).attrs["a"] == Formula(terms, "ms")


def test_every_node_and_attribute_knows_where_it_stood() -> None:
    text = 'module @m attributes { level = "traced", a = 1 } {\n  stage @dit trained {\n    dtype = "f32" }\n}'
    module = parse_module(text, "a.cascade")
    stage = module.stages[0]
    assert stage.span is not None
    assert (stage.span.file, stage.span.line, stage.span.column, stage.span.end_column) == ("a.cascade", 2, 3, 21)
    where = stage.attrs.span("dtype")
    assert where is not None
    assert (where.line, where.column, where.end_column) == (3, 5, 10)


def test_ten_thousand_cascades_survive_printing_and_parsing() -> None:
    attrs = Attributes.of(
        degree=8,
        start=Quantity(0.25, "ms"),
        end=Quantity(4950.125, "ms"),
        ranks=(*range(4, 8), *range(12, 16)),
        ulysses=4,
        ring=2,
    )
    one = Cascade("0", Phase.TRAIN, "dit", (7,), 1, 118800, 256, ("1", "2"), attrs)
    module = Module("m", Level.PLACED, cascades=tuple(replace(one, name=str(i)) for i in range(10_000)))
    assert parse_module(print_module(module)) == module
