"""How many list entries differ between plans of one run, which only rounding turns.

    python benchmarks/sparse/plan_lists.py [--steps 6] [--ranks 2,3] [--json FILE]
    python benchmarks/sparse/plan_lists.py ONE OTHER      # folders of ``arachnec run --save-lists``

Without folders a tiny Wan trains on the processor, each clip on one rank, on two, and on three, which cut a head. Every
run chooses by itself. All layers turn sparse after the first step. The runs' weights differ by rounding too, more with
every step. Entries are numbers of key blocks; what is in one run's list and not in the other's differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arachnec.model_state.key_list_files import entries_that_differ, read_lists

MODEL = """import torch
from arachnec.models.diffusers import wan

model = wan.text_to_video(num_layers=2, num_attention_heads=2, attention_head_dim=24, ffn_dim=96, in_channels=4,
                          out_channels=4, text_dim=16, freq_dim=32)
build, sample, loss = model.build, model.sample, model.loss
"""
SPARSE = "sparsify{mass=0.5,rank=24,group=16,block=4,overhead=0ms,forward_speed=1000,backward_speed=1000,"
SPARSE += "choice_speed=1000}"
PASSES = SPARSE + ",partition{policy=single},annotate,schedule-static{degree=DEGREE},place,bucket,lower,check"
CLIPS = [{"frames": n, "height": 128, "width": 128, "text_tokens": 16} for n in (17, 33)]


def arachnec(*words: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "arachnec.cli", *map(str, words)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])


def lists_of(folder: Path, degree: int, steps: int) -> Path:
    """Where a run with so many ranks a clip has saved its lists."""
    build, saved = folder / f"build-{degree}", folder / f"lists-{degree}"
    words = ["--data", folder / "clips.jsonl", "--cluster", f"{degree}:cpu", "-o", build]
    arachnec("compile", folder / "model.py", *words, "--passes", PASSES.replace("DEGREE", str(degree)))
    arachnec("run", build, "--steps", steps, "--no-equivalence", "--save-lists", saved)
    return saved


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def compared(one: Path, other: Path) -> dict[str, Any]:
    """By step that both have the entries that differ, and all of both."""
    steps = sorted({*steps_in(one)} & {*steps_in(other)})
    counts = {step: entries_that_differ(read_lists(one, step), read_lists(other, step)) for step in steps}
    differing, total = (sum(count[place] for count in counts.values()) for place in (0, 1))
    return {"differ": differing, "entries": total, "share": differing / max(1, total), "steps": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="two, of lists that runs saved")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", default="2,3", help="of a clip, in the runs beside that on one rank")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if len(options.folders) not in (0, 2):
        parser.error("give two folders, or none")
    result: dict[str, Any] = {}
    if options.folders:
        result["given"] = compared(*options.folders)
    else:
        with tempfile.TemporaryDirectory(prefix="arachnec-lists-") as name:
            folder = Path(name)
            (folder / "model.py").write_text(MODEL)
            (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CLIPS))
            alone = lists_of(folder, 1, options.steps)
            for degree in map(int, options.ranks.split(",")):
                result[f"1 and {degree} ranks a clip"] = compared(alone, lists_of(folder, degree, options.steps))
    for name, row in result.items():
        print(f"{name}: {row['differ']} of {row['entries']} entries differ, {100 * row['share']:.4f} %", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
