"""Whole steps with sparse attention beside dense ones: Wan2.1 as wide as 1.3B with fewer blocks, one clip of 81 frames.

Random weights attend to everything alike, so the blocks are to hold a tenth of the attention: of these heads about a
tenth of the blocks does. Predictors have a head's own rank and do not move, so they are right; what they would learn is
computed and takes its time all the same. Densities are those of the last measurement, without momentum; layers that are
dense take turns of sixteen steps. Times are those of the last steps; nothing here is judged by its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

from acceptance.machine import Machine, Row
from acceptance.resumed import TINY
from acceptance.runs import compiled, jsonl, losses, median, ran, wan_file

from arachnec.kernels.sparse import predictor
from arachnec.model_state import sparse_predictors
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.sparsity.head_shares import SPARSE_EVERY

LAYERS, HEAD = 6, 128
WAN = f'"Wan2.1-T2V-1.3B", num_layers={LAYERS}, dtype=torch.bfloat16'
CLIP = {"frames": 81, "height": 480, "width": 832, "text_tokens": 512}
SMALL = {"frames": 33, "height": 64, "width": 64, "text_tokens": 8}
STEPS, DENSE_STEPS = 32, 5
MASS = 0.1


def rows(machine: Machine) -> Iterator[Row]:
    tiny = TINY.format(layers=2, head=12, ffn=48)
    model = wan_file(machine, "sparse_model", tiny if machine.dry else WAN)
    data = jsonl(machine.scratch / "sparse.jsonl", [SMALL if machine.dry else CLIP])
    dtype = "fp32" if machine.dry else "bf16"
    dense = ran(machine, compiled(machine, "dense", model, data), DENSE_STEPS, dtype=dtype)
    yield {"pipeline": "default", **described(dense["steps"][2:]), "device": dense["device"]}
    options = "group=16,block=1,overhead=0ms,choice_speed=1e6," if machine.dry else ""
    options += f"mass={MASS},rank={12 if machine.dry else HEAD}"
    folder = compiled(machine, "sparse", model, data, PIPELINES["sparse"].replace("sparsify", f"sparsify{{{options}}}"))
    with mock.patch.object(sparse_predictors, "RATE", 0.0), mock.patch.object(predictor, "MOMENTUM", 0.0):
        report = ran(machine, folder, STEPS, dtype=dtype)
    last = report["steps"][-SPARSE_EVERY:]
    row = {"pipeline": "sparse", **described(last), "dense_step_ms": median(dense["steps"][2:], "step_ms")}
    row |= {"steps_ms": [step["step_ms"] for step in report["steps"]]}
    row |= {"layers": [state(layer) for layer in report["sparse_layers"]]}
    sparse = all(layer["sparse"] and layer["sparse_lengths"] for layer in report["sparse_layers"])
    yield {**row, "right": sparse and None not in losses(report)}


def described(steps: Sequence[Row]) -> Row:
    """``learning_ms`` is the slowest of these steps, in which predictors are measured."""
    times = {"step_ms": median(steps, "step_ms"), "planned_step_ms": median(steps, "planned_ms")}
    slowest = max(steps, key=lambda step: float(step["step_ms"]))
    return times | {"learning_ms": slowest["step_ms"], "memory_gib": max(step["peak_memory_gib"] for step in steps)}


def state(layer: Row) -> Row:
    return {name: layer[name] for name in ("sparse", "sparse_lengths", "density", "loss", "mass", "of_best")}
