"""The fuse pass: regions that are legal, whatever the graph, and kernels found by what is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.nodes import Graph, GraphInput, GraphOp, Level, Module, TensorType, integer
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula
from arachnec.ir.verify import check_module
from arachnec.passes.fuse import Fuse, fuse_graph
from arachnec.passes.fuse_graph import FusionGraph
from arachnec.passes.fuse_match import match_region
from arachnec.passes.pipeline import Pipeline
from arachnec.passes.shape_constraints import constraints_of

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
    assert replace(once, fused=()) == graph


def test_fuse_stands_in_a_pipeline_by_its_name() -> None:
    assert str(Pipeline.parse("fuse")) == "fuse"


def block(*ops: tuple[str, str, tuple[str, ...], TensorType, dict[str, object]]) -> Graph:
    made = tuple(
        GraphOp(name, f"aten.{target}", operands, kind, Attributes.of(**attrs))  # type: ignore[arg-type]
        for name, target, operands, kind, attrs in ops
    )
    inputs = tuple(
        GraphInput(name, kind)
        for name, kind in (("x", ROWS), ("r", ROWS), ("s", VECTOR), ("b", VECTOR), ("g", VECTOR),
                           ("c", TensorType("f32", (64,))))
    )  # fmt: skip
    return Graph("Block", inputs, made, (made[-1].name,))


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
    assert region.attrs["stopped"] == ("`%l`: reads its result: compute-intensive",)
