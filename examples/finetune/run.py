"""Fine-tuning from a local folder to files that Diffusers loads: with LoRA, then of all weights.

Every line that starts with ``$`` is a command you can type yourself, in the folder of this repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(os.path.relpath(Path(__file__).parent))
OUTPUT = Path("finetune-output")
PRETRAINED, CLIPS, HELD_BACK = OUTPUT / "pretrained", OUTPUT / "clips.jsonl", OUTPUT / "held_back.jsonl"
REQUESTS = OUTPUT / "requests.jsonl"  # sampled beside training, as train.toml says
CLIP_NUMBERS = (3, 5, 10, 14)  # of the demo's 16: small ones
LATER = 20  # frames between a clip and the one of the same video that is held back for validation
RANKS, FEWER = 3, 2
STEPS, EVERY, MORE = 6, 3, 3
SAMPLED = 4  # steps from noise to a video: its caption follows in a model that is trained for longer
CLOSE = 2e-5  # of a loss, in fp32: sums in another order


def main() -> None:
    started = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    say("A folder as the hub's, written by save_pretrained (a tiny Wan2.1, random weights), and clips of real videos")
    python(HERE / "pretrained.py", PRETRAINED)
    make_clips()
    say(f"LoRA: compile for {RANKS} ranks, begin with the folder's weights, train, keep a checkpoint")
    fine_tune("lora")
    say("The same with every weight")
    fine_tune("full")
    print(f"\nAll of it took {time.perf_counter() - started:.0f} s. With your own folder: docs/fine_tuning.md")


def fine_tune(kind: str) -> None:
    """Compile, train, go on with fewer ranks, export, and compare what Diffusers loads with what the ranks had."""
    build, checkpoints, exported = OUTPUT / kind, OUTPUT / f"{kind}-checkpoints", OUTPUT / f"{kind}-exported"
    options = ("--cluster", f"{RANKS}:cpu", "--batch", "all", "--train", HERE / "train.toml")
    arachnec("compile", HERE / f"{kind}.py", "--data", CLIPS, *options, "-o", build)
    run = ("run", build, "--init", PRETRAINED, "--checkpoint", checkpoints)
    arachnec(*run, "--steps", STEPS, "--every", EVERY)
    before = losses(build)
    say(f"The same run goes on, on {FEWER} ranks in place of {RANKS}; --resume finds the newest checkpoint:")
    run = (*run, "--ranks", FEWER, "--resume")
    arachnec(*run, "--steps", MORE)
    say("Out of the checkpoint, into a file that Diffusers loads")
    options = ("--lora",) if kind == "lora" else ()
    arachnec("export", build, "--checkpoint", checkpoints, "-o", exported, *options)
    say("Is it the trained model? The run takes one more step; Diffusers, alone, computes that step's loss")
    arachnec(*run, "--steps", 1)
    (step, on_ranks), *_ = losses(build).items()
    option = "--lora" if kind == "lora" else "--transformer"
    loaded = float(python(HERE / "loss_of.py", build, step, PRETRAINED, option, exported))
    untrained = float(python(HERE / "loss_of.py", build, step, PRETRAINED))
    print(
        f"loss of step {step}: {on_ranks:.6f} on the ranks, {loaded:.6f} with what was exported, "
        f"{untrained:.6f} with the weights of the folder (it was {before[0]:.6f} at step 0)"
    )
    if abs(loaded - on_ranks) > CLOSE * on_ranks:
        sys.exit("what was exported is not what was trained")


def make_clips() -> None:
    """The small ones of the demo's manifest; later frames of the same videos are held back for validation."""
    python(HERE.parent / "demo" / "make_clips.py", CLIPS)
    rows = [json.loads(row) for row in CLIPS.read_text().splitlines()]
    trained = [rows[number] for number in CLIP_NUMBERS]
    held_back = [row | {"start": row["start"] + LATER} for row in trained]
    for path, clips in ((CLIPS, trained), (HELD_BACK, held_back)):
        path.write_text("".join(json.dumps(row) + "\n" for row in clips))
    longest = max(trained, key=lambda row: row["frames"])
    request = {key: longest[key] for key in ("caption", "frames", "height", "width")}
    REQUESTS.write_text(json.dumps({"id": "sample", **request, "steps": SAMPLED, "guidance": 2}) + "\n")


def losses(build: Path) -> dict[int, float]:
    """The loss of every step of a build's last run."""
    return {step["step"]: step["loss"] for step in json.loads((build / "run.json").read_text())["steps"]}


def arachnec(*arguments: object) -> None:
    words = [str(word) for word in arguments]
    print(f"\n$ arachnec {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "arachnec", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def python(*arguments: object) -> str:
    words = [str(word) for word in arguments]
    print(f"\n$ python {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, *words], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
