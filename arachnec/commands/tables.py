"""What ``arachnec compile`` and ``arachnec compare`` print for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arachnec.ir.limits import TABLE_ROWS
from arachnec.ir.nodes import Cascade, Module, Phase
from arachnec.ir.stage_sizes import gib
from arachnec.views.executable_page import PAGE
from arachnec.views.format import clip_names, names_of, printable, size_of, title_of
from arachnec.views.format import ms as ms
from arachnec.views.format import ranges as ranges
from arachnec.views.format import terminal as terminal
from arachnec.views.planned_and_measured import cost_sources

if TYPE_CHECKING:
    from arachnec.driver import Compiled

NAMES = 24  # characters of a cascade's clips
COLUMNS = ("cascade", "stage", "phase", "clips", "tokens", "degree", "attention", "ranks", "start", "end")
NUMBERS = {"tokens", "start", "end", "degree"}


def print_plan(compiled: Compiled, folder: Path | None) -> None:
    """The cascades of iteration 0, the plan's figures, and where the executable was written."""
    console = terminal()
    module, report = compiled.module, compiled.report
    everything = f"`arachnec show {folder} --all` prints" if folder is not None else "`--json` has"
    print_cascades(console, module, report["cascades"], f"{everything} them all")
    sum_of = f"{ms(report['makespan_ms'])} + exposed gradient all-reduce + optimizer"
    console.print(
        bold("predicted"),
        f"(costs from: {cost_sources(module)})\n"
        f"  iteration {ms(report['iteration_ms'])} = makespan {sum_of}\n"
        f"  lower bound {ms(report['bound_ms'])}, gap {report['gap']:.1%}"
        f"{', proved optimal' if report['proved_optimal'] else ''}\n"
        f"  imbalance {report['imbalance']:.1%}, peak memory {report['peak_memory_gib']:.3g} GiB per rank",
    )
    for name, ranks in report["tensor_parallel"].items():
        held = gib(module.stage(name).attrs.get("state"))
        console.print(f"  encoder @{name} divided by width over {ranks} ranks: {held:.3g} GiB of it on each")
    console.print(bold("measured"))
    console.print(f"  tracing {compiled.tracing_ms / 1e3:.1f} s, planning {ms(report['planning_ms'])}")
    console.print(bold("proved"))
    console.print(
        f"  {len(module.clips)} clips each counted once, no deadlock, inputs before use, memory within the device"
    )
    for line in compiled.notes:
        console.print(line, highlight=False, soft_wrap=True)
    for line in compiled.limits:
        console.print(bold("warning:"), line, highlight=False, soft_wrap=True)
    if compiled.warnings and any(cascade.degree > 1 for cascade in module.cascades):
        notice = "ranks that share a clip gather more than attention needs, in every block:"
        console.print(bold("warning:"), notice)
        for line in compiled.warnings:
            console.print(f"  {line}", highlight=False, soft_wrap=True)
    if folder is not None:
        page = f"the plan as a page: {folder / PAGE}"
        console.print(f"\nwrote {folder}; {page}; next:", bold(f"arachnec run {folder}"), soft_wrap=True)


def bold(text: str) -> Text:
    return Text(text, style="bold")


def print_cascades(
    console: Console,
    module: Module,
    rows: Sequence[Mapping[str, Any]],
    everything: str,
    most: int | None = TABLE_ROWS,
    measured: Mapping[str, float] | None = None,
) -> None:
    """The longest cascades of a report, ``most`` of them, or all; ``everything`` says where the others are.
    ``measured`` has the ms that a run took for each, by name."""
    longest = sorted(rows, key=lambda row: float(row["start_ms"]) - float(row["end_ms"]))
    console.print(cascade_table(module, longest[:most], len(rows), measured))
    left_out = len(rows) - len(longest[:most])
    if left_out:
        console.print(f"  ... and {left_out} more, shorter ones; {everything}", highlight=False, soft_wrap=True)


