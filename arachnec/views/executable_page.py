"""The page of an executable: what ``arachnec compile``, ``run`` and ``show --html`` write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain as concatenated
from pathlib import Path
from typing import Any

from arachnec.cluster.topology import machines, named, node_of
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import versions
from arachnec.ir.nodes import Cascade, Module, quantity
from arachnec.ir.sampling import judged_ms, objective_of
from arachnec.ir.stage_sizes import block_count, recomputed_blocks
from arachnec.ir.values import Value
from arachnec.views.colours import TEXTURE_SIZE, TEXTURES, Lengths, stage_numbers, theme_css
from arachnec.views.critical_path import Link, critical_path
from arachnec.views.explain import summary
from arachnec.views.format import ms, names_of, reads_text_alone, runs, title_of
from arachnec.views.planned_and_measured import cost_sources, differences, on_cpu
from arachnec.views.timeline import COMPUTE, DRAWN, Curve, Timeline, cascade_times, imbalance, memory_curves, planned
from arachnec.views.timeline_svg import Shown, boxes, first_rows, stage_loads

PARTS = Path(__file__).with_name("page")
SCRIPTS = ("data", "view", "timelines", "memory", "table", "main")
CAPTION = 160  # characters of a caption or path that are shown
NOT_RUN = (None, None, None)
DIGITS = 3  # of ms and GiB


def page(
    module: Module,
    *timelines: Timeline,
    clips: Sequence[VideoClip] = (),
    about: Mapping[str, str] | None = None,
    sentences: Sequence[tuple[str, Sequence[str]]] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page's text. ``module`` is lowered; the first of the timelines is its plan.

    ``clips`` have captions and paths, by their ids in the IR; ``about`` is more that the header says, such as
    versions; ``sentences`` are paragraphs under a heading each; ``notes`` stand above all of it.
    """
    content = {
        **page_data(module, timelines, clips),
        "about": list((about or {}).items()),
        "sentences": [[title, list(lines)] for title, lines in sentences],
        "notes": list(notes),
    }
    pieces = {
        "style": theme_css(len(content["lengths"]), len(content["stages"]))
        + (PARTS / "page.css").read_text(encoding="utf-8"),
        "data": script_json(content),
        "script": "\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
    }
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    before, _, tail = text.partition("{{style}}")
    between, _, tail = tail.partition("{{data}}")
    middle, _, after = tail.partition("{{script}}")
    return f"{before}{pieces['style']}{between}{pieces['data']}{middle}{pieces['script']}{after}"


