"""Gantt charts as SVG without scripts or outside references: timelines on one time axis, and plans compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

from arachnec.ir.limits import MOST_DRAWN_RANKS
from arachnec.ir.nodes import Cascade, Module, Stage
from arachnec.views.colours import TEXTURES, Lengths, stage_numbers, svg_style, svg_textures
from arachnec.views.format import clip_names, names_of, size_of, title_of
from arachnec.views.timeline import DRAWN, Interval, Timeline, imbalance, scale_end

WIDTH = 1200
LEFT, RIGHT = 72, 24
AXIS, GAP, LINE = 26, 18, 17
LEAST_NODE = 10  # px of a node that lines separate from others
TOKENS = "tokens of a clip:"
CHARACTER = 6.4  # px of one character at 11 px


@dataclass(frozen=True)
class Box:
    """One instruction on ranks that stand next to each other."""

    first: int  # row
    last: int
    interval: Interval


def draw(module: Module, *timelines: Timeline) -> str:
    """The timelines as SVG text. Cascades are coloured by the length of their clips; textures say what is done."""
    lengths = Lengths.of(module)
    ranks = sorted({rank for timeline in timelines for rank in timeline.lanes})
    rows = {rank: row for row, rank in enumerate(ranks)}
    height = max(2.0, min(26.0, 800 / max(1, len(ranks))))  # a thousand ranks still fit a screen or two
    end = scale_end(*(timeline.end for timeline in timelines))
    head, top = _head(module, lengths, timelines)
    elements = [svg_textures([op for op in DRAWN if op in TEXTURES]), *head]
    for timeline in timelines:
        elements += _panel(module, timeline, rows, lengths, top, height, end)
        top += 20 + height * len(ranks) + AXIS + GAP
    style = svg_style(len(lengths.classes))
    return "\n".join([*opening(WIDTH, top, style), *elements, "</svg>"]) + "\n"


def stage_loads(module: Module, timelines: Sequence[Timeline]) -> dict[str, float]:
    """ms of every stage, on all ranks together, in the first timeline."""
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    total = {stage.name: 0.0 for stage in module.stages}
    for timeline in timelines[:1]:
        for interval in timeline.intervals:
            if interval.target in stage_of:
                total[stage_of[interval.target]] += interval.end - interval.start
    return total


def ticks(end: float, limit: int = 8) -> list[float]:
    """Round times from 0 to ``end``, at most ``limit`` steps apart."""
    power = 10.0 ** math.floor(math.log10(end / limit))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * limit >= end * (1 - 1e-9))
    return [step * i for i in range(int(end / step + 1e-9) + 1)]


def time_text(ms: float) -> str:
    """``250 ms``, ``4.5 s``."""
    return f"{ms / 1e3:g} s" if ms >= 1e3 else f"{ms:g} ms"


def boxes(timeline: Timeline, rows: dict[int, int], tolerance: float) -> Iterable[Box]:
    """What ranks in neighbouring rows do together, within ``tolerance`` ms, as one box."""
    groups: dict[tuple[str, str], list[Interval]] = {}
    for interval in timeline.intervals:
        if interval.op in DRAWN:
            groups.setdefault((interval.op, interval.target), []).append(interval)
    for intervals in groups.values():
        intervals.sort(key=lambda i: (rows[i.rank], i.start))
        box: Box | None = None
        for interval in intervals:
            row = rows[interval.rank]
            if box is not None and row == box.last + 1 and _alike(box.interval, interval, tolerance):
                box = Box(box.first, row, box.interval)
                continue
            if box is not None:
                yield box
            box = Box(row, row, interval)
        if box is not None:
            yield box


def _alike(a: Interval, b: Interval, tolerance: float) -> bool:
    return abs(a.start - b.start) <= tolerance and abs(a.end - b.end) <= tolerance


def legend(entries: Sequence[tuple[str, str]], left: float, top: float, right: float) -> tuple[list[str], float]:
    """Marks and their texts from left to right, in as many lines as they need; and where the last line ends. A mark is
    ``fill``, or ``fill texture``."""
    elements, x, y = list[str](), left, top
    for text, mark in entries:
        wide = 16 + CHARACTER * len(text) + 14
        if x > left and x + wide > right:
            x, y = left, y + LINE
        fill, _, texture = mark.partition(" ")
        elements.append(f'<rect class="{fill}" x="{x:.1f}" y="{y}" width="11" height="11"/>')
        if texture:
            elements.append(f'<rect fill="url(#{texture})" x="{x:.1f}" y="{y}" width="11" height="11"/>')
        elements.append(f'<text class="text" x="{x + 16:.1f}" y="{y + 9}">{escape(text)}</text>')
        x += wide
    return elements, y + LINE


def op_entries(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """A legend of the operations that are drawn, on grey: what tells them apart is no colour."""
    seen = {interval.op for timeline in timelines for interval in timeline.intervals}
    ops = [op for op in DRAWN if op in seen]
    marks: dict[str, list[str]] = {}
    for op in ops:
        marks.setdefault(TEXTURES.get(op, ""), []).append(op)
    return [(", ".join(same), f"sync {same[0]}" if texture else "sync") for texture, same in marks.items()]


def _head(module: Module, lengths: Lengths, timelines: Sequence[Timeline]) -> tuple[list[str], float]:
    ops, top = legend(op_entries(timelines), LEFT, 36, WIDTH - RIGHT)
    classes = [(label, f"length-{number}") for number, label in enumerate(lengths.labels)]
    start = LEFT + CHARACTER * len(TOKENS) + 4
    colours, top = legend(classes, start, top, WIDTH - RIGHT) if classes else ([], top)
    return [
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold" class="text">{escape(title_of(module))}</text>',
        *ops,
        *([f'<text x="{LEFT}" y="{top - LINE + 9}" class="quiet">{TOKENS}</text>'] if classes else []),
        *colours,
    ], top


def opening(width: float, height: float, style: str) -> list[str]:
    """The start of a drawing that follows the reader's light or dark theme."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:.0f}" '
        f'viewBox="0 0 {width:g} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        style,
        f'<rect width="{width:g}" height="{height:.0f}" class="ground"/>',
    ]


