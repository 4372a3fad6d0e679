"""The fuse pass: regions that are legal, whatever the graph, and kernels found by what is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.fusion.fused_graph import fuse_graph
from arachnec.fusion.graph import FusionGraph
from arachnec.fusion.match import match_region
from arachnec.fusion.shape_constraints import constraints_of
from arachnec.ir.nodes import Graph, GraphInput, GraphOp, Level, Module, TensorType, integer
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula
from arachnec.ir.verify import check_module
from arachnec.passes.fuse import Fuse
from arachnec.passes.infra.pipeline import Pipeline

ROWS = TensorType("f32", ("B", "S", 64))
VECTOR = TensorType("f32", ("B", 1, 64))
LAST = Attributes.of(normalized_shape=(64,), eps=1e-6)

UNARY = ("aten.neg.default", "aten.silu.default", "aten.layer_norm.default", "mine.op.default", "aten.linear.default")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph of element-wise operations, norms, sums over tokens, joins, products and operations nobody knows."""
    inputs = (GraphInput("x", ROWS), GraphInput("v", VECTOR), GraphInput("w", TensorType("f32", (64, 64))))
    rows, vectors, ops = ["x"], ["v"], []
    for number in range(draw(st.integers(1, 14))):
        name, kind = f"op_{number}", draw(st.sampled_from(["unary", "binary", "scale", "sum", "vector", "stack"]))
        a, b, v = draw(st.sampled_from(rows)), draw(st.sampled_from(rows)), draw(st.sampled_from(vectors))
        if kind == "unary":
            target = draw(st.sampled_from(UNARY))
            operands = (a, "w") if "linear" in target else (a,)
            ops.append(GraphOp(name, target, operands, ROWS, LAST if "norm" in target else Attributes()))
        elif kind == "stack":
            ops.append(GraphOp(name, "aten.add.Tensor", (a, b), ROWS))
        elif kind in ("binary", "scale"):
            ops.append(GraphOp(name, "aten.mul.Tensor", (a, b if kind == "binary" else v), ROWS))
        elif kind == "sum":
            ops.append(GraphOp(name, "aten.sum.dim_IntList", (a,), VECTOR, Attributes.of(dim=(1,), keepdim=True)))
        else:
            ops.append(GraphOp(name, "aten.add.Tensor", (v,), VECTOR, Attributes.of(other=1)))
        (vectors if kind in ("sum", "vector") else rows).append(name)
    outputs = tuple(
        dict.fromkeys([ops[-1].name, *draw(st.lists(st.sampled_from([op.name for op in ops]), max_size=2))])
    )
    return Graph("Block", inputs, tuple(ops), outputs)


@settings(max_examples=80, deadline=None)
@given(graph=graphs())
def test_regions_of_any_graph_are_disjoint_can_run_and_save_something(graph: Graph) -> None:
    module = Fuse().run(Module("m", Level.TRACED, graphs=(graph,)))
    check_module(module)  # disjoint, and no region waits for itself
    assert parse_module(print_module(module)) == module
    for region in module.graphs[0].fused:
        before, after = region.attrs["bytes_before"], region.attrs["bytes_after"]
        launches = integer(region.attrs["launches_before"]), integer(region.attrs["launches_after"])
        assert isinstance(before, Formula) and isinstance(after, Formula)
        assert launches[1] < launches[0] or after(B=1, S=32760) < before(B=1, S=32760)
        assert after(B=1, S=32760) <= before(B=1, S=32760)
        assert not {op.target for op in graph.ops if op.name in region.ops} & {"mine.op.default", "aten.linear.default"}


@settings(max_examples=20, deadline=None)
@given(graph=graphs())
def test_fusing_twice_is_fusing_once(graph: Graph) -> None:
    once = fuse_graph(graph)
    assert fuse_graph(once) == once
    assert replace(once, fused=(), attrs=once.attrs.updated(alone=None)) == graph


def test_fuse_stands_in_a_pipeline_by_its_name() -> None:
    assert str(Pipeline.parse("fuse")) == "fuse"


def block(*ops: tuple[str, str, tuple[str, ...], TensorType, dict[str, object]]) -> Graph:
    nodes = tuple(
        GraphOp(name, f"aten.{target}", operands, kind, Attributes.of(**attrs))  # type: ignore[arg-type]
        for name, target, operands, kind, attrs in ops
    )
    inputs = tuple(
        GraphInput(name, kind)
        for name, kind in (("x", ROWS), ("r", ROWS), ("s", VECTOR), ("b", VECTOR), ("g", VECTOR),
                           ("c", TensorType("f32", (64,))))
    )  # fmt: skip
    return Graph("Block", inputs, nodes, (nodes[-1].name,))


