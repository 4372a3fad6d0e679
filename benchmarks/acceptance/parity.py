"""Gradients of a small Wan2.1 on all devices, in fp32 and bf16, against a plain loop on one of them in fp32.

On one device this process is the rank: to start one takes longer than its step.
"""

from __future__ import annotations

from collections.abc import Iterator

import gradient_parity as parity
from acceptance.machine import Machine, Row, verdict
from acceptance.runs import compiled, ran, ran_by_command

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
    if machine.gpus == 1:
        folder = compiled(machine, "default", MODEL, CLIPS)
        for dtype, limit in LIMITS.items():
            gradients = machine.scratch / f"{dtype}.safetensors"
            report = ran(machine, folder, 1, save_gradients=gradients, dtype=dtype)
            yield row_of(machine, "default", dtype, report, parity.compare(expected, gradients), limit)
        return
    for name, pipeline in plans(machine.gpus).items():
        folder, gradients = machine.scratch / name, machine.scratch / f"{name}.safetensors"
        parity.command("compile", MODEL, "--data", CLIPS, "--cluster", machine.cluster(machine.gpus), "-o", folder,
                       "--passes", pipeline, "--load", parity.PASSES)  # fmt: skip
        for dtype, limit in LIMITS.items():
            report = ran_by_command(folder, 1, "--save-gradients", gradients, "--dtype", dtype)
            yield row_of(machine, name, dtype, report, parity.compare(expected, gradients), limit)


def row_of(machine: Machine, plan: str, dtype: str, report: Row, compared: tuple[float, str], limit: float) -> Row:
    error, worst = compared
    row = {"plan": plan, "ranks": machine.gpus, "dtype": dtype, "device": report["device"]}
    return verdict({**row, "loss": report["steps"][-1]["loss"], "error": error, "worst": worst}, "error", limit)
