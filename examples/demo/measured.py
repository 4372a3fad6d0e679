"""What two programs of the same clips were measured to take: a few lines for the terminal, and a page."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from html import escape
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_file
from arachnec.views.timeline import Timeline, read_measured
from arachnec.views.timeline_svg import Plan, draw_comparison

SAME_LOSS = 1e-4  # relative, after some steps of an optimizer that divides by small numbers


@dataclass(frozen=True)
class Trained:
    """One program's runs. ``steps_ms`` are the steps that count, a row for each run."""

    folder: Path
    module: Module
    timeline: Timeline  # of the last run's last step
    steps_ms: tuple[tuple[float, ...], ...]
    losses: tuple[float, ...]  # of the last run

    @staticmethod
    def of(folder: Path, rounds: int) -> Trained:
        """Read from an executable's folder. Of every run the first step (warm-up) and the last do not count: clips of a
        step are encoded by the step before, and the last one encodes none ahead."""
        runs = [json.loads((folder / f"run-{turn}.json").read_text())["steps"] for turn in range(1, rounds + 1)]
        module = parse_file(folder / "measured.cascade")
        times = tuple(tuple(step["step_ms"] for step in steps[1:-1]) for steps in runs)
        losses = tuple(step["loss"] for step in runs[-1])
        return Trained(folder, module, read_measured(folder / "measured.json"), times, losses)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def step_ms(self) -> float:
        return statistics.median(time for run in self.steps_ms for time in run)

    @property
    def predicted_ms(self) -> float:
        return simulate(self.module).iteration_ms

    def loss_difference(self, other: Trained) -> float:
        """The largest relative difference of a step's losses."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True))

    def trains_as(self, other: Trained) -> bool:
        return self.loss_difference(other) <= SAME_LOSS


def ratios(default: Trained, baseline: Trained) -> list[float]:
    """How many times faster, by the medians of each round."""
    return [
        statistics.median(theirs) / statistics.median(ours)
        for ours, theirs in zip(default.steps_ms, baseline.steps_ms, strict=True)
    ]


def summary(default: Trained, baseline: Trained) -> str:
    rows = [
        f"  {trained.name:14} {trained.step_ms:8.0f} {trained.predicted_ms:10.0f}   "
        f"{trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}"
        for trained in (default, baseline)
    ]
    rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios(default, baseline))
    apart = default.loss_difference(baseline)
    same = "the same" if default.trains_as(baseline) else "NOT THE SAME"
    return "\n".join(
        [
            f"  {'program':14} {'step ms':>8} {'predicted':>10}   loss",
            *rows,
            f"Measured: a step of `{default.name}` is {baseline.step_ms / default.step_ms:.2f} times as fast as one of "
            f"`{baseline.name}` (rounds: {rounds}).",
            f"Losses of every step are {same}: they differ by at most {apart:.0e} of themselves.",
        ]
    )


def page(default: Trained, baseline: Trained) -> str:
    """One file that loads nothing: both measured timelines on one scale, and the figures."""
    same = "the same" if default.trains_as(baseline) else "OTHER"
    title = f"{len(default.module.clips)} clips, one long: a training step as it was measured"
    drawing = draw_comparison(title, [_plan(default), _plan(baseline)])
    links = " ".join(f'<a href="{t.name}/timeline.html">{escape(t.name)}, to zoom in</a>' for t in (default, baseline))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>arachnec demo</title>\n'
        "<style>:root { color-scheme: light dark } body { font: 15px/1.5 Helvetica, Arial, sans-serif; "
        "max-width: 1200px; margin: 24px auto } "
        "svg { max-width: 100%; height: auto } a { margin-right: 24px }</style></head><body>\n"
        f"<h1>{baseline.step_ms / default.step_ms:.2f} times as fast as data parallelism, with {same} losses</h1>\n"
        "<p>Above: the median step of each program. Below: what each process did in its last step. Blue is the "
        "transformer, striped in the forward. With data "
        f"parallelism one process has the long clip and the other waits; with `{escape(default.name)}` both share it."
        "</p>\n"
        f"{drawing}<p>{links}</p>\n<pre>{escape(summary(default, baseline))}</pre>\n</body></html>\n"
    )


def _plan(trained: Trained) -> Plan:
    makespan = max(i.end for i in trained.timeline.intervals if i.op in ("forward", "backward"))
    return Plan(trained.name, trained.module, trained.timeline, makespan, trained.step_ms, bound=0.0)