def cascade_table(
    module: Module, rows: Sequence[Mapping[str, Any]], of: int, measured: Mapping[str, float] | None = None
) -> Table:
    """A row a cascade, in this order, ``of`` so many."""
    table = plain_table(f"{title_of(module)}: {of} cascades, the longest first")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    table.columns[COLUMNS.index("clips")].max_width = NAMES
    table.columns[COLUMNS.index("clips")].no_wrap = True
    if measured is not None:
        table.add_column("measured", justify="right")
    named = {cascade.name: cascade for cascade in module.cascades}
    names = names_of(module)
    for row in rows:
        cascade = named[str(row["name"]).removeprefix("%")]
        table.add_row(
            f"%{cascade.name}",
            cascade.stage,
            cascade.phase.value,
            printable(clip_names(names, cascade.clips)),
            size_of(cascade, module.stage(cascade.stage)),
            str(cascade.degree),
            split_word(cascade),
            ranges(row["ranks"]),
            ms(row["start_ms"]),
            ms(row["end_ms"]),
            *([] if measured is None else [ms(measured[cascade.name]) if cascade.name in measured else ""]),
        )
    return table


def split_word(cascade: Cascade) -> str:
    """How the ranks of a cascade share it: branches of a step apart, then attention."""
    attention = attention_word(cascade.attrs.get("ulysses"), cascade.attrs.get("ring"))
    if (other := cascade.unconditional) is not None:
        return " and ".join(word or "1 rank" for word in (attention, attention_word(*other)))
    apart = f"branches {cascade.side}" if cascade.phase is Phase.DENOISE and cascade.side > 1 else ""
    return " x ".join(filter(None, (apart, attention)))


def attention_word(ulysses: object, ring: object) -> str:
    """``ulysses 4``, ``ring 3``, ``ulysses 4 x ring 2``, or nothing on one rank."""
    factors = [f"{name} {n}" for name, n in (("ulysses", ulysses), ("ring", ring)) if isinstance(n, int) and n > 1]
    return " x ".join(factors)


def comparison_table(rows: Sequence[Mapping[str, Any]], samples: bool = False) -> Table:
    """One row a pipeline, simulated; the fastest first. Rows of pipelines that sample say how long requests take."""
    best = min(row["iteration_ms"] for row in rows)
    table = plain_table("predicted, all requests" if samples else "predicted, one iteration")
    headings = ("x best", "x bound", "imbalance", "MFU", "memory, GiB", "planning")
    whole, last = ("makespan", ("latency", "95th")) if samples else ("iteration", ("dropped", "repeated"))
    for column in ("pipeline", whole, *headings, *last):
        table.add_column(column, justify="left" if column == "pipeline" else "right")
    for row in sorted(rows, key=lambda row: float(row["iteration_ms"])):
        table.add_row(
            row["pipeline"],
            ms(row["iteration_ms"]),
            f"{row['iteration_ms'] / best:.3f}",
            f"{1 + row['gap']:.3f}",
            f"{row['imbalance']:.1%}",
            f"{row['mfu']:.1%}" if row["mfu"] is not None else "-",
            f"{row['peak_memory_gib']:.3g} of {row['memory_limit_gib']:.3g}",
            ms(row["planning_ms"]),
            *(
                (ms(row["mean_latency_ms"]), ms(row["p95_latency_ms"]))
                if samples
                else (str(row["clips_dropped"]), str(row["clips_repeated"]))
            ),
        )
    return table


def comparison_bars(rows: Sequence[Mapping[str, Any]], width: int, samples: bool = False) -> list[str]:
    """A bar a pipeline: makespan, then what comes after it, and where its own lower bound lies."""
    ordered = sorted(rows, key=lambda row: float(row["iteration_ms"]))
    label = max(len(row["pipeline"]) for row in rows)
    scale = (width - label - 13) / ordered[-1]["iteration_ms"]
    lines = []
    for row in ordered:
        work, total, bound = (round(row[key] * scale) for key in ("makespan_ms", "iteration_ms", "bound_ms"))
        bar = list("█" * work + "░" * (total - work))
        if bar and row.get("objective", "makespan") == "makespan":
            bar[min(bound, len(bar) - 1)] = "│"
        lines.append(f"{row['pipeline']:{label}} {''.join(bar)} {ms(row['iteration_ms'])}")
    after = "│ lower bound of its requests"
    if not samples:
        after = "░ exposed gradient all-reduce and step  │ lower bound of its micro-batches"
    return [*lines, f"{'':{label}} █ makespan  {after}"]


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", pad_edge=False, box=box.SIMPLE_HEAD)