NORM = ("n", "layer_norm.default", ("x",), ROWS, {"normalized_shape": (64,), "eps": 1e-6})
FACTOR = ("f", "add.Tensor", ("s",), VECTOR, {"other": 1})


def kernels(graph: Graph) -> list[str]:
    return [str(region.attrs["kernel"]) for region in fuse_graph(graph).fused]


@pytest.mark.parametrize("swapped", [False, True])
def test_operands_may_stand_in_either_order(swapped: bool) -> None:
    product, total = (("n", "f"), ("m", "b")) if not swapped else (("f", "n"), ("b", "m"))
    graph = block(NORM, FACTOR, ("m", "mul.Tensor", product, ROWS, {}), ("y", "add.Tensor", total, ROWS, {}))
    assert kernels(graph) == ["norm_modulate"]


def test_a_factor_that_is_not_one_plus_something_is_no_modulation() -> None:
    graph = block(NORM, ("m", "mul.Tensor", ("n", "s"), ROWS, {}), ("y", "add.Tensor", ("m", "b"), ROWS, {}))
    assert kernels(graph) == ["generated"]


def test_a_norm_that_is_read_elsewhere_too_is_generated() -> None:
    graph = block(
        NORM, FACTOR, ("m", "mul.Tensor", ("n", "f"), ROWS, {}), ("y", "add.Tensor", ("m", "b"), ROWS, {}),
        ("z", "add.Tensor", ("y", "n"), ROWS, {}),
    )  # fmt: skip
    assert kernels(graph) == ["generated"]


def test_gate_and_residual_are_told_apart_by_their_shapes() -> None:
    graph = block(
        ("gated", "mul.Tensor", ("g", "x"), ROWS, {}), ("h", "add.Tensor", ("gated", "r"), ROWS, {}),
        ("n", "layer_norm.default", ("h",), ROWS, {"normalized_shape": (64,), "eps": 1e-6}), FACTOR,
        ("m", "mul.Tensor", ("n", "f"), ROWS, {}), ("y", "add.Tensor", ("b", "m"), ROWS, {}),
    )  # fmt: skip
    known = FusionGraph(graph, constraints_of(graph))
    (match,) = match_region(known, (1 << len(graph.ops)) - 1)
    assert match.kernel == "gate_residual_norm_modulate"
    assert match.operands == {"branch": "x", "residual": "r", "gate": "g", "scale": "s", "shift": "b"}
    assert match.results == {"h": "h", "y": "y"}


def test_bias_and_gelu_are_one_kernel() -> None:
    graph = block(
        ("t", "add.Tensor", ("x", "c"), ROWS, {}), ("y", "gelu.default", ("t",), ROWS, {"approximate": "tanh"})
    )
    assert kernels(graph) == ["bias_gelu"]


def test_a_gate_without_a_norm_is_a_kernel_of_its_own() -> None:
    graph = block(("m", "mul.Tensor", ("g", "x"), ROWS, {}), ("y", "add.Tensor", ("r", "m"), ROWS, {}))
    assert kernels(graph) == ["gate_residual"]


def test_a_vector_per_position_is_no_gate() -> None:
    """[S, 64] beside rows [B, S, 64] is neither per sample nor per token."""
    graph = block(("m", "mul.Tensor", ("t", "x"), ROWS, {}), ("y", "add.Tensor", ("r", "m"), ROWS, {}))
    places = GraphInput("t", TensorType("f32", ("S", 64)))
    assert kernels(replace(graph, inputs=(*graph.inputs, places))) == ["generated"]


@pytest.mark.parametrize("read_twice", [False, True])
def test_gelu_takes_the_bias_of_a_layer_that_nobody_else_reads(read_twice: bool) -> None:
    more = (("z", "linear.default", ("l", "w"), ROWS, {}),) if read_twice else ()
    graph = block(
        ("l", "linear.default", ("x", "w", "c"), ROWS, {}), ("y", "gelu.default", ("l",), ROWS, {}), *more
    )  # fmt: skip
    weight = GraphInput("w", TensorType("f32", (64, 64)))
    graph = replace(graph, inputs=(*graph.inputs, weight), outputs=tuple(dict.fromkeys(("y", graph.ops[-1].name))))
    assert kernels(graph) == ([] if read_twice else ["bias_gelu"])


