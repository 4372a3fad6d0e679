"""Train a large and a small model on clips of real videos, then sample with both: the large one sketches.

Every line that starts with ``$`` is a command you can type yourself, in the folder of this repository.
"""

from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(os.path.relpath(Path(__file__).parent))
OUTPUT = Path("generate-output")
CLIPS, REQUESTS, VIDEOS = OUTPUT / "clips.jsonl", OUTPUT / "requests.jsonl", OUTPUT / "videos"
CLIP_NUMBERS = (2, 3, 5, 10, 13, 14)  # of the demo's 16: small ones
RANKS, STEPS = 4, 80
SAMPLED, LARGE_STEPS = 20, 6


def main() -> None:
    started = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    say("Clips of real videos, and requests for videos like them")
    make_files()
    for name in ("large", "small"):
        say(f"Train the {name} model on {RANKS} processes, and write its weights as Diffusers has them")
        train(name)
    say(f"Sample: of {SAMPLED} steps the large model takes the first {LARGE_STEPS}, the small one the others")
    sample = ("generate", HERE / "sampler.py", "--data", REQUESTS, "--cluster", f"{RANKS}:cpu", "-o", VIDEOS)
    arachnec(*sample, "--switch", f"fixed={LARGE_STEPS}")
    page = write_page()
    print(f"\nAll of it took {time.perf_counter() - started:.0f} s. Open {page} in a browser to see the videos.")


def train(name: str) -> None:
    build, checkpoints = OUTPUT / f"{name}-build", OUTPUT / f"{name}-checkpoints"
    data = ("--data", CLIPS, "--batch", "all", "--cluster", f"{RANKS}:cpu")
    arachnec("compile", HERE / f"{name}.py", *data, "-o", build, "--lr", "2e-3")
    arachnec("run", build, "--steps", STEPS, "--checkpoint", checkpoints, "--every", STEPS)
    arachnec("export", build, "--checkpoint", checkpoints, "-o", OUTPUT / name)
    steps = json.loads((build / "run.json").read_text())["steps"]
    means = [sum(step["loss"] for step in part) / len(part) for part in (steps[:10], steps[-10:])]
    print(f"loss of the {name} model: {means[0]:.3f} in the first ten steps, {means[1]:.3f} in the last ten")


def make_files() -> None:
    """The small ones of the demo's manifest; two requests of each caption, at the clip's size."""
    python(HERE.parent / "demo" / "make_clips.py", CLIPS)
    rows = [json.loads(row) for row in CLIPS.read_text().splitlines()]
    rows = [rows[number] for number in CLIP_NUMBERS]
    CLIPS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = [
        {"id": f"{number}-{seed}", "seed": seed, "steps": SAMPLED, "guidance": 2}
        | {key: row[key] for key in ("caption", "frames", "height", "width")}
        for number, row in enumerate(rows)
        for seed in range(2)
        if row["frames"] > 1
    ]
    REQUESTS.write_text("".join(json.dumps(request) + "\n" for request in requests))


def write_page() -> Path:
    """All videos under their captions."""
    captions = {row["id"]: row["caption"] for row in map(json.loads, REQUESTS.read_text().splitlines())}
    videos = "\n".join(
        f'<figure><video src="{VIDEOS.name}/{id}.mp4" autoplay loop muted width="320"></video>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for id, caption in captions.items()
    )
    page = OUTPUT / "index.html"
    page.write_text(f"<!doctype html>\n<title>Sampled videos</title>\n{videos}\n", encoding="utf-8")
    return page


def arachnec(*arguments: object) -> None:
    run("arachnec", "-m", "arachnec", *arguments)


def python(*arguments: object) -> None:
    run("python", *arguments)


def run(shown: str, *arguments: object) -> None:
    words = [str(word) for word in arguments]
    told = words[2:] if words[0] == "-m" else words
    print(f"\n$ {shown} {' '.join(told)}", flush=True)
    done = subprocess.run([sys.executable, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
