"""What a graph's operations say of its sizes."""

import pytest
import sympy

from arachnec.fusion.shape_constraints import Range, constraints_of, likely_sizes, parse_size
from arachnec.ir.nodes import Clip, Graph, GraphInput, GraphOp, Level, Module, TensorType
from arachnec.ir.values import Attributes

B, S, N0 = (sympy.Symbol(name, integer=True, positive=True) for name in ("B", "S", "N0"))


def graph(inputs, *ops):
    nodes = tuple(
        GraphOp(name, target, operands, TensorType("f32", dims), Attributes()) for name, target, operands, dims in ops
    )
    return Graph("g", tuple(GraphInput(n, TensorType("f32", d)) for n, d in inputs.items()), nodes, (ops[-1][0],))


def test_a_sum_makes_two_sizes_one():
    known = constraints_of(
        graph({"x": ("B", "S", 8), "y": ("B", "N0", 8)}, ("z", "aten.add.Tensor", ("x", "y"), ("B", "S", 8)))
    )
    assert known.equal == {N0: S}
    assert known.shapes["x"][1] == known.shapes["y"][1]
    assert known.count("y") == known.count("z")


def test_a_broadcast_makes_nothing_equal():
    known = constraints_of(
        graph({"x": ("B", "S", 8), "y": ("B", 1, 8)}, ("z", "aten.add.Tensor", ("x", "y"), ("B", "S", 8)))
    )
    assert not known.equal
    assert known.count("x") != known.count("y")


def test_products_are_followed_through_reshapes():
    known = constraints_of(graph({"x": ("B", "N0", 8)}, ("z", "aten.reshape.default", ("x",), ("B", "S", 4, 8))))
    assert known.equal == {N0: 4 * S}
    assert known.divisor(known.shapes["x"][1]) == 4
    assert known.count("x") == known.count("z")


def test_a_size_that_is_split_evenly_is_known_to_divide():
    known = constraints_of(graph({"x": ("B", "S", 8)}, ("z", "aten.reshape.default", ("x",), ("B", "S//4", 4, 8))))
    assert known.divisor(S) == 4
    assert known.divisor(B * S * 6) == 24


def test_a_product_of_a_weight_fixes_its_inner_size():
    known = constraints_of(
        graph({"x": ("B", "S", "N0"), "w": (16, 24)}, ("z", "aten.linear.default", ("x", "w"), ("B", "S", 16)))
    )
    assert known.equal == {N0: 24}


@pytest.mark.parametrize(
    ("text", "at_nine"),
    [("2*S", 18), ("S + 3", 12), ("(S + 1)//2", 5), ("Max(1, S)", 9), ("S^2", 81), ("-S", -9), (7, 7)],
)
def test_sizes_are_read_as_the_ir_writes_them(text, at_nine):
    assert parse_size(text).subs(S, 9) == at_nine


def test_what_cannot_be_read_is_a_size_of_its_own():
    assert parse_size("u0.foo") != parse_size("u1.foo")


def test_likely_sizes_are_those_of_the_clips():
    clips = tuple(Clip(i, 9, 8, 8, text, tokens) for i, (text, tokens) in enumerate([(7, 100), (9, 1560), (8, 900)]))
    assert likely_sizes(Module("m", Level.TRACED, clips=clips))["S"] == Range(100, 900, 1560)
    assert likely_sizes(Module("m", Level.TRACED, clips=clips))["T"] == Range(7, 8, 9)
