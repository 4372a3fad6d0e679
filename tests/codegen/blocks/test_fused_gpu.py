"""On a GPU: fused blocks with the Triton kernels, generated regions, the executor, the benchmark of whole blocks."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from arachnec.codegen.fused_block import fuse_block
from arachnec.codegen.triton.region import Generated
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.captured import lifted
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.graph import block_graph
from tests.codegen.regions.generated_cases import CASES, region, sized
from tests.spmd.sequence_models import MODELS

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: Triton's kernels cannot run"),
]


def gradients(run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    given = [x.detach().clone().requires_grad_(number < 3) for number, x in enumerate(inputs)]
    (output, *_) = run(*given)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    gradients = torch.autograd.grad((output * weights).sum(), given[:3])
    return [output.detach(), *gradients]


@pytest.mark.parametrize("name", ["wan-12-heads", "cogvideox-rotary", "hunyuan-video", "ltx-video"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_fused_block_on_a_gpu_is_as_near_to_float64_as_eager_is(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = model.to("cuda", dtype)
    double = copy.deepcopy(model).double()
    # A rank captures its own model, so a graph has the device and the precision that it runs with.
    captured = capture_blocks(model, examples(name, dtype), verify=False).blocks[0]
    exact = capture_blocks(double, examples(name, torch.float64), verify=False).blocks[0]
    block, double_block = (m.get_submodule(captured.instances[0]) for m in (model, double))
    sizes = {B: 2, S: 24, T: 7}
    values = [torch.randn([int(d.subs(sizes)) for d in dims]).cuda() for dims in captured.input_dims]
    kept = [
        x if n.meta["val"].is_floating_point() else x > 0 for x, n in zip(values, captured.input_nodes, strict=True)
    ]
    inputs = [x.to(n.meta["val"].dtype) for x, n in zip(kept, captured.input_nodes, strict=True)]
    module = fuse_block(captured, fuse_graph(block_graph(captured)))
    wide = [x.to(n.meta["val"].dtype) for x, n in zip(inputs, exact.input_nodes, strict=True)]
    truth = gradients(lifted(exact, double_block), wide)
    eager, fused = (gradients(lifted(captured, block, form), inputs) for form in (None, module))
    for t, e, f in zip(truth, eager, fused, strict=True):
        usual, error = (torch.linalg.vector_norm(x.double() - t) for x in (e, f))
        assert error <= 1.1 * usual + 1e-3 * torch.linalg.vector_norm(t)


def examples(name: str, dtype: torch.dtype) -> list[object]:
    """The model's example calls, on the GPU in this precision."""

    def moved(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.to("cuda", dtype if value.is_floating_point() else value.dtype)

    return [
        replace(example, arguments={k: moved(v) for k, v in example.arguments.items()})
        for example in MODELS[name].examples()
    ]


@pytest.mark.parametrize("name", CASES)
def test_generated_kernels_on_a_gpu_are_those_of_float64_to_rounding(name: str) -> None:
    function, shapes = CASES[name]
    run = Generated(region(function, shapes, torch.float32, "cuda"))
    values = [torch.randn(sized(shape, {"B": 3, "S": 70, "T": 6})).cuda().requires_grad_() for shape in shapes]
    results = [run(*values), function(*(v.double() for v in values))]
    results_of_kernel, truth = (list(r) if isinstance(r, tuple) else [r] for r in results)
    out = [torch.randn_like(y) for y in results_of_kernel]
    results_of_kernel += torch.autograd.grad(results_of_kernel, values, out)
    truth += torch.autograd.grad(truth, values, [o.double() for o in out])
    for a, b in zip(results_of_kernel, truth, strict=True):
        assert float((a.double() - b).abs().max()) <= 1e-5 * float(b.abs().max())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_of_the_fused_pipeline_has_the_gradients_of_the_default_one(tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file

    outputs = []
    for pipeline in ("default", "fused"):
        folder, saved = tmp_path / pipeline, tmp_path / f"{pipeline}.safetensors"
        model, clips = ROOT / "examples" / "plain_dit.py", ROOT / "tests" / "acceptance" / "clips.jsonl"
        arachnec = [sys.executable, "-m", "arachnec"]
        compiled = [
            *arachnec,
            "compile",
            model,
            "--data",
            clips,
            "--cluster",
            "1:h200",
            "--passes",
            pipeline,
            "-o",
            folder,
        ]
        subprocess.run(compiled, check=True, timeout=240, cwd=ROOT)
        run = [*arachnec, "run", folder, "--steps", "1", "--dtype", dtype, "--save-gradients", saved]
        subprocess.run(run, check=True, timeout=240, cwd=ROOT)
        outputs.append(load_file(saved))
    for name, gradient in outputs[0].items():
        error = torch.linalg.vector_norm((outputs[1][name] - gradient).double())
        bound = 1e-4 if dtype == "fp32" else 5e-2
        assert error <= bound * torch.linalg.vector_norm(gradient.double()) + 1e-6, name


def test_the_benchmark_of_whole_blocks_checks_every_form(tmp_path: Path) -> None:
    output = tmp_path / "blocks.json"
    command = [sys.executable, "benchmarks/block_speed.py", "--tiny", "--repeats", "2", "--output", str(output)]
    subprocess.run(command, check=True, timeout=280, cwd=ROOT)
    assert len(json.loads(output.read_text())["results"]) == 4
