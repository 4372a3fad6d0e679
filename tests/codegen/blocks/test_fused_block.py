"""A block with fused regions is the block: same output, same gradients; compiled once for all shapes."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from arachnec.codegen import fused_block
from arachnec.codegen.fused_block import Region, fuse_block, fused_blocks
from arachnec.codegen.fused_calls import KERNELS
from arachnec.codegen.triton.region import Generated, generated
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.ir.nodes import Graph
from arachnec.tracing.blocks import CapturedBlock, CapturedModel, capture_blocks
from arachnec.tracing.captured import lifted
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.graph import block_graph
from tests.kernels.triton_interpreter import in_interpreter
from tests.slow import quick
from tests.spmd.sequence_models import (
    HEADS,
    MODELS,
    WIDTH,
    FusedBlock,
    ModelCase,
    PlainModel,
    Size,
    randomised,
    user_written,
)


class HalfRotatedBlock(FusedBlock):
    """Queries and keys normalised per head and rotated by halves, with tables as wide as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH // HEADS, 1e-6), nn.RMSNorm(WIDTH // HEADS, 1e-6)

    def attend(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, c // HEADS).unbind(2)
        places = torch.arange(s, device=x.device)[:, None] * torch.arange(1, c // HEADS // 2 + 1, device=x.device)
        angles = torch.cat([places, places], -1)[:, None] * 0.1
        q, k = (rotated(norm(t), angles) for t, norm in ((q, self.norm_q), (k, self.norm_k)))
        y = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return y.transpose(1, 2).flatten(2)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()


class WrittenOutNormsBlock(FusedBlock):
    """Norms by their formulas before and after what they enclose, complex rotation, gates as tanh, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(3 * WIDTH, 4 * WIDTH)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))
        self.head_gain = nn.Parameter(torch.ones(WIDTH // HEADS))
        self.wide, self.narrow = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, c // HEADS).unbind(2)
        angles = 0.1 * torch.arange(s, device=x.device)[:, None] * torch.arange(1, c // HEADS // 2 + 1)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (times(root_mean_square(t) * self.head_gain, turns) for t in (q, k))
        y = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, time: Tensor, text: Tensor, places: Tensor) -> Tensor:
        scale, gate, scale_2, gate_2 = self.time(time)[:, None].chunk(4, dim=-1)
        first, second, third, fourth = self.gains
        y = self.out(self.attend(root_mean_square(x + places) * first * (1 + scale)))
        x = x + gate.tanh() * (root_mean_square(y) * second)
        a, b = self.wide(root_mean_square(x) * third * (1 + scale_2)).chunk(2, dim=-1)
        return torch.addcmul(x, gate_2, centred(self.narrow(nn.functional.silu(a) * b)) * fourth)


def root_mean_square(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def centred(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6)


def times(x: Tensor, turns: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * turns).flatten(-2)


class TokenGatesBlock(FusedBlock):
    """Scale, shift and gate of every token, as slices of one table, and a factor of 1 on what attention returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 1, 3, WIDTH))

    def forward(self, x: Tensor, time: Tensor, text: Tensor, places: Tensor) -> Tensor:
        vectors = self.table + (time[:, None] + places.repeat(1, 1, 3)).unflatten(-1, (3, WIDTH))
        scale, shift, gate = (part.squeeze(2) for part in vectors.chunk(3, dim=2))
        x = x + gate * (self.out(self.attend(self.norm1(x) * (1 + scale) + shift)) / 1.0)
        return x + self.mlp(self.norm2(x)) / 1.0


