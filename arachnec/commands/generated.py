"""Requests on ranks of this machine, and what a person reads of them: segments, figures, files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from arachnec.cluster.topology import named
from arachnec.commands.options import print_json
from arachnec.commands.tables import attention_word, bold, ms, plain_table, ranges, terminal
from arachnec.ir.diagnostic import counted
from arachnec.ir.limits import TABLE_ROWS
from arachnec.ir.nodes import Cascade, Clip, Module, Phase
from arachnec.ir.sampling import branches_of, forecast_of, models_of, outcomes_of
from arachnec.views.executable_page import PAGE
from arachnec.views.planned_and_measured import cost_sources

if TYPE_CHECKING:
    from arachnec.generation.run import Generation


def generate_here(
    generation: Generation,
    as_json: bool = False,
    report_file: Path | None = None,
    stall_timeout: float | None = None,
) -> None:
    """Run what is left, and print a line a request, or the report as JSON; ``report_file`` has it too."""
    from arachnec.generation.run import run_here
    from arachnec.launch.local_ranks import RankCrashed

    try:
        report = run_here(generation, stall_timeout)
    except RankCrashed as crash:
        # The launcher's own traceback would only hide the rank's.
        print(crash, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("what is finished stays; the same command does the requests that are not", err=True)
        raise
    if report_file is not None:
        report_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(report)
        return
    for row in report["requests"]:
        where = row.get("video") or row["latents"]
        switched = "" if row["switched"] is None or len(report["models"]) == 1 else f", {row['switched']} by the first"
        ended = "finished before" if row["earlier"] else f"after {row['seconds']:.1f} s"
        click.echo(f"{row['id']}: {counted(row['steps'], 'step')}{switched}, {ended}: {where}")
    requests = counted(len(report["requests"]), "request")
    click.echo(f"{requests}, {report['seconds']:.1f} s on {counted(report['ranks'], 'rank')}")


COLUMNS = ("request", "video", "stage", "steps", "degree", "branches", "attention", "ranks", "start", "end")
NUMBERS = {"steps", "degree", "start", "end"}


def print_request_plan(module: Module, report: Mapping[str, Any], tracing_ms: float, folder: Path | None) -> None:
    """The segments of a lowered module, the plan's figures, what is proved, and where the executable lies."""
    console = terminal()
    everything = f"`arachnec show {folder} --all` prints" if folder is not None else "`--json` has"
    print_segments(console, module, report["cascades"], f"{everything} them all")
    last = max(report["requests"], key=lambda row: float(row["latency_ms"]))
    of = "" if report["objective"] == "makespan" else f" of {report['objective']}"
    console.print(
        bold("predicted"),
        f"(costs from: {cost_sources(module)})\n"
        f"  makespan {ms(report['makespan_ms'])}, lower bound{of} {ms(report['bound_ms'])}, gap {report['gap']:.1%}"
        f"{', proved optimal' if report['proved_optimal'] else ''}\n"
        f"  latency: mean {ms(report['mean_latency_ms'])}, 95th percentile {ms(report['p95_latency_ms'])}, "
        f"longest {ms(last['latency_ms'])} of request {last['id']}\n"
        f"  imbalance {report['imbalance']:.1%}, peak memory {report['peak_memory_gib']:.3g} GiB per rank",
    )
    console.print(bold("measured"))
    console.print(f"  tracing {tracing_ms / 1e3:.1f} s, planning {ms(report['planning_ms'])}")
    console.print(bold("proved"))
    outcomes = ", whenever it switches" if any(len(outcomes_of(clip)) > 1 for clip in module.clips) else ""
    console.print(
        f"  {counted(len(module.clips), 'request')}, every step taken once{outcomes}, no deadlock, inputs before use, "
        "memory within the device"
    )
    if folder is not None:
        page = f"the plan as a page: {folder / PAGE}"
        console.print(f"\nwrote {folder}; {page}; next:", bold(f"arachnec run {folder}"), soft_wrap=True)


def print_segments(
    console: Console, module: Module, rows: Sequence[Mapping[str, Any]], everything: str, most: int | None = TABLE_ROWS
) -> None:
    """What is sampled where, and its segments: of many the longest, in the order of ``rows``, which are the cascades of
    a report. ``everything`` says where the others are."""
    console.print(bold(_title(module, len(rows))), soft_wrap=True)
    longest = {
        row["name"] for row in sorted(rows, key=lambda row: float(row["start_ms"]) - float(row["end_ms"]))[:most]
    }
    console.print(segment_table(module, [row for row in rows if row["name"] in longest]))
    if len(rows) > len(longest):
        left_out = len(rows) - len(longest)
        console.print(f"  ... and {left_out} more, shorter ones; {everything}", highlight=False, soft_wrap=True)


def segment_table(module: Module, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row a cascade, those of a request one after another."""
    table = plain_table("")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    clips = {clip.id: clip for clip in module.clips}
    named = {cascade.name: cascade for cascade in module.cascades}
    before: tuple[int, ...] = ()
    for row in rows:
        cascade = named[str(row["name"])]
        first = clips[cascade.clips[0]]
        told = cascade.clips == before  # the request stands in the row above
        before = cascade.clips
        table.add_row(
            "" if told else ", ".join(_name(clips[clip]) for clip in cascade.clips),
            "" if told else f"{first.frames} x {first.height} x {first.width}",
            cascade.stage,
            _steps(row),
            str(cascade.degree),
            _branches(cascade),
            attention_word(cascade.attrs.get("ulysses"), cascade.attrs.get("ring")),
            ranges(row["ranks"]),
            ms(row["start_ms"]),
            ms(row["end_ms"]),
        )
    return table


def _title(module: Module, segments: int) -> str:
    """``large then small, switch fixed=10 after 10 steps: 4 requests on 8 x h100-80g, 12 segments``."""
    cluster, switch = module.cluster, module.attrs.get("switch")
    outcomes = [outcomes_of(clip) for clip in module.clips]
    words = " then ".join(models_of(module))
    if switch is not None:
        least, most = min(k[0] for k in outcomes), max(k[-1] for k in outcomes)
        planned = sorted({forecast_of(clip) for clip in module.clips})
        forecast = f", planned for {ranges(planned)}" if any(len(k) > 1 for k in outcomes) else ""
        words += f", switch {switch} after {f'{least} to {most}' if least < most else least} steps{forecast}"
    place = "" if cluster is None else f" on {named(cluster)}"
    return f"{words}: {counted(len(module.clips), 'request')}{place}, {counted(segments, 'segment')}"


def _name(clip: Clip) -> str:
    return str(clip.attrs.get("name", clip.id))


def _steps(row: Mapping[str, Any]) -> str:
    """``0-16``, and behind it how many of them are planned for where a switch may end it."""
    if "steps" not in row:
        return ""
    first, last = row["steps"]
    planned, steps = row["planned_steps"], f"{first}-{last}" if first < last else str(first)
    return steps if planned == last - first + 1 else f"{steps} ({planned})"


def _branches(cascade: Cascade) -> str:
    """``2 batched``, ``2 apart``, ``2 + 1`` ranks, or 1."""
    branches = branches_of(cascade)
    if cascade.phase is not Phase.DENOISE or branches == 1:
        return "" if cascade.phase is not Phase.DENOISE else "1"
    apart = " + ".join(map(str, cascade.sides)) if cascade.unconditional else "apart"
    return f"{branches} {apart if cascade.side > 1 else 'batched'}"
