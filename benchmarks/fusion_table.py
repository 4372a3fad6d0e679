"""Kernels and bytes of each block's memory-intensive operations, before and after `fuse`, for the real configurations.

    python benchmarks/fusion_table.py [examples/wan2_1_14b.py ...]

One block at B = 1, S = 32,760, T = 512 (or the model's caption length), in its own precision: kernels and bytes of the
forward, bytes of the backward, and what is kept for it, as counted by the cost model of `docs/fusion.md`: no device is
needed. The lines are the table there. Views cost nothing, matrix products and attention are left out, "eager" is every
operation by itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sympy

from arachnec.data.manifest import read_manifest
from arachnec.fusion.cost import Machine, RegionCost, alone
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.fusion.graph import FusionGraph, bits
from arachnec.fusion.shape_constraints import constraints_of
from arachnec.ir.nodes import Graph, integer
from arachnec.ir.values import Attributes, Formula
from arachnec.models.file import load_model_file
from arachnec.passes.trace import trace_model

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("wan2_1_1_3b", "wan2_1_14b", "cogvideox_2b", "cogvideox_5b", "hunyuanvideo", "plain_dit")
SIZES = {"B": 1, "S": 32760, "T": 512}


def row(model: str, graph: Graph) -> str:
    fused = fuse_graph(graph)
    known = FusionGraph(graph, constraints_of(graph))
    cost = RegionCost(known, Machine())
    eager_kernels = known.core.bit_count()
    eager_bytes = sum((_formula(cost, 1 << i) for i in bits(known.core)), sympy.Integer(0))
    attrs = [region.attrs for region in fused.fused]
    named = {known.index[name] for region in fused.fused for name in region.ops}
    left = sum(1 << i for i in bits(known.core) if i not in named)
    single = sum((_formula(cost, 1 << i) for i in bits(left)), sympy.Integer(0))
    kernels = left.bit_count() + sum(integer(value["launches_after"]) for value in attrs)
    back = alone(cost, known.core, known.bytes_of)
    rest = alone(cost, left, known.bytes_of)
    columns = [_gib(back.moved), _gib(rest.moved) + _at(attrs, "backward_after")]
    columns += [_gib(back.saved), _gib(rest.saved) + _at(attrs, "kept_after")]
    backward = " | ".join(f"{value:.2f}" for value in columns)
    by_hand = ", ".join(str(value["kernel"]) for value in attrs if value["kernel"] != "generated")
    before, after = _gib(eager_bytes), _gib(single) + _at(attrs, "bytes_after")
    return (
        f"| {model} | {graph.name} | {eager_kernels} | {kernels} | {before:.2f} | {after:.2f} | "
        f"{before / after:.1f}x | {backward} | {by_hand or '-'} |"
    )


def _at(attrs: list[Attributes], name: str) -> float:
    formulas = [value[name] for value in attrs]
    return sum(formula(**SIZES) for formula in formulas if isinstance(formula, Formula))


def _formula(cost: RegionCost, mask: int) -> sympy.Expr:
    return cost.formula(mask)[1]


def _gib(size: sympy.Expr) -> float:
    size = sympy.sympify(size)
    return float(size.subs({symbol: SIZES.get(symbol.name, 1) for symbol in size.free_symbols})) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--clips", type=Path, default=ROOT / "examples" / "clips_480p.jsonl")
    arguments = parser.parse_args()
    titles = ("model", "block", "kernels, eager", "fused", "GiB, eager", "fused", "", "backward, eager", "fused")
    titles += ("kept, eager", "fused", "hand-written kernels")
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for path in arguments.models or [ROOT / "examples" / f"{name}.py" for name in MODELS]:
        manifest = read_manifest(arguments.clips, batch=None)
        clips = [clip for iteration in manifest.iterations for clip in iteration]
        for graph in trace_model(load_model_file(path), clips).graphs:
            print(row(path.stem, graph), flush=True)


if __name__ == "__main__":
    main()
