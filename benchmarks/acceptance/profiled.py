"""A profile measured on the device, and what it predicts of steps of clips of other lengths.

Blocks as wide as Wan2.1-1.3B's, fewer of them, in bf16 as the model file builds it. One of the other lengths is beyond
all that were measured. Nothing here is judged by its time: a prediction that is far off is a row like any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from acceptance.machine import Machine, Row
from acceptance.runs import compiled, jsonl, median, ran, wan_file

from arachnec.profiling.local import profile_here

WAN = '"Wan2.1-T2V-1.3B", num_layers=4, dtype=torch.bfloat16'
TINY = "num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=32, in_channels=4, out_channels=4, "
TINY += "text_dim=16, freq_dim=16"
SMALL = {"height": 64, "width": 64, "text_tokens": 8}
LARGE = {"height": 480, "width": 832, "text_tokens": 512}
MEASURED, OTHERS = (5, 13, 25), (9, 21, 37)  # frames of 480x832: 3,120 to 10,920 tokens, and 4,680 to 15,600
ROUNDS = 3  # over the lengths, the first to warm up


def rows(machine: Machine) -> Iterator[Row]:
    size = SMALL if machine.dry else LARGE
    model = wan_file(machine, "profiled_model", TINY if machine.dry else WAN)
    known = jsonl(machine.scratch / "measured.jsonl", [{"frames": n, **size} for n in MEASURED])
    others = [{"frames": n, "iteration": i, **size} for i, n in enumerate(OTHERS)]
    data, profile = jsonl(machine.scratch / "others.jsonl", others), machine.scratch / "profile.json"
    started = time.monotonic()
    profile_here(model, known, machine.cluster(1), profile)
    yield {"profile_s": time.monotonic() - started, **held_out(json.loads(profile.read_text()))}
    folder = compiled(machine, "profiled", model, data, profile=profile)
    report = ran(machine, folder, ROUNDS * len(OTHERS))
    for number, frames in enumerate(OTHERS):
        yield row_of(frames, [step for step in report["steps"] if step["iteration"] == number][1:], report["device"])


def row_of(frames: int, steps: list[Row], device: str) -> Row:
    measured, planned = median(steps, "step_ms"), median(steps, "planned_ms")
    row = {"frames": frames, "device": device, "step_ms": measured, "planned_step_ms": planned}
    row["error"] = planned / measured - 1  # signed: above 0 the plan is too slow
    return row | {"memory_gib": median(steps, "peak_memory_gib")}


def held_out(profile: Row) -> Row:
    """The mean error of each formula on points that it was not fitted to."""
    errors = {f"{stage['stage']} {stage['phase']}": stage["fit"].get("held_out") for stage in profile["stages"]}
    links = {"links": profile["links"]} if profile.get("links") else {}
    return {"held_out": errors, "device": profile["device"], **links}
