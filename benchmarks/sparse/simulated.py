"""What sparse attention comes to, simulated: DSV's own setting, and dense, `dsv` and `sparse` on mixed lengths.

    python benchmarks/sparse/simulated.py [--models wan2_1_1_3b_vae,...] [--gpus 8,64] [--measured] [--json FILE]

No GPU ran any of this. The first table takes DSV's model (32 layers, 16 heads of 128), 130,000 tokens, 4 ranks a
clip, and its published kernel ratios at 90 % sparsity: 2.2-5.7x forward, 3.3-4.0x backward (arXiv 2502.07590). It
reports 2.73-3.02x end to end. Its dense backward is slow (84 TFLOP/s on an H100 in its artifact's logs), so these
ratios are not those over a good dense backward; the dense time here is that of one speed for all FLOPs. Choosing keys
is taken to reach 0.1 of that, and learning to cost nothing.

The second table plans `video_mix` clips, two a GPU. Densities are drawn by layer and head as measured ones spread
(2-8 % with weight 6, 10-20 % with 2, 25-70 % with 1), scaled to the mean that the row names. Sparse kernels are taken
to reach 0.8 of the dense ones' FLOPs a second, choosing keys 0.1, and learning to cost nothing; with ``--measured`` all
of that is as `sparsify` has it by default, from an H200.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from heads import drawn
from traced_stages import module_of, video_mix

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip, Level, Module, Stage
from arachnec.ir.stage_sizes import count_in, layers_of
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.sparse_stages import sparse_summaries

DENSITIES = (0.3, 0.2, 0.1, 0.05)
MODELS = {"wan2_1_1_3b_vae": (8, 16, 32, 64), "wan2_1_14b": (32, 64), "hunyuanvideo": (16, 32, 64)}
STATE, END = "shard-optimizer", "place,bucket,lower,check"
OURS = f"{STATE},partition{{policy=dual}},annotate,schedule-z3{{steps=20}},{END}"
DSV = f"{STATE},partition,annotate,schedule-static,place,bucket{{reverse=false}},lower,check"
PREDICTOR = "choice_speed=0.1,overhead=0.05ms,learning_speed=1e6"
ASSUMED = f",forward_speed=0.8,backward_speed=0.8,{PREDICTOR}"
KERNELS = {"least": (2.2, 3.3), "middle": (3.54, 3.63), "most": (5.7, 4.0)}  # the middle is geometric


def iteration_ms(module: Module, pipeline: str) -> tuple[float, float]:
    """Simulated ms of one iteration, and the worst imbalance of heads."""
    planned = Pipeline.parse(pipeline).run(module)
    worst = max((summary.imbalance for summary in sparse_summaries(planned)), default=1.0)
    return simulate(planned).iteration_ms, worst


def dsv_model(layers: int = 32, heads: int = 16, size: int = 128) -> Stage:
    """Per layer 4 S^2 h for attention, 28 h^2 S for products: attention 4, cross-attention 2, feed-forward 8, twice."""
    hidden = heads * size
    pairs, linear = 4 * hidden * layers / 1e12, 28 * hidden**2 * layers / 1e12
    params = 2_700_000_000
    flops = Formula((Term(pairs, (("B", 1), ("S", 2))), Term(linear, (("B", 1), ("S", 1)))), "TFLOP")
    traffic = Formula((Term(4 * 2 * hidden * layers / 2**30, (("B", 1), ("S", 1))),), "GiB")
    attrs = Attributes.of(
        source="DSV", params=params, dtype="bf16", hidden=hidden, heads=heads, attentions=layers, flops=flops,
        layers=tuple((f"blocks.{layer}", params // layers) for layer in range(layers)), traffic=traffic,
        state=Quantity(params * 20 / 2**30, "GiB"), optimizer=Quantity(params * 16 / 2**30, "GiB"),
    )  # fmt: skip
    return Stage("dit", True, attrs.updated(blocks=((Symbol("Block"), layers),)))


def dsv_setting() -> list[dict[str, Any]]:
    clip = Clip(0, 129, 1280, 1280, 0, 130_000, Attributes.of(iteration=0))
    module = Module("dsv", Level.TRACED, parse_cluster("1x4:h100-80g"), (clip,), (dsv_model(),))
    plan = "partition{policy=single},annotate,schedule-static{degree=4},place,bucket{reverse=false},lower,check"
    dense, _ = iteration_ms(module, f"{STATE},{plan}")
    rows = []
    for name, (forward, backward) in KERNELS.items():
        for uneven in (False, True):
            speeds = f"forward_speed={0.1 * forward:.6g},backward_speed={0.1 * backward:.6g}"
            for division in ("heads", "groups") if uneven else ("heads",):
                with tempfile.TemporaryDirectory() as scratch:
                    option = f"file={table(module, 0.1, scratch)}" if uneven else "density=0.1"
                    sparsify = f"sparsify{{{option},division={division},{speeds},{PREDICTOR}}}"
                    sparse, worst = iteration_ms(module, f"{sparsify},{STATE},{plan}")
                rows.append(
                    {
                        "kernels": name, "forward_ratio": forward, "backward_ratio": backward, "division": division,
                        "densities": "drawn" if uneven else "equal", "head_imbalance": round(worst, 3),
                        "dense_ms": round(dense, 1), "sparse_ms": round(sparse, 1), "speedup": round(dense / sparse, 3),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def table(module: Module, mean: float, folder: str) -> Path:
    """A sparsity file of drawn densities of the trained stage, scaled to this mean over heads and layers."""
    stage = next(stage for stage in module.stages if stage.trained)
    rng = random.Random(0)
    layers = [drawn(rng, count_in(stage, "heads")) for _ in layers_of(stage)]
    scale = mean * sum(map(len, layers)) / sum(map(sum, layers))
    rows = [{"layer": n, "heads": [min(1.0, density * scale) for density in row]} for n, row in enumerate(layers)]
    path = Path(folder) / "sparsity.json"
    path.write_text(json.dumps({"model": stage.attrs["source"], "layers": rows}))
    return path


def trained_alone(model: str, gpus: int) -> Module:
    """The model without its encoders, two clips a GPU."""
    module = module_of(model, video_mix(2 * gpus, seed=0), f"{max(1, gpus // 8)}x{min(8, gpus)}:h100-80g")
    return replace(module, stages=tuple(stage for stage in module.stages if stage.trained))


def mixed(model: str, gpus: int, speeds: str) -> list[dict[str, Any]]:
    module = trained_alone(model, gpus)
    clips = module.clips
    rows: list[dict[str, Any]] = []
    try:
        dense, _ = iteration_ms(module, OURS)
    except UserError as error:
        print(f"{model} on {gpus}: {error}")
        return rows
    for mean in DENSITIES:
        with tempfile.TemporaryDirectory() as scratch:
            file = table(module, mean, scratch)
            sparse, imbalance = iteration_ms(module, f"sparsify{{file={file}{speeds}}},{OURS}")
            dsv, whole = iteration_ms(module, f"sparsify{{file={file},division=heads{speeds}}},{DSV}")
        rows.append(
            {
                "model": model, "gpus": gpus, "clips": len(clips), "density": mean, "dense_ms": round(dense, 1),
                "dsv_ms": round(dsv, 1), "sparse_ms": round(sparse, 1), "sparse_over_dense": round(dense / sparse, 3),
                "sparse_over_dsv": round(dsv / sparse, 3), "head_imbalance": round(imbalance, 3),
                "dsv_head_imbalance": round(whole, 3),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--gpus", help="numbers of GPUs, instead of each model's own")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setting = dsv_setting()
    rows = []
    for model in filter(None, arguments.models.split(",")):
        counts = [int(count) for count in arguments.gpus.split(",")] if arguments.gpus else MODELS[model]
        for gpus in counts:
            rows += mixed(model, gpus, "" if arguments.measured else ASSUMED)
            if arguments.json:
                told = {"dsv_setting": setting, "published": [2.73, 3.02], "mixed_lengths": rows}
                arguments.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
