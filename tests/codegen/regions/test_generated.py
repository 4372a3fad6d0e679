"""Regions in generated Triton: right against float64, and compiled as often as there are variants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from arachnec.codegen.fused_block import generated_or_compiled
from arachnec.codegen.triton.index import Index, Space, Unsupported, at_least, finest
from arachnec.codegen.triton.kernel import load_kernel
from arachnec.codegen.triton.lines import tiles_of
from arachnec.codegen.triton.region import Generated
from arachnec.codegen.triton.region import generated as generated_around
from arachnec.kernels.rowwise import gate_residual, norm_launch, row_launch
from arachnec.kernels.rowwise.norm_plain import Vectors
from arachnec.kernels.rowwise.row_groups import RowGroups
from benchmarks.kernels.compile_estimate import Recorder
from tests.codegen.regions.generated_cases import CASES, sized
from tests.codegen.regions.generated_cases import region as case_region
from tests.kernels.triton_interpreter import in_interpreter
from tests.slow import quick

ROUNDING = {"fp64": 1e-14, "fp32": 4e-6, "bf16": 2e-2, "fp16": 3e-3}


@pytest.mark.parametrize("part", quick(["0/4", "1/4", "2/4", "3/4", "narrow", "blocks"], "0/4", "narrow", "blocks"))
def test_outputs_and_gradients_are_those_of_float64_to_rounding(part: str, tmp_path: Path) -> None:
    by_case = in_interpreter("tests.codegen.regions.interpreted_generated", part, str(tmp_path))
    assert len(by_case) >= 6
    wrong = {(case, k): e for case, errors in by_case.items() for k, e in errors.items() if not e <= ROUNDING[case[:4]]}
    assert not wrong


class NormTwice(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        normed = nn.functional.layer_norm(x, (64,))
        return normed, normed * scale


class Squashed(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.sigmoid(x) * scale


def region(module: nn.Module, *values: Tensor) -> torch.fx.GraphModule:
    batch, tokens = torch.export.Dim("B"), torch.export.Dim("S")
    shapes = tuple({0: batch, 1: tokens} if value.shape[1] != 1 else {0: batch} for value in values)
    return torch.export.export(module, values, dynamic_shapes=shapes, strict=False).graph_module


def shapes_of(count: int) -> list[tuple[int, int]]:
    choose = random.Random(0)
    sizes = {(choose.choice([1, 2, 3, 5]), choose.randint(2, 400)) for _ in range(4 * count)}
    return sorted(sizes)[:: max(1, len(sizes) // count)][:count]


def recorded(run: Generated) -> list[Recorder]:
    """Stand-ins for the kernels of a region, which keep what they are launched with."""
    cases = []
    for launcher in (*run.forward.launchers, *run.backward.launchers):
        for widest, source in launcher.sources.items():
            launcher.kernels[widest] = Recorder(load_kernel(source))
            cases.append(launcher.kernels[widest])
    return cases


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def called(run: Generated, values: list[Tensor]) -> None:
    results = run.forward(values)
    run.backward([*values, *(torch.randn_like(y) for y in results)])


@pytest.mark.usefixtures("cache")
def test_fifty_shapes_are_compiled_as_often_as_there_are_variants() -> None:
    """Dense rows, and rows of views that are not: two variants each way, compiled for compute capability 9.0."""
    generated = Generated(region(NormTwice(), torch.randn(3, 7, 64), torch.randn(3, 1, 64)))
    recorders = recorded(generated)
    assert len(recorders) == 2
    shapes = shapes_of(50)
    assert len(shapes) == 50
    for batch, tokens in shapes:
        for lanes in (64, 65):
            x, dy, dn = (torch.randn(batch, tokens, lanes)[..., :64] for _ in range(3))
            scale = torch.randn(batch, 1, 64)
            generated.forward((x, scale))
            generated.backward((x, scale, dn, dy))
    for recorder in recorders:
        assert len(recorder.calls) == 100
        assert len(recorder.variants()) == 2
        kept = {call[2]["DENSE"]: call for call in recorder.calls}
        recorder.calls[:] = kept.values()
        estimates = recorder.estimates()
        assert len(estimates) == 2
        assert all(0 < estimate.registers <= 255 and estimate.spilled == 0 for estimate in estimates)


class Attended(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 0.3, -1)


@pytest.mark.usefixtures("cache")
def test_rows_as_wide_as_a_run_says_are_held_whole_or_gone_over_in_blocks_by_a_guard() -> None:
    """Dense or not, two widths held whole, and blocks: at most six kernels each way for any shapes."""
    width = torch.export.Dim.DYNAMIC
    x = torch.randn(2, 3, 5)
    graph = torch.export.export(Attended(), (x,), dynamic_shapes=({1: width, 2: width},), strict=False).graph_module
    run = Generated(graph)
    recorded(run)
    choose = random.Random(1)
    widths = [choose.choice([3, 64, 500, 512, 513, 4096, 4100, 9000]) for _ in range(50)]
    for number, columns in enumerate(widths):
        for skip in (1, 2):
            values = torch.randn(2, 2 + number, columns * skip)[..., ::skip]
            called(run, [values])
    for launcher in (*run.forward.launchers, *run.backward.launchers):
        numbers = {widest: kernel.variants() for widest, kernel in launcher.kernels.items()}
        assert {widest: len(kernels) for widest, kernels in numbers.items()} == {512: 2, 4096: 2, 0: 2}
        for widest, kernel in launcher.kernels.items():
            rows = {call[2]["Q"] for call in kernel.calls}
            assert rows == {widest or 2048}


def tokens_of(name: str, dtype: torch.dtype, sizes: dict[str, int]) -> tuple[Generated, list[Tensor]]:
    function, shapes = CASES[name]
    values = [torch.randn(sized(shape, sizes)).to(dtype) for shape in shapes]
    return Generated(case_region(function, shapes, dtype)), values


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["joined", "tiles of heads", "wide sums"])
def test_kernels_for_bf16_compile_for_capability_90_without_spills(name: str) -> None:
    run, values = tokens_of(name, torch.bfloat16, {"B": 2, "S": 6, "T": 5})
    recorders = recorded(run)
    called(run, values)
    estimates = [estimate for recorder in recorders for estimate in recorder.estimates()]
    assert len(estimates) == len(recorders)
    assert all(0 < estimate.registers <= 255 and estimate.spilled == 0 for estimate in estimates)


@pytest.mark.usefixtures("cache")
def test_tokens_of_two_lengths_are_written_in_place_by_a_kernel_each() -> None:
    run, _ = tokens_of("joined", torch.float32, {"B": 2, "S": 6, "T": 5})
    for stage in (run.forward, run.backward):
        assert len(stage.launchers) == 2
    stores = [target.node for launcher in run.forward.launchers for target in launcher.stores]
    assert len(stores) == 4 and len(set(stores)) == 3


def test_hand_written_kernels_are_compiled_once_for_fifty_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = {
        (module, name): Recorder(getattr(module, name))
        for module, name in (
            (norm_launch, "norm_forward"), (norm_launch, "norm_backward"), (gate_residual, "gate_forward"),
            (gate_residual, "gate_backward"), (row_launch, "column_sums"),
        )
    }  # fmt: skip
    for (module, name), recorder in recorders.items():
        monkeypatch.setattr(module, name, recorder)
    for batch, tokens in shapes_of(50):
        rows, gate = torch.randn(batch * tokens, 64), torch.randn(batch, 64)
        groups, vectors = RowGroups(batch * tokens, batch), Vectors(None, None, gate, gate, gate)
        h, _, mean, rstd = norm_launch.forward(rows, rows, vectors, groups, True, 1e-6)
        norm_launch.backward(rows, rows, h, mean, rstd, rows, vectors, groups, True, True)
        gate_residual.launch_forward(rows, rows, gate, groups)
        gate_residual.launch_backward(rows, rows, gate, groups, True)
    counts = {name: len(recorder.variants()) for (_, name), recorder in recorders.items()}
    assert counts == {"norm_forward": 1, "norm_backward": 1, "gate_forward": 1, "gate_backward": 1, "column_sums": 2}


def test_equal_structures_are_one_kernel_whatever_the_sizes_they_were_traced_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = ((3, 7), (5, 11))
    regions = [Generated(region(Squashed(), torch.randn(b, s, 64), torch.randn(b, 1, 64))) for b, s in sizes]
    kernels = [launcher.kernel(0) for m in regions for launcher in m.forward.launchers]
    assert kernels[0] is kernels[1]
    (text,) = (path.read_text() for path in (tmp_path / "arachnec" / "generated").glob("forward_*.py"))
    assert "tl.exp(" in text and "tl.store(" in text


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * 2, 0.5, True) + x


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values * 2


@pytest.mark.parametrize(("module", "reason"), [(Dropped(), "is random"), (Sorted(), "sort")])
def test_what_no_template_covers_is_said_and_left_to_inductor(module: nn.Module, reason: str) -> None:
    graph = region(module, torch.randn(3, 7, 64))
    with pytest.raises(Unsupported, match=reason):
        Generated(graph)
    assert callable(generated_or_compiled(graph))


@pytest.mark.usefixtures("cache")
def test_operations_around_a_call_of_a_kernel_are_kernels_of_their_own() -> None:
    def kernel(x: Tensor, scale: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (64,)) * (1 + scale)

    traced = region(Before(), torch.randn(3, 7, 64), torch.randn(3, 1, 64))
    (norm,) = (node for node in traced.graph.nodes if "layer_norm" in node.name)
    norm.target, norm.args = kernel, (norm.args[0], traced.graph.find_nodes(op="placeholder")[1])
    traced.recompile()
    run: Any = generated_around(traced)
    names = [node.target for node in run.graph.nodes if node.op in ("call_module", "call_function")]
    assert names == ["fused_0", kernel, "fused_1"]


class Before(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return nn.functional.layer_norm(x + x.tanh(), (64,)).exp() * scale


@pytest.mark.parametrize(
    ("outer", "inner", "tiles", "most"),
    [(1, 5120, (5, 1), 0), (1, 3072, (3, 1), 0), (1, 1536, (3, 1), 0), (24, 96, (9, 1), 0), (40, 80, (15, 1), 0.2)],
)
def test_rows_waste_few_lanes_on_powers_of_two(outer: int, inner: int, tiles: tuple[int, int], most: float) -> None:
    tiling = tiles_of(outer, inner)
    assert tiling.outer_tiles * tiling.inner_tiles == tiles[0]
    assert tiling.lanes <= (1 + most) * outer * inner


def test_lanes_are_split_as_finely_as_all_shapes_ask_for() -> None:
    assert finest([(120,), (5, 24), (5, 12, 2)]) == (5, 12, 2)
    with pytest.raises(Unsupported):
        finest([(12,), (3, 4), (4, 3), (2, 6), (8,)])


def test_an_index_divides_without_remainder_or_not_at_all() -> None:
    lanes = Space((5, 12, 2), 0, 2)
    whole = Index((24, 2, 1), 0)
    assert lanes.split((5, 24)) == [Index((1, 0, 0), 0), Index((0, 2, 1), 0)]
    assert whole.quotient(lanes, 2) == (Index((12, 1, 0), 0), Index((0, 0, 1), 0))
    with pytest.raises(Unsupported):
        whole.quotient(lanes, 5)


def test_an_index_of_rows_divides_by_sizes_that_only_a_run_knows() -> None:
    batch, tokens = sympy.Symbol("B", integer=True, positive=True), sympy.Symbol("S", integer=True, positive=True)
    rows = Space((batch, tokens, 4), 2, 1)
    flat = Index((tokens, 1, 0), 0)
    assert flat.divided(rows, (batch, tokens)) == [Index((1, 0, 0), 0), Index((0, 1, 0), 0)]
    with pytest.raises(Unsupported):
        flat.quotient(rows, batch)
    assert at_least(batch * tokens, tokens) and not at_least(batch, tokens)