CASES = {
    **MODELS,
    "written-out-norms": user_written(lambda: PlainModel(WrittenOutNormsBlock)),
    "token-gates": user_written(lambda: PlainModel(TokenGatesBlock)),
    "half-rotated": user_written(lambda: PlainModel(HalfRotatedBlock)),
}
DIFFUSERS = ("WanTransformerBlock", "CogVideoXBlock", "LTXVideoTransformerBlock", "HunyuanVideo")
TESTED = (
    "half-rotated",
    "written-out-norms",
    "token-gates",
    "wan-3-heads",
    "cogvideox-rotary",
    "hunyuan-video",
    "ltx-video",
    "plain",
    "joined",
    "written-out",
)
TORCHS_OWN_WARNINGS = "ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated"
SIZES = (Size(), Size(3, 6, 10, 11, 1))


Captured = tuple[ModelCase, nn.Module, CapturedModel, list[Graph]]


@functools.cache
def captured_case(name: str) -> Captured:
    """No test changes the model or its graphs."""
    torch.manual_seed(0)
    case = CASES[name]
    model = randomised(case.build())
    captured = capture_blocks(model, case.examples(), verify=False)
    return case, model, captured, [fuse_graph(block_graph(block)) for block in captured.blocks]


@pytest.fixture(scope="module", params=quick(TESTED, "wan-3-heads", "joined"))
def case(request: pytest.FixtureRequest) -> Captured:
    return captured_case(request.param)


def step(case: ModelCase, model: nn.Module, size: Size) -> tuple[Tensor, dict[str, Tensor]]:
    """The prediction, and every gradient."""
    model.zero_grad(set_to_none=True)
    output = model(**case.arguments(size))
    output = output if isinstance(output, Tensor) else output[0]
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernels", [False, True], ids=["own operations", "kernels"])
def test_output_and_every_gradient_are_those_of_the_model(case: Captured, kernels: bool) -> None:
    block, model, captured, graphs = case
    assert any(graph.fused for graph in graphs)
    for size in SIZES:
        size = size if block.text else Size(size.frames, size.height, size.width, Size().text, size.batch)
        expected, gradients = step(block, model, size)
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        with fused_blocks(model, captured, graphs, kernels=kernels, compiler=lambda region: region):
            results, fused = step(block, model, size)
        assert fused.keys() == gradients.keys()
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
        whole = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
        for name, gradient in gradients.items():
            error = torch.linalg.vector_norm(fused[name] - gradient)
            assert error <= 1e-5 * max(torch.linalg.vector_norm(gradient), 1e-3 * whole), name


def test_what_a_row_of_a_diffusers_block_needs_is_by_hand_except_where_tokens_are_joined(
    case: Captured,
) -> None:
    for graph in case[3]:
        if not graph.name.startswith(DIFFUSERS):
            continue
        for region in graph.fused:
            if region.attrs["schedule"] == "row" and "generated" in str(region.attrs["kernel"]):
                targets = {op.target for op in graph.ops if op.name in region.ops}
                assert "aten.cat.default" in targets
                assert region.attrs["launches_after"] == 2
        if graph.name != "HunyuanVideoTransformerBlock":  # whose queries and keys are joined with the text's
            assert any("norm_rope" in str(region.attrs["kernel"]) for region in graph.fused)


