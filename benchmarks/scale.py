"""What the program itself costs as clips and GPUs grow: planning, lowering, checking, simulating, printing, parsing.

    python benchmarks/scale.py                                   # all sizes, one table
    python benchmarks/scale.py --svg docs/figures/scale.svg      # and the plot
    python benchmarks/scale.py --sizes 4096x1024 --encode       # with an encoder cascade before each

Clips are the bucketed video mix of `plan_video_mix.py`, one micro-batch each, on a transformer of 5120 x 40 and nodes
of eight H100. Every size runs in a process of its own, so that its peak memory is its own. Phases are in processor
seconds, which other work on the machine changes little; "sum" is planning, placing, lowering, checking and simulating,
what happens before a step can run, and "wall" the same on the clock. Ends with 1 where a module is not what its text
says.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from video_mix import tokens

from arachnec.backends.simulator import simulate
from arachnec.cluster.device_specs import DEVICE_SPECS
from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.lowering.programs import lower
from arachnec.passes.annotate import from_device_specs
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline

CLIPS, GPUS = 1024, 256  # where the other one grows
SIZES = ((64, GPUS), (256, GPUS), (CLIPS, GPUS), (4096, GPUS), (CLIPS, 16), (CLIPS, 64), (CLIPS, 1024), (4096, 1024))
PHASES = ("schedule", "place", "lower", "check", "simulate", "print", "parse")
BEFORE_A_STEP = PHASES[:5]
DEVICE = DEVICE_SPECS["h100-80g"]
HIDDEN, LAYERS, HEADS = 5120, 40, 40


def polynomial(unit: str, quadratic: float, linear: float) -> Formula:
    powers = ((quadratic, (("B", 1), ("S", 2))), (linear, (("B", 1), ("S", 1))))
    return Formula(tuple(Term(value, power) for value, power in powers if value), unit)


def costed(clips: int, gpus: int, *, encode: bool) -> Module:
    """A module at level costed: a train cascade for every clip, and before it, where asked for, an encode cascade."""
    rng = random.Random(0)
    dit = Stage(
        "dit",
        True,
        Attributes.of(
            params=14_000_000_000,
            dtype="bf16",
            heads=HEADS,
            attentions=LAYERS,
            flops=polynomial("TFLOP", LAYERS * 4 * HIDDEN / 1e12, LAYERS * 28 * HIDDEN**2 / 1e12),
            saved=polynomial("GiB", 0, 4e-3),
            saved_recompute=polynomial("GiB", 0, 4e-4),
            traffic=polynomial("GiB", 0, LAYERS * 4 * HIDDEN * 2 / 2**30),
            state=Quantity(30.0, "GiB"),
        ),
    )
    vae = Stage("vae", False, Attributes.of(flops=polynomial("TFLOP", 0, 4e-3), output=polynomial("GiB", 0, 6e-8)))
    stages = (vae, dit) if encode else (dit,)
    mix = tuple(Clip(number, 81, 480, 832, 512, tokens(rng)) for number in range(clips))
    cascades: list[Cascade] = []
    for clip in mix:
        names: tuple[str, ...] = ()
        if encode:
            cascades.append(Cascade(f"e{clip.id}", Phase.ENCODE, "vae", (clip.id,), 1, clip.tokens, clip.text))
            names = (cascades[-1].name,)
        cascades.append(Cascade(str(clip.id), Phase.TRAIN, "dit", (clip.id,), 1, clip.tokens, clip.text, names))
    return Module(
        "scale",
        Level.COSTED,
        parse_cluster(f"{gpus // 8}x8:{DEVICE.name}"),
        mix,
        tuple(from_device_specs(stage, DEVICE.sustained, DEVICE.block_overhead) for stage in stages),
        cascades=tuple(cascades),
    )


def measured(clips: int, gpus: int, budget: int, *, encode: bool) -> dict[str, Any]:
    """Processor seconds of every phase, and peak memory, of one size; in this process."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[..., Any], *given: Any) -> Any:
        started = time.process_time()
        result = work(*given)
        seconds[name] = time.process_time() - started
        return result

    module = costed(clips, gpus, encode=encode)
    begin = time.perf_counter()
    scheduled = timed("schedule", Pipeline.parse(f"schedule-z3{{budget={budget}ms}}").run, module)
    placed = timed("place", Pipeline.parse("place").run, scheduled)
    lowered = timed("lower", lower, placed)
    timed("check", checked, lowered)
    simulation = timed("simulate", simulate, lowered)
    wall = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    text = timed("print", print_module, lowered)
    again = timed("parse", parse_module, text)
    return {
        "clips": clips,
        "gpus": gpus,
        "budget_ms": budget,
        **{name: round(value, 3) for name, value in seconds.items()},
        "sum": round(sum(seconds[name] for name in BEFORE_A_STEP), 3),
        "wall": round(wall, 3),
        "peak_gib": round(peak, 3),
        "peak_with_text_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "text_mb": round(len(text) / 1e6, 2),
        "instructions": sum(len(program.instructions) for program in lowered.programs),
        "iteration_ms": round(simulation.iteration_ms, 1),
        "round_trip": again == lowered,
    }


def apart(clips: int, gpus: int, budget: int, *, encode: bool) -> dict[str, Any]:
    """``measured`` in a process of its own."""
    command = [sys.executable, __file__, "--one", f"{clips}x{gpus}", "--budget", str(budget)]
    answer = subprocess.run([*command, *(["--encode"] if encode else [])], check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(answer.stdout)
    return row


HEADER = f"{'clips':>6} {'GPUs':>5} " + " ".join(f"{name:>9}" for name in (*PHASES, "sum", "wall", "GiB", "text MB"))


def line(row: dict[str, Any]) -> str:
    cells = [f"{row[name]:>9.2f}" for name in (*PHASES, "sum", "wall", "peak_gib", "text_mb")]
    return f"{row['clips']:>6} {row['gpus']:>5} " + " ".join(cells)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Processor seconds of the phases over the clips, and over the GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "scale", "svg.fonttype": "none", "xtick.minor.size": 0})
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for panel, along, title in (
        (panels[0], "clips", f"on {GPUS} GPUs"),
        (panels[1], "gpus", f"{CLIPS} clips"),
    ):
        fixed = ("gpus", GPUS) if along == "clips" else ("clips", CLIPS)
        here = sorted((row for row in rows if row[fixed[0]] == fixed[1]), key=lambda row: row[along])
        places = [row[along] for row in here]
        for name in PHASES:
            panel.plot(places, [max(row[name], 1e-3) for row in here], ".-", label=name)
        panel.set(title=title, xlabel={"gpus": "GPUs"}.get(along, along), xscale="log", yscale="log")
        panel.set_xticks(places, [str(place) for place in places])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("processor seconds")
    panels[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None} if file.suffix == ".svg" else None)


def sizes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(clips), int(gpus)) for clips, gpus in (size.split("x") for size in text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="CLIPSxGPUS, several with commas")
    parser.add_argument("--budget", type=int, default=1000, help="of the scheduler, ms")
    parser.add_argument("--encode", action="store_true", help="an encoder cascade before every clip")
    parser.add_argument("--svg", type=Path, help="draw the plot there")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--one", type=sizes, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        ((clips, gpus),) = arguments.one
        print(json.dumps(measured(clips, gpus, arguments.budget, encode=arguments.encode)))
        return 0
    rows = []
    print(HEADER)
    for clips, gpus in arguments.sizes:
        rows.append(apart(clips, gpus, arguments.budget, encode=arguments.encode))
        print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if arguments.svg:
        draw(rows, arguments.svg)
    return int(not all(row["round_trip"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