def test_the_backward_of_a_region_reads_its_inputs_and_results_once() -> None:
    """dy, x in, dx out, where autograd moves the product and the sum apart, and keeps two tensors for one."""
    graph = block(NORM, FACTOR, ("m", "mul.Tensor", ("n", "f"), ROWS, {}), ("y", "add.Tensor", ("m", "b"), ROWS, {}))
    (region,) = fuse_graph(graph).fused
    rows = 4 * 64 * 32760 / 2**30

    def at(name: str) -> float:
        formula = region.attrs[name]
        assert isinstance(formula, Formula)
        return formula(B=1, S=32760) / rows

    assert at("backward_after") == pytest.approx(3, abs=0.01)
    assert at("backward_before") == pytest.approx(11, abs=0.01)
    assert (at("kept_before"), at("kept_after")) == (pytest.approx(2, abs=0.01), pytest.approx(1, abs=0.01))


def test_every_reason_names_a_neighbour() -> None:
    graph = block(
        NORM, FACTOR, ("m", "mul.Tensor", ("n", "f"), ROWS, {}), ("l", "linear.default", ("m", "c"), ROWS, {})
    )
    (region,) = fuse_graph(graph).fused
    assert region.attrs["stopped"] == (
        "`%l` reads its result: products, convolutions and attention are kernels of their own",
    )


# norms, gates and rotary positions in the forms in which models write them


def heads(*ops: tuple[str, str, tuple[str, ...], TensorType, dict[str, object]]) -> Graph:
    """Of ``x`` [B, S, 4, 16], tables ``cos`` and ``sin`` of half its width, a weight ``g`` and numbers ``turns``."""
    graph = block(*ops)
    inputs = (
        GraphInput("x", HEADS), GraphInput("g", TensorType("f32", (16,))),
        GraphInput("cos", TensorType("f32", ("S", 1, 8))), GraphInput("sin", TensorType("f32", ("S", 1, 8))),
        GraphInput("turns", TensorType("complex64", ("S", 1, 8))),
    )  # fmt: skip
    return replace(graph, inputs=inputs)


HEADS, HALF = TensorType("f32", ("B", "S", 4, 16)), TensorType("f32", ("B", "S", 4, 8))
PAIRS, NUMBERS = TensorType("f32", ("B", "S", 4, 8, 2)), TensorType("complex64", ("B", "S", 4, 8))
ROOT = TensorType("f32", ("B", "S", 1))
Step = tuple[str, str, tuple[str, ...], TensorType, dict[str, object]]
QK_NORM: Step = ("n", "rms_norm.default", ("x", "g"), HEADS, {"normalized_shape": (16,)})


def rotated(join: str) -> tuple[Step, ...]:
    return (
        ("ac", "mul.Tensor", ("a", "cos"), HALF, {}), ("bs", "mul.Tensor", ("b", "sin"), HALF, {}),
        ("one", "sub.Tensor", ("ac", "bs"), HALF, {}),
        ("as", "mul.Tensor", ("a", "sin"), HALF, {}), ("bc", "mul.Tensor", ("b", "cos"), HALF, {}),
        ("two", "add.Tensor", ("bc", "as"), HALF, {}),
        ("y", f"{join}.default", ("one", "two"), PAIRS if join == "stack" else HEADS, {"dim": -1}),
    )  # fmt: skip


def cut(name: str, **attrs: object) -> Step:
    return (name, "slice.Tensor", ("n",), HALF, {"dim": 3, **attrs})


@pytest.mark.parametrize(
    "ops",
    [
        (QK_NORM, cut("a", start=0, step=2), cut("b", start=1, step=2), *rotated("stack")),
        (QK_NORM, cut("a", start=0, end=8), cut("b", start=8), *rotated("cat")),
        (
            QK_NORM, ("p", "reshape.default", ("n",), PAIRS, {"shape": ("B", "S", 4, 8, 2)}),
            ("z", "view_as_complex.default", ("p",), NUMBERS, {}), ("y", "mul.Tensor", ("z", "turns"), NUMBERS, {}),
        ),
    ],
    ids=["every second place", "halves", "complex numbers"],
)  # fmt: skip
def test_rotary_positions_are_found_however_pairs_are_written(ops: tuple[Step, ...]) -> None:
    assert kernels(heads(*ops)) == ["norm_rope"]


def test_halves_stacked_are_no_rotation_of_neighbours() -> None:
    ops = (QK_NORM, cut("a", start=0, end=8), cut("b", start=8), *rotated("stack"))
    assert kernels(heads(*ops)) == ["generated"]


def written_out(*steps: Step) -> tuple[Step, ...]:
    """A norm by its formula, modulated by a scale alone."""
    return (*steps, FACTOR, ("y", "mul.Tensor", ("n", "f"), ROWS, {}))


MEAN = {"dim": (-1,), "keepdim": True}
SQUARE: Step = ("q", "mul.Tensor", ("x", "x"), ROWS, {})
SPREAD: tuple[Step, ...] = (("v", "mean.dim", ("q",), ROOT, MEAN), ("e", "add.Tensor", ("v",), ROOT, {"other": 1e-6}))
CENTRED: Step = ("k", "sub.Tensor", ("x", "u"), ROWS, {})
FIRST: Step = ("u", "mean.dim", ("x",), ROOT, MEAN)