@pytest.mark.parametrize("name", quick(["hunyuan-video", "cogvideox-rotary", "cogvideox-sincos"], "hunyuan-video"))
def test_a_join_of_tokens_is_written_in_place_by_as_many_kernels_as_the_plan_counts(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, _, whole, (graph, *_) = captured_case(name)
    captured = whole.blocks[0]
    module = fuse_block(captured, graph, kernels=True, compiler=generated)
    counted = {r.name: r.attrs["launches_after"] for r in graph.fused if r.attrs["kernel"] == "generated"}
    assert counted
    for title, launches in counted.items():
        region = module.get_submodule(title)
        assert isinstance(region, Region) and isinstance(region._compiled, Generated)
        assert len(region._compiled.forward.launchers) == launches


@pytest.mark.parametrize("name", quick(["hunyuan-video", "cogvideox-sincos"], "cogvideox-sincos"))
def test_generated_joins_of_tokens_have_the_models_output_and_gradients(name: str, tmp_path: Path) -> None:
    errors = in_interpreter("tests.codegen.blocks.interpreted_joins", str(tmp_path), name)[name]
    assert errors["generated"] >= 2
    assert errors["output"] <= 1e-5 and errors["gradients"] <= 1e-5


def test_the_models_own_forward_is_back_afterwards(
    case: Captured,
) -> None:
    _, model, captured, graphs = case
    with fused_blocks(model, captured, graphs):
        inside = [vars(model.get_submodule(path)).get("forward") for path in captured.blocks[0].instances]
        assert all(inside)
    assert not any("forward" in vars(model.get_submodule(path)) for path in captured.blocks[0].instances)


@pytest.fixture(scope="module")
def wan() -> tuple[CapturedBlock, Graph, nn.Module]:
    _, model, whole, (graph, *_) = captured_case(next(name for name in MODELS if name.startswith("wan")))
    captured = whole.blocks[0]
    return captured, graph, model.get_submodule(captured.instances[0])


def inputs_of(captured: CapturedBlock, batch: int, tokens: int, text: int) -> list[Tensor]:
    sizes = {B: batch, S: tokens, T: text}
    return [torch.randn(*[int(d.subs(sizes)) for d in dims], requires_grad=True) for dims in captured.input_dims]


def test_kernels_stand_where_they_were_matched(wan: tuple[CapturedBlock, Graph, nn.Module]) -> None:
    captured, graph, _ = wan
    module = fuse_block(captured, graph, kernels=True, compiler=lambda region: region)
    inside = [node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    called = [node.target for node in inside if node.op == "call_function"]
    assert called.count(KERNELS["norm_modulate"].call) == 1
    assert called.count(KERNELS["gate_residual_norm_modulate"].call) == 2
    assert called.count(KERNELS["norm_rope"].call) == 2
    assert called.count(KERNELS["gate_residual"].call) == 1


def test_a_kernel_without_gradients_for_its_tables_is_not_called_on_trained_ones(
    wan: tuple[CapturedBlock, Graph, nn.Module],
) -> None:
    captured, graph, _ = wan
    trained = replace(captured, input_grads=(True,) * len(captured.input_grads))
    module = fuse_block(trained, graph, kernels=True, compiler=lambda region: region)
    inside = [node.target for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    assert KERNELS["norm_rope"].call not in inside
    assert KERNELS["norm_modulate"].call in inside


@pytest.mark.filterwarnings(*TORCHS_OWN_WARNINGS)
def test_fifty_shapes_are_compiled_as_often_as_there_are_variants(
    wan: tuple[CapturedBlock, Graph, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variants are one clip and several: a size of 1 broadcasts, so kernels for it differ."""
    captured, graph, block = wan
    monkeypatch.setattr(fused_block, "WORTH_COMPILING", 0)
    monkeypatch.setattr(fused_block, "FEWEST", 0)
    compiled: list[int] = []

    def compiler(region: fx.GraphModule) -> Callable[..., Any]:
        index = len(compiled)
        compiled.append(0)

        def backend(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            compiled[index] += 1
            return module.forward

        return torch.compile(region, dynamic=True, fullgraph=True, backend=backend)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    run = lifted(captured, block, fuse_block(captured, graph, kernels=False, compiler=compiler))
    choose = random.Random(0)
    shapes = [(choose.choice([1, 2, 3, 5]), 2 + 3 * k + choose.randint(0, 2), choose.randint(5, 40)) for k in range(50)]
    assert len(set(shapes)) == 50
    for shape in shapes:
        sum(output.sum() for output in run(*inputs_of(captured, *shape))).backward()  # type: ignore[union-attr]
    assert len(compiled) == sum(len(region.ops) > 1 for region in graph.fused)
    assert all(1 <= count <= 2 for count in compiled)


@pytest.mark.filterwarnings(*TORCHS_OWN_WARNINGS)
@pytest.mark.skipif(fused_block.default_compiler() is None, reason="no C++ compiler for Inductor")
def test_a_compiled_region_equals_its_operations_in_output_and_gradients(
    wan: tuple[CapturedBlock, Graph, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, graph, block = wan
    monkeypatch.setattr(fused_block, "WORTH_COMPILING", 0)
    monkeypatch.setattr(fused_block, "FEWEST", 0)
    torch._dynamo.reset()
    (kept,) = (region for region in graph.fused if "gate" in str(region.attrs["kernel"]) and len(region.ops) > 5)
    alone = Graph(graph.name, graph.inputs, graph.ops, graph.outputs, graph.attrs, fused=(kept,))
    module = fuse_block(captured, alone, kernels=False)
    (region,) = (part for part in module.children() if isinstance(part, Region))
    assert region._compiled is not None
    for shape in ((2, 24, 7), (3, 40, 9)):
        inputs = inputs_of(captured, *shape)
        results = []
        for form in (None, module):
            (output,) = lifted(captured, block, form)(*inputs)
            wanted = [*inputs, *block.parameters()]
            results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))


def test_small_regions_run_as_they_are(
    wan: tuple[CapturedBlock, Graph, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards in front of compiled code cost more than a few kilobytes of traffic."""
    captured, graph, block = wan
    compiled: list[fx.GraphModule] = []

    def compiler(region: fx.GraphModule) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            compiled.append(region)
            return region(*values)

        return run

    module = lifted(captured, block, fuse_block(captured, graph, kernels=False, compiler=compiler))
    inputs = inputs_of(captured, 2, 24, 7)
    as_it_is = module(*inputs)
    assert not compiled
    monkeypatch.setattr(fused_block, "WORTH_COMPILING", 0)
    torch.testing.assert_close(module(*inputs), as_it_is)
    assert compiled, "one that is worth it does not"


@pytest.mark.parametrize("kernels", [False, True], ids=["own operations", "kernels"])
def test_in_bfloat16_it_is_as_near_to_float64_as_eager_is(kernels: bool) -> None:
    captured, graph, block = captured_in_bfloat16("wan-3-heads")
    assert [region.attrs["kernel"] for region in graph.fused].count("gate_residual_norm_modulate") == 2
    torch.manual_seed(0)
    nodes = captured.input_nodes
    inputs = [x.detach().to(n.meta["val"].dtype) for x, n in zip(inputs_of(captured, 2, 24, 7), nodes, strict=True)]
    module = fuse_block(captured, graph, kernels=kernels, compiler=lambda region: region)
    double = copy.deepcopy(block).double()
    exact = gradients_of(lambda *x: (double(*x[:3], tuple(x[3:])),), [x.double() for x in inputs])
    eager = gradients_of(lifted(captured, block), inputs)
    fused = gradients_of(lifted(captured, block, module), inputs)
    for truth, mine, theirs in zip(exact, fused, eager, strict=True):
        error, usual = (torch.linalg.vector_norm(gradients.double() - truth) for gradients in (mine, theirs))
        assert error <= 1.1 * usual + 1e-3 * torch.linalg.vector_norm(truth)


@functools.cache
def captured_in_bfloat16(name: str) -> tuple[CapturedBlock, Graph, nn.Module]:
    torch.manual_seed(0)
    model = randomised(CASES[name].build()).to(torch.bfloat16)
    examples = [replace(e, arguments=_halved(e.arguments)) for e in CASES[name].examples()]
    captured = capture_blocks(model, examples, verify=False).blocks[0]
    return captured, fuse_graph(block_graph(captured)), model.get_submodule(captured.instances[0])


def _halved(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def gradients_of(run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the tokens, the caption and the modulation."""
    given = [x.clone().requires_grad_(number < 3) for number, x in enumerate(inputs)]
    (output,) = run(*given)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), given[:3])]
