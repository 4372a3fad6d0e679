"""A run that goes on from a checkpoint, what ``export`` makes of it, and runs with sparse attention and fused kernels.

All in fp32. A resumed run repeats the steps of the uninterrupted one on the same device, from values that a checkpoint
holds to the bit: only kernels that sum in no fixed order may differ. Fused kernels sum in another order than eager
ones, in every block of every step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from acceptance.machine import Machine, Row, verdict
from acceptance.runs import apart, compiled, jsonl, losses, median, ran, ran_by_command, wan_file
from safetensors.torch import load_file

from arachnec.executable.folder import read_executable
from arachnec.export.folder import export

TINY = "num_layers=2, num_attention_heads=2, attention_head_dim={head}, ffn_dim={ffn}, in_channels=4, out_channels=4, "
TINY += "text_dim=16, freq_dim=32"
SAME, FUSED = 1e-5, 1e-4  # of the losses, relative
STEPS, EVERY = 4, 2


def rows(machine: Machine) -> Iterator[Row]:
    head, ffn, height, frames = (12, 48, 64, (5, 9)) if machine.dry else (64, 512, 256, (17, 33))
    model = wan_file(machine, "resumed_model", TINY.format(head=head, ffn=ffn))
    clips = [{"frames": n, "height": height, "width": height, "text_tokens": 16, "iteration": n} for n in frames]
    data = jsonl(machine.scratch / "resumed.jsonl", clips)
    plain = compiled(machine, "plain", model, data)
    checkpoints = machine.scratch / "checkpoints"
    whole = ran_by_command(plain, STEPS, "--checkpoint", checkpoints, "--every", EVERY)
    yield from resumed(machine, plain, checkpoints, whole)
    for name in ("fused", "sparse"):
        report = ran(machine, compiled(machine, name, model, data, name), STEPS)
        row = {"pipeline": name, "device": report["device"], "losses": losses(report)}
        row |= {"error": apart(losses(report), losses(whole)), "step_ms": median(report["steps"][2:], "step_ms")}
        row |= {"plain_step_ms": median(whole["steps"][2:], "step_ms"), "sparse_layers": report["sparse_layers"]}
        yield verdict(row, "error", FUSED) if name == "fused" else {**row, "right": None not in losses(report)}


def resumed(machine: Machine, folder: Path, checkpoints: Path, whole: Row) -> Iterator[Row]:
    """From step 2, the later checkpoints being gone; and the exported weights of the last one."""
    for later in later_than(checkpoints, EVERY):
        shutil.rmtree(later)
    report = ran(machine, folder, STEPS - EVERY, checkpoint=checkpoints, resume=True)
    row = {"device": report["device"], "losses": losses(whole), "resumed": losses(report)}
    row |= {"first_step": report["steps"][0]["step"], "error": apart(losses(report), losses(whole)[EVERY:])}
    yield verdict(row, "error", SAME)
    exported = machine.scratch / "exported"
    export(read_executable(folder), checkpoints, exported)
    names = []
    for path in sorted(exported.rglob("*.safetensors")):
        names += [name for name, value in load_file(path).items() if not value.isfinite().all()]
    yield {"exported": [path.name for path in sorted(exported.iterdir())], "not_finite": names, "right": not names}


def later_than(checkpoints: Path, step: int) -> list[Path]:
    """The folders of checkpoints behind this step."""
    return [path for path in checkpoints.glob("step-*") if int(path.name.removeprefix("step-")) > step]
