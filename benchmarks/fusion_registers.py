"""Registers and shared memory of every fused region from Triton's own compiler, beside what the pass counts.

    python benchmarks/fusion_registers.py [examples/wan2_1_14b.py ...] [--tokens 32760] [--text 512]

Needs no GPU: each kernel that a region calls or generates is compiled for compute capability 9.0, for tensors without
storage. ``counted`` is the attribute ``registers`` of the IR: KiB of fp32 values that a program holds at its widest.
``of a program`` is what the compiler gives all threads of a program, in KiB, which includes addresses, loop counters,
and rows that are loaded ahead. A compilation takes 1 to 20 s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.codegen.fused_block import fuse_block
from arachnec.codegen.triton.index import Unsupported
from arachnec.codegen.triton.region import Generated
from arachnec.data.manifest import read_manifest
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.fusion.graph import FusionGraph
from arachnec.fusion.match import match_region
from arachnec.fusion.shape_constraints import constraints_of
from arachnec.fusion.walk import Match
from arachnec.ir.nodes import Fused, Graph
from arachnec.kernels.rowwise import bias_gelu, gate_residual, norm_launch, norm_modulate, rope_launch
from arachnec.kernels.rowwise.rope_plain import Rope
from arachnec.kernels.rowwise.row_groups import group_vectors, row_groups
from arachnec.models.file import load_model_file
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.captured import CapturedBlock
from arachnec.tracing.graph import DTYPES, block_graph
from arachnec.tracing.sample import example_calls

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from compile_estimate import Estimate, Recorder, estimate, specialisation
from estimates import recorded

ROOT = Path(__file__).resolve().parent.parent
TORCH = {name: dtype for dtype, name in DTYPES.items()}
Found = list[tuple[str, Estimate]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--clips", type=Path, default=ROOT / "examples" / "clips_480p.jsonl")
    parser.add_argument("--tokens", type=int, default=32760)
    parser.add_argument("--text", type=int, default=512)
    arguments = parser.parse_args()
    sizes = {"B": 1, "S": arguments.tokens, "T": arguments.text}
    print("| model | region | kernel | counted, KiB | pass | registers of a thread | of a program, KiB | spilled, bytes | shared, KiB | programs of a multiprocessor |")  # fmt: skip  # noqa: E501
    print("|---" * 10 + "|")
    for path in arguments.models or [ROOT / "examples" / "wan2_1_1_3b.py"]:
        file = load_model_file(path)
        clips = [clip for iteration in read_manifest(arguments.clips, batch=None).iterations for clip in iteration]
        with torch.device("meta"):
            model = file.build()
        for block in capture_blocks(model, example_calls(model, file, clips), verify=False).blocks:
            graph = fuse_graph(block_graph(block))
            generated = generated_estimates(block, graph, sizes)
            for region in graph.fused:
                estimates = [*matched_estimates(graph, region, sizes), *generated.get(region.name, [])]
                for way, e in estimates:
                    held = 4 * 32 * e.warps * e.registers / 1024
                    print(f"| {path.stem} {graph.name} | @{region.name} | {region.attrs['kernel']} | {region.attrs.get('registers', '-')} | {way} | {e.registers} | {held:.0f} | {e.spilled} | {e.shared / 1024:.1f} | {e.resident} |", flush=True)  # fmt: skip  # noqa: E501


def matched_estimates(graph: Graph, region: Fused, sizes: dict[str, int]) -> Found:
    """Of the hand-written kernels that a region calls, each once."""
    if region.attrs["kernel"] == "generated":
        return []
    known = FusionGraph(graph, constraints_of(graph))
    mask = sum(1 << known.index[name] for name in region.ops)
    worst: dict[Any, tuple[str, Estimate]] = {}
    for match in match_region(known, mask):
        tensors = {role: _meta(known, name, sizes) for role, name in match.operands.items()}
        with recorded() as recorders:
            _LAUNCH[match.kernel](match, tensors)
        for name, recorder in recorders.items():
            for _, given, options in recorder.calls if name != "column_sums" else ():
                key = name, specialisation(recorder.kernel, given, options)
                worst.setdefault(key, (name, estimate(recorder.kernel, given, options)))
    return list(worst.values())


def _meta(known: FusionGraph, name: str, sizes: dict[str, int]) -> Tensor:
    dims = [int(known.sizes.at(dim.subs({s: sizes.get(s.name, s) for s in dim.free_symbols}))) for dim in known.sizes.shapes[name]]  # fmt: skip  # noqa: E501
    return torch.empty(dims, dtype=TORCH.get(known.dtypes[name], torch.complex64), device="meta")


def _norm(match: Match, tensors: dict[str, Tensor]) -> None:
    x, side = tensors.get("x", tensors.get("residual")), tensors.get("branch")
    assert x is not None
    (scale, shift, gate), per_row = group_vectors(
        x, tuple(tensors.get(role) for role in ("scale", "shift", "gate")), None
    )
    rows, branch = x.reshape(-1, x.shape[-1]), None if side is None else side.reshape(-1, x.shape[-1])
    vectors = norm_modulate.vectors_of(tensors.get("weight"), tensors.get("bias"), scale, shift, gate)
    groups, layer = row_groups(rows.shape[0], (gate, scale, shift), None, per_row), match.options["norm"] == "layer"
    h, y, mean, rstd = norm_launch.forward(rows, branch, vectors, groups, layer, 1e-6)
    above = None if branch is None else h
    norm_launch.backward(y, above, h, mean, rstd, branch, vectors, groups, layer, True)


def _rope(match: Match, tensors: dict[str, Tensor]) -> None:
    heads, size = match.options["heads"], match.options["size"]
    assert isinstance(heads, int) and isinstance(size, int)
    x, weight = tensors["x"], tensors.get("weight")
    x = (x.transpose(1, 2) if match.options.get("layout") == "heads" else x).reshape(*_lead(x, match), heads, size)
    cos = tensors["cos"].flatten(0, -2) if "cos" in tensors else None
    if "freqs_cis" in tensors:
        cos = tensors["freqs_cis"].real.flatten(0, -2).float()
    across = weight is not None and heads != 1 and weight.shape[0] == heads * size
    rope = Rope(across, match.options["norm"] == "layer", match.options.get("interleaved", True) is True)
    y, mean, rstd = rope_launch.forward(x, weight, tensors.get("bias"), cos, cos, rope, 1e-6)
    rope_launch.backward(y, x, mean, rstd, weight, cos, cos, rope, weight is not None, "bias" in tensors)


def _lead(x: Tensor, match: Match) -> tuple[int, int]:
    return (x.shape[0], x.shape[2] if match.options.get("layout") == "heads" else x.shape[1])


def _gate(match: Match, tensors: dict[str, Tensor]) -> None:
    branch, residual = tensors["branch"], tensors["residual"]
    (gate,), per_row = group_vectors(residual, (tensors["gate"],), None)
    assert gate is not None
    side, rows = (t.reshape(-1, t.shape[-1]) for t in (branch, residual))
    groups = row_groups(rows.shape[0], (gate,), None, per_row)
    gate_residual.launch_backward(gate_residual.launch_forward(side, rows, gate, groups), side, gate, groups, True)


def _gelu(match: Match, tensors: dict[str, Tensor]) -> None:
    x, tanh = tensors["x"].reshape(-1, tensors["x"].shape[-1]), match.options["approximate"] == "tanh"
    bias_gelu.launch_backward(bias_gelu.launch_forward(x, tensors["bias"], tanh), x, tensors["bias"], tanh, True)


_LAUNCH = {
    "norm_modulate": _norm,
    "gate_residual_norm_modulate": _norm,
    "norm_rope": _rope,
    "gate_residual": _gate,
    "bias_gelu": _gelu,
}


def generated_estimates(block: CapturedBlock, graph: Graph, sizes: dict[str, int]) -> dict[str, Found]:
    """Of every region that becomes Triton source, by its name; those that are left to Inductor are missing."""
    kernels: list[tuple[fx.GraphModule, Generated | None]] = []

    def compiler(region: fx.GraphModule) -> fx.GraphModule:
        try:
            kernels.append((region, Generated(region)))
        except Unsupported as reason:
            kernels.append((region, None))
            print(f"  left to Inductor: {reason}")
        return region

    alone = [region for region in graph.fused if region.attrs["kernel"] == "generated" and len(region.ops) > 1]
    estimates: dict[str, Found] = {}
    for region in alone:
        kernels.clear()
        only = Graph(graph.name, graph.inputs, graph.ops, graph.outputs, graph.attrs, fused=(region,))
        fuse_block(block, only, kernels=False, compiler=compiler)
        estimates[region.name] = [
            pair for module, kernel in kernels if kernel for pair in _compiled(block, module, kernel, sizes)
        ]
    return estimates


def _compiled(
    block: CapturedBlock, region: fx.GraphModule, generated: Generated, sizes: dict[str, int]
) -> Iterator[tuple[str, Estimate]]:
    def tensor(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _number(value)
        return torch.empty([_number(size) for size in value.shape], dtype=value.dtype, device="meta")

    def _number(size: Any) -> int:
        expression = block.expression(size)
        return int(expression.subs({s: sizes.get(s.name, 1) for s in expression.free_symbols}))

    values = [tensor(node.meta["val"]) for node in region.graph.nodes if node.op == "placeholder"]
    results = region.graph.output_node().args[0]
    results = results if isinstance(results, tuple | list) else [results]
    tangents = [tensor(node.meta["val"]) for node in results]  # type: ignore[union-attr]
    for way, stage, given in (
        ("forward", generated.forward, values),
        ("backward", generated.backward, values + tangents),
    ):
        if stage.launcher is None:
            continue
        recorder = Recorder(stage.launcher.kernel)
        stage.launcher.__dict__["kernel"] = recorder
        stage.launcher(given)
        _, arguments, options = recorder.calls[0]
        yield f"generated, {way}", estimate(recorder.kernel, arguments, options)


if __name__ == "__main__":
    main()