def script_json(value: object) -> str:
    """JSON that may stand in a script element whatever text is in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page_data(module: Module, timelines: Sequence[Timeline], clips: Sequence[VideoClip] = ()) -> dict[str, Any]:
    """Everything that the page shows, as lists of numbers and texts; ms and GiB."""
    assert module.cluster is not None, "a lowered module has a cluster"
    curves = memory_curves(module, timelines[0])
    colours = stage_numbers(stage_loads(module, timelines))
    shown = Shown(module, Lengths.of(module))
    numbers = {cascade.name: number for number, cascade in enumerate(module.cascades)}
    return {
        "name": title_of(module),
        "tiles": tiles(module, timelines, curves),
        "ranks": [program.rank for program in module.programs],
        "gpus": module.cluster.gpus,
        "limits": [_round(limit) for limit in limits(module)],
        "nodes": first_rows(module, [program.rank for program in module.programs]),
        "ops": DRAWN,
        "textures": TEXTURES,
        "tile": TEXTURE_SIZE,
        "lengths": shown.lengths.labels,
        "stages": [
            {"name": stage.name, "colour": colours[stage.name], "text": reads_text_alone(stage)}
            for stage in module.stages
        ],
        "cascades": _cascades(shown, timelines),
        "clips": _clips(module, clips),
        "timelines": [_timeline(module, timeline, numbers) for timeline in timelines],
        "memory": [
            [round(number, DIGITS) for point in curves.get(program.rank, ()) for number in point]
            for program in module.programs
        ],
        "measured_memory": _measured_memory(module, timelines),
        "whole_process": on_cpu(module),
    }


def _measured_memory(module: Module, timelines: Sequence[Timeline]) -> list[float] | None:
    """GiB of every rank at its peak, of the last timeline that has any."""
    peaks = next((timeline.peak_gib for timeline in reversed(timelines) if timeline.peak_gib), None)
    return None if peaks is None else [_round(peaks.get(program.rank, 0.0)) for program in module.programs]


def tiles(module: Module, timelines: Sequence[Timeline], curves: Mapping[int, Curve]) -> list[tuple[str, str]]:
    """The figures of the header, each with its name."""
    assert module.cluster is not None
    plan, *simulated = timelines
    makespan = max((i.end for i in plan.intervals if i.op in COMPUTE), default=0.0)
    figures = [("iteration, planned", ms(plan.end))]
    figures += [(f"iteration, {timeline.title}", ms(timeline.end)) for timeline in simulated]
    figures.append(("makespan", ms(makespan)))
    bound = module.attrs.get("bound")
    if bound is not None and quantity(bound) > 0:
        proved = ", proved optimal" if module.attrs.get("proved") is True else ""
        of = "" if objective_of(module) == "makespan" else f" of {objective_of(module)}"
        value = judged_ms(module, {cascade.name: cascade.end for cascade in module.cascades}, makespan)
        figures += [
            (f"lower bound{of}", ms(quantity(bound))),
            ("to the bound", f"{value / quantity(bound):.3f}x{proved}"),
        ]
    figures += [(f"imbalance, {t.title}", f"{imbalance([t.busy_ms(rank) for rank in t.lanes]):.1%}") for t in timelines]
    peak, limit = max(
        (
            (max(used for _, used in curves[p.rank]), limit)
            for p, limit in zip(module.programs, limits(module), strict=True)
        ),
        key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf,
        default=(0.0, module.cluster.memory),
    )
    figures += [
        ("memory, planned", f"{peak:.3g} of {limit:.3g} GiB"),
        *_memory_tile(module, timelines),
        ("ranks" if on_cpu(module) else "GPUs", f"{module.cluster.world} ({named(module.cluster)})"),
        ("clips", str(len(module.clips))),
        ("cascades", str(len(module.cascades))),
    ]
    return figures


def _memory_tile(module: Module, timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    peaks = _measured_memory(module, timelines)
    if peaks is None:
        return []
    process = ", whole process" if on_cpu(module) else ""
    return [(f"memory, measured{process}", f"{max(peaks, default=0.0):.3g} GiB")]


def limits(module: Module) -> list[float]:
    """GiB of every rank's device."""
    assert module.cluster is not None
    nodes = machines(module.cluster)
    return [nodes[node_of(module.cluster, program.rank)].memory for program in module.programs]


def _cascades(shown: Shown, timelines: Sequence[Timeline]) -> dict[str, list[Any]]:
    """The cascades by columns: a row object for each would be several times the size."""
    module = shown.module
    stages = {stage.name: number for number, stage in enumerate(module.stages)}
    rows = module.cascades
    numbers = {cascade.name: number for number, cascade in enumerate(rows)}
    spans = [cascade_times(timeline) for timeline in timelines]
    columns: dict[str, list[Any]] = {
        "name": [cascade.name for cascade in rows],
        "stage": [stages[cascade.stage] for cascade in rows],
        "phase": [cascade.phase.value for cascade in rows],
        "clips": [_flat_runs(cascade.clips) for cascade in rows],
        "batch": [cascade.batch for cascade in rows],
        "length": [shown.length(cascade) for cascade in rows],
        "tokens": [cascade.tokens for cascade in rows],
        "text": [cascade.text for cascade in rows],
        "degree": [cascade.degree for cascade in rows],
        "ranks": [_flat_runs(cascade.ranks) for cascade in rows],
        "ulysses": [_count(cascade.attrs.get("ulysses")) for cascade in rows],
        "ring": [_count(cascade.attrs.get("ring")) for cascade in rows],
        "recompute": [_recomputed(module, cascade) for cascade in rows],
        "memory": [_gib(cascade.attrs.get("memory")) for cascade in rows],
        "inputs": [[numbers[name] for name in cascade.inputs if name in numbers] for cascade in rows],
    }
    columns["spans"] = [
        [None if number is None else _round(number) for span in spans for number in span.get(cascade.name, NOT_RUN)]
        for cascade in rows
    ]
    return columns


