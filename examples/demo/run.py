"""The demo: measure this machine, compile a small Wan2.1 model on clips of real videos, compare, train 20 steps.

Every line that starts with ``$`` is a command you can type yourself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RANKS = 4
STEPS = 20


def command(*arguments: str | Path) -> None:
    words = [str(word) for word in arguments]
    print(f"\n$ arachnec {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "arachnec", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    output = Path("demo-output")
    output.mkdir(exist_ok=True)
    clips, profile, build = output / "clips.jsonl", output / "profile.json", output / "build"
    model, cluster = HERE / "model.py", f"{RANKS}:cpu"

    print("Clips from three real videos (random weights, so nothing is downloaded):", flush=True)
    subprocess.run([sys.executable, HERE / "make_clips.py", clips], check=True)
    if build.exists():
        shutil.rmtree(build)
    command("profile", model, "--data", clips, "--cluster", cluster, "-o", profile)
    command("compile", model, "--data", clips, "--cluster", cluster, "--profile", profile, "-o", build, "--lr", "1e-3")
    command(
        "compare", model, "--data", clips, "--cluster", cluster, "--profile", profile,
        "--pipelines", "default,data-parallel",
    )  # fmt: skip
    command("run", build, "--steps", str(STEPS))
    closing(output, build)


def closing(output: Path, build: Path) -> None:
    report = json.loads((build / "run.json").read_text())
    steps = report["steps"]
    tail = sorted(step["step_ms"] for step in steps[1:])
    print(
        f"\nMeasured: loss {steps[0]['loss']:.4f} at step 1, {steps[-1]['loss']:.4f} at step {len(steps)}; "
        f"median step {tail[len(tail) // 2]:.0f} ms.\n"
        f"Predicted by the compiler for one iteration: {steps[-1]['planned_ms']:.0f} ms.\n\n"
        f"Written to {output}/\n"
        "  clips.jsonl            the clips\n"
        "  profile.json           what this machine takes, measured\n"
        "  build/program.cascade  every rank's program; edit it, then `arachnec check` it\n"
        "  build/report.json      the plan\n"
        "  build/run.json         every step: loss, times, imbalance\n"
        "  build/loss.png         the loss curve\n"
        "  build/measured.svg     what every rank did in the last step\n\n"
        "Next:\n"
        f"  arachnec show {build}                                   the plan above the measured step\n"
        "  arachnec compile examples/wan2_1_14b.py --data examples/clips_480p.jsonl --cluster 2x8:h100-80g\n"
        "  docs/your_model.md                                      your own model in three functions"
    )


if __name__ == "__main__":
    main()
