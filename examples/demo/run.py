"""The demo: one long clip among short ones, trained in turns by the planner's program and by data parallelism.

Runs a small Wan2.1 model's encoders over clips of real videos, measures this machine, compiles the model for two
processes, trains with both programs and compares what was measured. Every line that starts with ``$`` is a command
you can type yourself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.demo.measured import Trained, page, summary

HERE = Path(__file__).parent
RANKS = 2
STEPS = 8  # of each run
ROUNDS = 2
PIPELINES = ("default", "data-parallel")
PAGE = "demo.html"


def command(*arguments: str | Path) -> None:
    words = [str(word) for word in arguments]
    print(f"\n$ arachnec {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "arachnec", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def side_by_side(*commands: Sequence[str | Path]) -> None:
    """Commands of one process each; what they print is told one after the other."""
    lines = [[str(word) for word in words] for words in commands]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "arachnec", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for words in lines
    ]
    ended = [(process.communicate()[0], process.returncode) for process in started]
    for words, (told, code) in zip(lines, ended, strict=True):
        print(f"\n$ arachnec {' '.join(words)}\n{told}", end="", flush=True)
        if code:
            sys.exit(code)


def main() -> int:
    output = Path("demo-output")
    if output.exists():
        shutil.rmtree(output)
    output.mkdir()
    clips, latents, profile = output / "clips.jsonl", output / "latents", output / "profile.json"
    cluster = ("--cluster", f"{RANKS}:cpu")
    common = (HERE / "model.py", "--data", latents / "clips.jsonl", *cluster)

    print("One long clip and three short ones from three real videos (random weights, so nothing is downloaded):")
    sys.stdout.flush()
    subprocess.run([sys.executable, HERE / "make_clips.py", clips, "--one-long"], check=True)
    command("cache", HERE / "model.py", "--data", clips, *cluster, "-o", latents)
    command("profile", *common, "-o", profile)
    measured = (*common, "--profile", profile, "--lr", "1e-3")
    side_by_side(
        *(("compile", *measured, "--batch", "all", "--passes", name, "-o", output / name) for name in PIPELINES)
    )
    for turn in range(1, ROUNDS + 1):
        checked = () if turn == 1 else ("--no-equivalence",)  # the first run has executed this program on small tensors
        for name in PIPELINES:
            report = output / name / f"run-{turn}.json"
            command("run", output / name, "--steps", str(STEPS), "--report", report, *checked)

    default, baseline = (Trained.of(output / name, ROUNDS) for name in PIPELINES)
    (output / PAGE).write_text(page(default, baseline), encoding="utf-8")
    print(f"\n{summary(default, baseline)}\n{closing(output)}")
    return 0 if default.trains_as(baseline) else 1


def closing(output: Path) -> str:
    build = output / PIPELINES[0]
    return (
        f"\nOpen {output / PAGE} in a browser: what every process did in a step, under both programs.\n\n"
        f"Written to {output}/\n"
        "  clips.jsonl              the clips\n"
        "  latents/                 what the video and text encoders made of them\n"
        "  profile.json             what this machine takes, measured\n"
        f"and to {build}/ and {output / PIPELINES[1]}/\n"
        "  program.cascade          every rank's program; edit it, then `arachnec check` it\n"
        "  report.json              the plan\n"
        "  run-1.json, run-2.json   every step: loss, times, imbalance\n"
        "  loss.png                 the loss curve\n"
        "  timeline.html            the plan above the measured step, to zoom in\n\n"
        "Next:\n"
        f"  arachnec show {build}                                   the plan above the measured step\n"
        "  arachnec compile examples/wan2_1_14b.py --data examples/clips_480p.jsonl --cluster 2x8:h100-80g\n"
        "  docs/your_model.md                                      your own model in three functions"
    )


if __name__ == "__main__":
    sys.exit(main())