def _clips(module: Module, clips: Sequence[VideoClip]) -> dict[str, list[Any]]:
    """The clips by columns; captions and paths where ``clips`` have them."""
    sources = [clips[clip.id] if clip.id < len(clips) else None for clip in module.clips]
    return {
        "id": [clip.id for clip in module.clips],
        "name": [_short(name) for name in names_of(module).values()],
        "size": [f"{clip.frames} x {clip.height} x {clip.width}" for clip in module.clips],
        "caption": [_short(clip.caption or "") if clip else "" for clip in sources],
        "path": [_short(str(clip.path or "")) if clip else "" for clip in sources],
    }


def _timeline(module: Module, timeline: Timeline, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Boxes as runs of six numbers: op, cascade or -1 - stage, first and last row, start, end."""
    rows = {program.rank: row for row, program in enumerate(module.programs)}
    stages = {stage.name: -1 - number for number, stage in enumerate(module.stages)}
    drawn = Timeline(
        timeline.title,
        tuple(i for i in timeline.intervals if i.rank in rows and (i.target in numbers or i.target in stages)),
    )
    ordered = sorted(boxes(drawn, rows, tolerance=0.0), key=lambda box: (box.interval.start, box.first))
    codes = {**numbers, **stages}
    return {
        "title": timeline.title,
        "end": _round(timeline.end),
        "boxes": list(
            concatenated.from_iterable(
                (
                    DRAWN.index(box.interval.op),
                    codes[box.interval.target],
                    box.first,
                    box.last,
                    _round(box.interval.start),
                    _round(box.interval.end),
                )
                for box in ordered
            )
        ),
        "critical": [_link(link, codes, rows) for link in critical_path(module, drawn)],
    }


def _link(link: Link, codes: Mapping[str, int], rows: Mapping[int, int]) -> list[Any]:
    """Cascade or stage, instructions, reason, what it waited for, gap, start, end, its rows as runs."""
    waited = codes[link.waited] if link.waited is not None else None
    rows_text = _flat_runs([rows[rank] for rank in link.ranks])
    times = (_round(link.gap), _round(link.start), _round(link.end))
    return [codes[link.target], "+".join(link.ops), link.because, waited, *times, rows_text]


def _flat_runs(numbers: Sequence[int]) -> list[int]:
    return list(concatenated.from_iterable(runs(numbers)))


def _short(text: str) -> str:
    return text if len(text) <= CAPTION else text[: CAPTION - 1] + "…"


def _recomputed(module: Module, cascade: Cascade) -> int | str:
    """How many blocks a cascade recomputes, or that it recomputes all."""
    stage = module.stage(cascade.stage)
    blocks = recomputed_blocks(cascade.attrs.get("recompute"), stage)
    return "all" if blocks and blocks == block_count(stage) else blocks


def _count(value: Value | None) -> int:
    return value if isinstance(value, int) else 1


def _gib(value: Value | None) -> float:
    return 0.0 if value is None else _round(quantity(value))


def _round(value: float) -> float:
    return round(value, DIGITS)


PAGE = "timeline.html"  # its name in an executable's folder


def executable_page(
    module: Module,
    *measured: Timeline,
    pipeline: str | None = None,
    clips: Sequence[VideoClip] = (),
    libraries: Mapping[str, str] | None = None,
) -> str:
    """The page of a lowered module.

    ``measured`` are timelines of runs of it, ``clips`` those of the whole manifest by their ids, ``libraries`` the
    versions it was compiled with, by default those that are installed.
    """
    cluster = module.cluster
    assert cluster is not None, "a lowered module has a cluster"
    about = {
        "cluster": f"@{cluster.name}",
        "stages": ", ".join(
            f"@{stage.name}" + (f" ({source})" if (source := stage.attrs.get("source")) else "")
            for stage in module.stages
        ),
        "costs from": cost_sources(module),
        "pipeline": pipeline or "",
    } | dict(libraries if libraries is not None else versions())
    about = {word: text for word, text in about.items() if text}
    plan = planned(module)
    sentences = [(section.title, section.sentences) for section in summary(module, plan)]
    notes = differences(module, plan, measured[-1]) if measured else []
    return page(module, plan, *measured, clips=clips, about=about, sentences=sentences, notes=notes)