@pytest.mark.parametrize(
    "ops",
    [
        (SQUARE, *SPREAD, ("r", "sqrt.default", ("e",), ROOT, {}), ("n", "div.Tensor", ("x", "r"), ROWS, {})),
        (SQUARE, *SPREAD, ("r", "pow.Tensor_Scalar", ("e",), ROOT, {"exponent": -0.5}),
         ("n", "mul.Tensor", ("r", "x"), ROWS, {})),
        (FIRST, ("v", "var.correction", ("x",), ROOT, {"correction": 0, **MEAN}), SPREAD[1], CENTRED,
         ("r", "sqrt.default", ("e",), ROOT, {}), ("n", "div.Tensor", ("k", "r"), ROWS, {})),
        (FIRST, CENTRED, ("q", "pow.Tensor_Scalar", ("k",), ROWS, {"exponent": 2}), *SPREAD,
         ("r", "rsqrt.default", ("e",), ROOT, {}), ("n", "mul.Tensor", ("k", "r"), ROWS, {})),
    ],
    ids=["x / rms", "x times rms^-0.5", "variance", "mean of centred squares"],
)  # fmt: skip
def test_norms_are_found_by_their_formula(ops: tuple[Step, ...]) -> None:
    assert kernels(block(*written_out(*ops))) == ["norm_modulate"]


@pytest.mark.parametrize(
    "wrong",
    [
        (FIRST, ("v", "var.correction", ("x",), ROOT, {"correction": 1, **MEAN})),
        (("u", "mean.dim", ("y0",), ROOT, MEAN), ("v", "var.correction", ("x",), ROOT, {"correction": 0, **MEAN})),
    ],
    ids=["unbiased variance", "mean of something else"],
)  # fmt: skip
def test_what_only_looks_like_a_norm_is_generated(wrong: tuple[Step, ...]) -> None:
    ops = (*wrong, SPREAD[1], CENTRED, ("r", "sqrt.default", ("e",), ROOT, {}),
           ("n", "div.Tensor", ("k", "r"), ROWS, {}))  # fmt: skip
    graph = block(*written_out(*ops))
    assert kernels(replace(graph, inputs=(*graph.inputs, GraphInput("y0", ROWS)))) == ["generated"]


def test_arithmetic_that_changes_nothing_is_looked_through() -> None:
    """Diffusers divides what attention returns by a factor that is 1."""
    graph = block(
        ("d", "div.Tensor", ("x",), ROWS, {"other": 1.0}), ("m", "mul.Tensor", ("d", "g"), ROWS, {}),
        ("y", "add.Tensor", ("r", "m"), ROWS, {}),
    )  # fmt: skip
    graph = replace(graph, inputs=(*graph.inputs, GraphInput("g", VECTOR), GraphInput("r", ROWS)))
    assert kernels(graph) == ["gate_residual"]


def test_a_part_by_hand_gives_way_to_all_of_it_in_one_kernel() -> None:
    """Of a norm, a tanh and a sum after it: a call of the norm's kernel would write and read the row once more."""
    graph = block(
        NORM, ("w", "mul.Tensor", ("n", "c"), ROWS, {}), ("t", "tanh.default", ("w",), ROWS, {}),
        ("y", "add.Tensor", ("t", "x"), ROWS, {}),
    )  # fmt: skip
    assert kernels(graph) == ["generated"]


def test_a_norm_wider_than_the_kernels_rows_is_generated() -> None:
    from arachnec.fusion.match import WIDEST
    from arachnec.kernels.rowwise.row_launch import LARGEST_ROW

    assert WIDEST == LARGEST_ROW
    wide, row = TensorType("f32", ("B", "S", 8448)), TensorType("f32", ("B", 1, 8448))
    graph = block(
        ("n", "layer_norm.default", ("x",), wide, {"normalized_shape": (8448,), "eps": 1e-6}),
        ("f", "add.Tensor", ("a",), row, {"other": 1}), ("y", "mul.Tensor", ("n", "f"), wide, {}),
    )  # fmt: skip
    graph = replace(graph, inputs=(GraphInput("x", wide), GraphInput("a", row)))
    assert kernels(graph) == ["generated"]


def test_an_operation_in_no_region_says_why() -> None:
    graph = block(("l", "linear.default", ("x", "c"), ROWS, {}), ("y", "tanh.default", ("l",), ROWS, {}))
    assert fuse_graph(graph).attrs["alone"] == ("`%y`: nothing beside it could share its kernel",)