def _panel(
    module: Module,
    timeline: Timeline,
    rows: dict[int, int],
    lengths: Lengths,
    top: float,
    height: float,
    end: float,
) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = top + 20 + height * len(rows)
    busy = [timeline.busy_ms(rank) for rank in timeline.lanes]
    summary = f"{time_text(float(f'{timeline.end:.4g}'))}, imbalance {imbalance(busy):.1%}"
    elements = [
        f'<text x="{LEFT}" y="{top + 12}" font-weight="bold" class="text">{escape(timeline.title)}'
        f'<tspan dx="8" font-weight="normal" class="quiet">{summary}</tspan></text>'
    ]
    every = max(1, round(14 / height))
    for rank, row in rows.items():
        y = top + 20 + row * height
        shade = "row" if row % 2 == 0 else "other-row"
        elements.append(
            f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{height:.1f}" class="{shade}"/>'
        )
        if row % every == 0:
            middle = y + min(height, 14) / 2 + 4 if height < 14 else y + height / 2 + 4
            elements.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end" class="quiet">rank {rank}</text>')
    for time in ticks(end):
        x = LEFT + time * scale
        elements.append(f'<line x1="{x:.1f}" y1="{top + 20}" x2="{x:.1f}" y2="{bottom:.1f}" class="line-line"/>')
        elements.append(
            f'<text x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle" class="quiet">{time_text(time)}</text>'
        )
    for row in first_rows(module, list(rows)) if module.cluster and module.cluster.gpus * height >= LEAST_NODE else ():
        y = top + 20 + row * height
        elements.append(f'<line x1="{LEFT - 60}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="quiet-line"/>')
    shown = Shown(module, lengths)
    for box in boxes(timeline, rows, tolerance=0.5 / scale):
        x, width = LEFT + box.interval.start * scale, max(0.4, (box.interval.end - box.interval.start) * scale)
        y, tall = top + 20 + box.first * height, height * (box.last - box.first + 1)
        inset = 1.0 if height >= 8 else 0.2
        elements += _box(shown, box.interval, x, y + inset, width, tall - 2 * inset)
    return elements


@dataclass(frozen=True)
class Shown:
    """What is said of a module's cascades, and in which colour."""

    module: Module
    lengths: Lengths

    @cached_property
    def cascades(self) -> dict[str, Cascade]:
        return {cascade.name: cascade for cascade in self.module.cascades}

    @cached_property
    def stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.module.stages}

    @cached_property
    def names(self) -> dict[int, str]:
        return names_of(self.module)

    @cached_property
    def tokens(self) -> dict[int, int]:
        return {clip.id: clip.tokens for clip in self.module.clips}

    def length(self, cascade: Cascade) -> int:
        """The class of its clips' length."""
        return self.lengths.index(self.tokens.get(cascade.clips[0], cascade.tokens) if cascade.clips else 0)

    def size(self, cascade: Cascade) -> str:
        return size_of(cascade, self.stages[cascade.stage])


