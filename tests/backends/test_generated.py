"""Regions in generated Triton: right against float64, and compiled as often as there are variants."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arachnec.backends.fused_block import generated_or_compiled
from arachnec.backends.generated_index import Index, Lanes, Unsupported, finest
from arachnec.backends.generated_region import Generated
from arachnec.kernels import gate_residual, norm_launch, row_launch
from arachnec.kernels.compile_estimate import Recorder
from arachnec.kernels.norm_plain import Vectors
from arachnec.kernels.row_groups import RowGroups

HERE = Path(__file__).parent
ROUNDING = {"fp64": 1e-14, "fp32": 2e-6}


def test_outputs_and_gradients_are_those_of_float64_to_rounding() -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "interpreted_generated.py")]
    path = {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 10
    wrong = {(case, k): e for case, errors in found.items() for k, e in errors.items() if not e <= ROUNDING[case[:4]]}
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
    found = {(choose.choice([1, 2, 3, 5]), choose.randint(2, 400)) for _ in range(4 * count)}
    return sorted(found)[:: max(1, len(found) // count)][:count]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        made = Generated(region(NormTwice(), torch.randn(3, 7, 64), torch.randn(3, 1, 64)))
        for stage in (made.forward, made.backward):
            assert stage.launcher is not None
            stage.launcher.__dict__["kernel"] = Recorder(stage.launcher.kernel)
    return made


def test_fifty_shapes_are_compiled_as_often_as_there_are_variants(generated: Generated) -> None:
    """Dense rows, and rows of views that are not: two variants each way, compiled for compute capability 9.0."""
    shapes = shapes_of(50)
    assert len(shapes) == 50
    for batch, tokens in shapes:
        for lanes in (64, 65):
            x, dy, dn = (torch.randn(batch, tokens, lanes)[..., :64] for _ in range(3))
            scale = torch.randn(batch, 1, 64)
            generated.forward((x, scale))
            generated.backward((x, scale, dn, dy))
    for stage in (generated.forward, generated.backward):
        assert stage.launcher is not None
        recorder: Any = stage.launcher.kernel
        assert len(recorder.calls) == 100
        assert len(recorder.variants()) == 2
        kept = {variant: call for call in recorder.calls for variant in [call[2]["DENSE"]]}
        recorder.calls[:] = kept.values()
        estimates = recorder.estimates()
        assert len(estimates) == 2
        assert all(0 < estimate.registers <= 255 and estimate.spilled == 0 for estimate in estimates)


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
    made = [Generated(region(Squashed(), torch.randn(b, s, 64), torch.randn(b, 1, 64))) for b, s in sizes]
    kernels = [m.forward.launcher.kernel for m in made if m.forward.launcher is not None]
    assert kernels[0] is kernels[1]
    (text,) = (path.read_text() for path in (tmp_path / "arachnec" / "generated").glob("forward_*.py"))
    assert "tl.exp(" in text and "tl.store(" in text


class AcrossTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def test_what_no_template_covers_is_said_and_left_to_inductor() -> None:
    graph = region(AcrossTokens(), torch.randn(3, 7, 64))
    with pytest.raises(Unsupported, match="beside a sum over rows"):
        Generated(graph)
    assert callable(generated_or_compiled(graph))


def test_lanes_are_split_as_finely_as_all_shapes_ask_for() -> None:
    assert finest([(120,), (5, 24), (5, 12, 2)]) == (5, 12, 2)
    with pytest.raises(Unsupported):
        finest([(12,), (3, 4), (4, 3), (2, 6), (8,)])


def test_an_index_divides_without_remainder_or_not_at_all() -> None:
    lanes = Lanes((5, 12, 2), 2)
    whole = Index((24, 2, 1), 0)
    assert lanes.split((5, 24)) == [Index((1, 0, 0), 0), Index((0, 2, 1), 0)]
    assert whole.quotient(lanes, 2) == (Index((12, 1, 0), 0), Index((0, 0, 1), 0))
    with pytest.raises(Unsupported):
        whole.quotient(lanes, 5)
