"""A plan for GPUs takes the path that was faster when it was measured, and knows what learning takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.cost.sparse_attention import faster_sparse
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.passes.infra.pipeline import Pipeline

# Dense over sparse attention, forward, backward and choice, on one H200, heads of 128 (benchmarks/sparse/gpu_fit.py).
MEASURED = {
    (32_760, 12): {0.05: 3.63, 0.1: 1.91, 0.2: 1.71, 0.3: 1.27},
    (118_800, 4): {0.05: 5.97, 0.1: 3.35, 0.2: 2.14, 0.3: 1.50},
}
SIZES = {32_760: "81 x 480 x 832", 118_800: "129 x 720 x 1280"}


def planned(tokens: int, heads: int, device: str, density: float, options: str = "") -> Module:
    """One layer with so many heads of 128, and one clip, as far as costs."""
    width, size = 128 * heads, SIZES.get(tokens, "1 x 8 x 8")
    shape = f"bf16[B, {heads}, S, 128]"
    text = f"""module @m attributes {{ level = "traced" }} {{
  clip 0 : {size} text 0 tokens {tokens}
  stage @dit trained {{ params = 1000, dtype = "bf16", layers = [["blocks.0", 1000]], blocks = [[@Block, 1]], classes = [0], hidden = {width}, heads = {heads}, attentions = 1, flops = {4e-12 * width:.6g}*B*S^2 + 1e-06*B*S TFLOP, saved = 1e-9*B*S GiB, saved_recompute = 1e-9*B*S GiB, workspace = 1e-9*B*S GiB, traffic = 1e-9*B*S GiB, state = 2 GiB }}
  graph @Block (%q : {shape}, %k : {shape}, %v : {shape}) -> (%self) [
    %self = "aten.scaled_dot_product_attention.default"(%q, %k, %v) : {shape}
  ]
}}"""  # noqa: E501
    module = replace(parse_module(text), cluster=parse_cluster(f"1:{device}"))
    return Pipeline.parse(f"sparsify{{density={density}{options}}},partition{{policy=single}},annotate").run(module)


def is_sparse(module: Module) -> bool:
    return bool(sparse_layers(module.cascades[0]))


@pytest.mark.parametrize("device", ["h100-80g", "h200-141g"])
@pytest.mark.parametrize(("tokens", "heads"), MEASURED)
def test_the_path_of_a_plan_is_the_one_that_was_measured_faster(tokens: int, heads: int, device: str) -> None:
    paths = {density: is_sparse(planned(tokens, heads, device, density)) for density in MEASURED[tokens, heads]}
    assert paths == {density: ratio > 1 for density, ratio in MEASURED[tokens, heads].items()}


@settings(max_examples=40)
@given(
    tokens=st.integers(256, 200_000),
    heads=st.integers(1, 40),
    density=st.floats(0.01, 0.5),
    longer=st.floats(1.0, 4.0),
    thinner=st.floats(0.2, 1.0),
)
def test_a_layer_that_is_sparse_stays_so_for_longer_clips_and_less_dense_heads(
    tokens: int, heads: int, density: float, longer: float, thinner: float
) -> None:
    if is_sparse(planned(tokens, heads, "h100-80g", density)):
        assert is_sparse(planned(int(tokens * longer), heads, "h100-80g", density * thinner))


@pytest.mark.parametrize("device", ["h200-141g", "cpu"])
def test_a_step_takes_as_much_longer_as_its_predictors_learn_whatever_their_path(device: str) -> None:
    learns, without = (planned(32_760, 12, device, 0.1, option) for option in ("", ",learning_speed=1e9"))
    assert is_sparse(learns) and is_sparse(without), "the path does not ask what is learned on both"
    times = [CostModel(module).time(module.cascades[0], 1) for module in (learns, without)]
    dense = planned(32_760, 12, device, 1.0)
    assert times[0] > times[1]
    assert faster_sparse(dense.stages[0], 32_760, 0) == ()
    assert CostModel(dense).time(dense.cascades[0], 1) > times[0]
    twice = planned(32_760, 12, device, 0.1, ",learning_speed=0.5")
    took = CostModel(twice).time(twice.cascades[0], 1)
    assert took - times[1] == pytest.approx(2 * (times[0] - times[1]), rel=1e-6)