def first_rows(module: Module, ranks: Sequence[int]) -> list[int]:
    """The rows, but for the first, where another node begins."""
    assert module.cluster is not None
    nodes = [rank // module.cluster.gpus for rank in ranks]
    return [row for row in range(1, len(nodes)) if nodes[row] != nodes[row - 1]]


def _box(shown: Shown, interval: Interval, x: float, y: float, width: float, tall: float) -> list[str]:
    """The box of an interval, its texture, and a label on a ground of its own where one fits."""
    cascade = shown.cascades.get(interval.target)
    fill = f"length-{shown.length(cascade)}" if cascade else "sync"
    about = f"{interval.op} {interval.target}"
    if cascade:
        about += f" @{cascade.stage}: {clip_names(shown.names, cascade.clips)}, {shown.size(cascade)} tokens"
    about += f", {interval.start:.4g} to {interval.end:.4g} ms"
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{tall:.2f}"'
    elements = [f'<rect {place} class="{fill} box"><title>{escape(about)}</title></rect>']
    if interval.op in TEXTURES and width >= 1.5:
        elements.append(f'<rect {place} fill="url(#{interval.op})" pointer-events="none"/>')
    label = _label(shown, interval, cascade, width, tall)
    if label:
        wide = CHARACTER * len(label) + 2
        elements += [
            f'<rect x="{x + (width - wide) / 2:.1f}" y="{y + tall / 2 - 7:.1f}" width="{wide:.1f}" height="14" '
            f'class="{fill}" pointer-events="none"/>',
            f'<text x="{x + width / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle" class="{fill}-ink" '
            f'pointer-events="none">{escape(label)}</text>',
        ]
    return elements


def _label(shown: Shown, interval: Interval, cascade: Cascade | None, width: float, height: float) -> str:
    """What fits into the box: the clip's name and its tokens, the cascade, or nothing."""
    if height < 11:
        return ""
    choices = [f"{interval.op} {interval.target}"]
    if cascade is not None:
        clips = clip_names(shown.names, cascade.clips, 1)
        choices = [
            f"{clips}, {shown.size(cascade)} tokens",
            f"{clips}, {shown.size(cascade)}",
            clips,
            f"%{interval.target}",
        ]
    return next((choice for choice in choices if CHARACTER * len(choice) + 4 <= width), "")


MARGIN, LABEL, BAR, CHART_GAP = 24, 150, 20, 8
VALUES = 150  # px right of the longest bar, for its figures
COLUMNS, BETWEEN, PANEL, PANEL_TITLE = 2, 40, 96, 34
CUT_OFF = 1.6  # times the shortest, at which Gantts are cut off
INK, FAINT, BOUND = "text", "quiet", "limit"


@dataclass(frozen=True)
class Plan:
    """What is drawn of one plan; ms. Without a ``bound``, 0, none is drawn."""

    name: str
    module: Module
    timeline: Timeline
    makespan: float
    iteration: float
    bound: float


def draw_comparison(title: str, plans: Sequence[Plan]) -> str:
    """The SVG text, the shortest iteration first. Raises ValueError where there is nothing to draw."""
    if not plans:
        raise ValueError("no plan to draw")
    ordered = sorted(plans, key=lambda plan: plan.iteration)
    numbers = stage_numbers(stage_loads(ordered[0].module, [ordered[0].timeline]))
    colours = {name: f"stage-{number}" for name, number in numbers.items()}
    marks = [*colours.items(), *op_entries([plan.timeline for plan in ordered])]
    marks += [("lower bound", BOUND)] if any(plan.bound for plan in ordered) else []
    head, top = legend(marks, MARGIN, 36, WIDTH - MARGIN)
    bars, below = _bars(ordered, top + 8)
    end = min(max(plan.iteration for plan in ordered), CUT_OFF * ordered[0].iteration)
    elements = [
        svg_textures([op for op in DRAWN if op in TEXTURES]),
        _text(MARGIN, 26, title, size=15, weight="bold"),
        *head,
        *bars,
    ]
    width = (WIDTH - 2 * MARGIN - BETWEEN * (COLUMNS - 1)) / COLUMNS
    for number, plan in enumerate(ordered):
        row, column = divmod(number, COLUMNS)
        left = MARGIN + column * (width + BETWEEN)
        top = below + row * (PANEL_TITLE + PANEL + 22)
        elements += _gantt(plan, colours, left, top, width, end)
    height = below + -(-len(ordered) // COLUMNS) * (PANEL_TITLE + PANEL + 22)
    style = svg_style(stages=len(colours))
    return "\n".join([*opening(WIDTH, height, style), *elements, "</svg>"]) + "\n"


def _bars(plans: Sequence[Plan], top: float) -> tuple[list[str], float]:
    """One bar a plan with its own bound, which differs where micro-batches do; and where the drawing goes on."""
    scale = (WIDTH - 2 * MARGIN - LABEL - VALUES) / plans[-1].iteration
    left = MARGIN + LABEL
    bottom = top + len(plans) * (BAR + CHART_GAP)
    elements = []
    for time in ticks(plans[-1].iteration):
        x = left + time * scale
        elements.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="line-line"/>')
        elements.append(_text(x, bottom + 15, time_text(time), colour=FAINT, anchor="middle"))
    for number, plan in enumerate(plans):
        y = top + number * (BAR + CHART_GAP) + CHART_GAP / 2
        work, bar, bound = plan.makespan * scale, plan.iteration * scale, left + plan.bound * scale
        over = f",  {plan.makespan / plan.bound:.3f} x bound" if plan.bound else ""
        about = f"{plan.name}: iteration {_time(plan.iteration)}, makespan {_time(plan.makespan)}"
        about += f", bound {_time(plan.bound)}" if plan.bound else ""
        elements += [
            _text(left - 8, y + BAR / 2 + 4, plan.name, anchor="end", weight="bold" if number == 0 else "normal"),
            f"<g><title>{escape(about)}</title>"
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="{BAR}" class="sync"/>'
            f'<rect x="{left}" y="{y}" width="{work:.1f}" height="{BAR}" class="stage-0"/>',
            _bound_at(bound, y - CHART_GAP / 2, y + BAR + CHART_GAP / 2, 2) if plan.bound else "",
            "</g>",
            _text(left + bar + 8, y + BAR / 2 + 4, f"{_time(plan.iteration)}{over}", colour=FAINT),
        ]
    return elements, bottom + 36


def _gantt(plan: Plan, colours: Mapping[str, str], left: float, top: float, width: float, end: float) -> list[str]:
    """One plan, every rank a row; what lies after ``end`` is cut off."""
    ranks = list(plan.timeline.lanes)
    step = -(-len(ranks) // MOST_DRAWN_RANKS)
    rows = {rank: row for row, rank in enumerate(ranks[::step])}
    shown = replace(plan.timeline, intervals=tuple(i for i in plan.timeline.intervals if i.rank in rows))
    tall, scale, base = PANEL / max(1, len(rows)), width / end, top + PANEL_TITLE
    stage_of = {cascade.name: cascade.stage for cascade in plan.module.cascades}
    every = f"every {step}th of {len(ranks)} ranks" if step > 1 else f"{len(ranks)} ranks"
    elements = [
        _text(left, base - 6, plan.name, weight="bold"),
        _text(left + width, base - 6, f"{every}, {_time(plan.iteration)}", colour=FAINT, anchor="end"),
        f'<rect x="{left:.1f}" y="{base}" width="{width:.1f}" height="{PANEL}" class="row"/>',
    ]
    for box in boxes(shown, rows, tolerance=0.5 / scale):
        interval = box.interval
        if interval.start >= end:
            continue
        x, long = left + interval.start * scale, (min(interval.end, end) - interval.start) * scale
        y, high = base + box.first * tall, tall * (box.last - box.first + 1)
        fill = colours.get(stage_of.get(interval.target, ""), "sync")
        place = f'x="{x:.2f}" y="{y:.2f}" width="{max(long, 0.2):.2f}" height="{high:.2f}"'
        about = escape(f"{interval.op} {interval.target}")
        elements.append(f'<rect {place} class="{fill} box"><title>{about}</title></rect>')
        if interval.op in TEXTURES and long >= 1.5:
            elements.append(f'<rect {place} fill="url(#{interval.op})" pointer-events="none"/>')
    if plan.bound:
        elements.append(_bound_at(left + plan.bound * scale, base - 3, base + PANEL + 3, 1.5))
    for time in ticks(end, limit=5):
        elements.append(_text(left + time * scale, base + PANEL + 14, time_text(time), colour=FAINT, anchor="middle"))
    if plan.iteration > end * (1 + 1e-9):
        elements.append(_text(left + width + 4, base + PANEL / 2 + 4, "...", colour=FAINT))
    return elements


def _bound_at(x: float, top: float, bottom: float, wide: float) -> str:
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="{BOUND}-line" stroke-width="{wide}"/>'


def _time(ms: float) -> str:
    return time_text(float(f"{ms:.4g}"))


def _text(
    x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", weight: str = "normal", size: int = 11
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'class="{colour}">{escape(text)}</text>'
    )
