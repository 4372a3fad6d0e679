"""A model that lies in pinned host memory, beside the same model held whole on the device.

Four steps each, from one seed, in bf16 with fp32 masters, of Wan2.1 as wide as 1.3B with fewer blocks. The device's
memory is said to be too small for the model, so that parameters, gradients, optimizer and inputs of blocks lie in the
host. It is not made smaller: what a run takes beyond its plan is seen in its peak.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gradient_parity as parity
from acceptance.machine import Machine, Row, verdict
from acceptance.runs import apart, compiled, jsonl, losses, median, ran, wan_file

from arachnec.cluster.detect import find_by_driver_name

WAN = '"Wan2.1-T2V-1.3B", num_layers=12, dtype=torch.bfloat16'
TINY = "num_layers=4, num_attention_heads=2, attention_head_dim=12, ffn_dim=32, in_channels=4, out_channels=4, "
TINY += "text_dim=16, freq_dim=16"
CLIP = {"frames": 33, "height": 480, "width": 832, "text_tokens": 512}
SMALL = {"frames": 9, "height": 64, "width": 64, "text_tokens": 8}
STEPS = 4  # the first warms up, and the last copies its gradients to be looked at
SAID_GIB, HOST_GIB = 12, 64
WHATS = ("inputs", "optimizer")  # everything that can lie there, and the least
GRADIENTS = 5e-2  # bf16, of the same model and the same kernels: the host's AdamW is the device's to rounding
TO_PLAN = 1.05
END = "partition,annotate,schedule-z3{steps=50},place,bucket,lower,check"


def rows(machine: Machine) -> Iterator[Row]:
    model = wan_file(machine, "host_model", TINY if machine.dry else WAN)
    data = jsonl(machine.scratch / "host.jsonl", [SMALL if machine.dry else CLIP])
    whole, expected = run_of(machine, "none", model, data)
    yield {"lies_in_host": "none", **described(whole)}
    for what in WHATS:
        report, gradients = run_of(machine, what, model, data)
        error, worst = parity.compare(expected, gradients)
        row = {"lies_in_host": what, **described(report), "whole_step_ms": described(whole)["step_ms"]}
        row |= {"loss_error": apart(losses(report), losses(whole)), "worst": worst, "gradient_error": error}
        yield verdict(row, "gradient_error", GRADIENTS)
        if not machine.dry:
            yield verdict(
                {"lies_in_host": what, "memory_of_plan": described(report)["memory_of_plan"]}, "memory_of_plan", TO_PLAN
            )


def run_of(machine: Machine, what: str, model: Path, data: Path) -> tuple[Row, Path]:
    """The report with what was planned, and the gradients of the last step."""
    cluster = machine.scratch / f"{what}.toml"
    cluster.write_text(cluster_file(machine, memory=None if what == "none" else SAID_GIB))
    folder = compiled(machine, what, model, data, f"offload{{what={what}}},{END}", cluster=cluster)
    gradients = machine.scratch / f"{what}.safetensors"
    report = ran(machine, folder, STEPS, save_gradients=gradients, dtype="fp32" if machine.dry else "bf16")
    return {**report, "planned": json.loads((folder / "report.json").read_text())}, gradients


def cluster_file(machine: Machine, memory: int | None) -> str:
    """One of these devices, with memory of a host beside it."""
    import torch

    specs = None if machine.dry else find_by_driver_name(torch.cuda.get_device_name())
    name = "cpu" if specs is None else specs.name
    own = "" if memory is None or machine.dry else f'memory = "{memory} GiB"\n'
    return f'nodes = 1\ngpus = 1\ndevice = "{name}"\n{own}host_memory = "{HOST_GIB} GiB"\npcie = "50 GB/s"\n'


def described(report: Row) -> Row:
    steps, planned = report["steps"][:-1], report["planned"]
    memory = max(step["peak_memory_gib"] for step in steps) - report["held_gib"]
    row = {"device": report["device"], "step_ms": median(steps[1:], "step_ms")}
    row |= {"planned_step_ms": median(steps[1:], "planned_ms"), "memory_gib": memory}
    row |= {"planned_memory_gib": planned["peak_memory_gib"], "memory_of_plan": memory / planned["peak_memory_gib"]}
    row["held_before_gib"] = report["held_gib"]
    return row | {"from_host": steps[-1]["from_host"], "to_host": steps[-1]["to_host"]}
