"""Gradients of a small Wan2.1 on all devices, in fp32 and bf16, against a plain loop on one of them in fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator

import gradient_parity as parity
from acceptance.machine import Machine, Row, verdict

MODEL = parity.MODELS / "wan.py"
CLIPS = parity.ACCEPTANCE / "clips.jsonl"
LIMITS = {"fp32": 1e-4, "bf16": 5e-2}  # the sections run without TF32


def plans(ranks: int) -> dict[str, str]:
    """Pipelines: our plan, and all ranks sharing every clip by heads, by a ring and by both."""
    if ranks == 1:
        return {"default": "default"}
    shared = f"{parity.START}assign{{degrees=[{ranks}]}},place,regrid{{ulysses=[%d]}},{parity.END}"
    grids = {"ulysses": ranks, "ring": 1} | ({"product": 2} if ranks % 2 == 0 and ranks > 2 else {})
    return {"default": "default"} | {name: shared % ulysses for name, ulysses in grids.items()}


def rows(machine: Machine) -> Iterator[Row]:
    expected = machine.scratch / "expected.safetensors"
    parity.plain_loop(MODEL, parity.read_clips(CLIPS), expected, device=str(machine.device))
    for name, pipeline in plans(machine.gpus).items():
        folder, gradients = machine.scratch / name, machine.scratch / f"{name}.safetensors"
        parity.command("compile", MODEL, "--data", CLIPS, "--cluster", machine.cluster(machine.gpus), "-o", folder,
                       "--passes", pipeline, "--load", parity.PASSES)  # fmt: skip
        for dtype, limit in LIMITS.items():
            parity.command("run", folder, "--steps", 1, "--save-gradients", gradients, "--dtype", dtype)
            error, worst = parity.compare(expected, gradients)
            report = json.loads((folder / "run.json").read_text())
            row = {"plan": name, "ranks": machine.gpus, "dtype": dtype, "device": report["device"]}
            yield verdict({**row, "loss": report["steps"][-1]["loss"], "error": error, "worst": worst}, "error", limit)
