"""Several plans of the same clips in one SVG: how long each takes against its bound, and a small Gantt of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from arachnec.ir.limits import MOST_DRAWN_RANKS
from arachnec.ir.nodes import Module
from arachnec.views.colours import TEXTURES, stage_numbers, svg_style, svg_textures
from arachnec.views.timeline import DRAWN, Timeline
from arachnec.views.timeline_svg import WIDTH, boxes, legend, op_entries, opening, stage_loads, ticks, time_text

MARGIN, LABEL, BAR, GAP = 24, 150, 20, 8
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
    bottom = top + len(plans) * (BAR + GAP)
    elements = []
    for time in ticks(plans[-1].iteration):
        x = left + time * scale
        elements.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="line-line"/>')
        elements.append(_text(x, bottom + 15, time_text(time), colour=FAINT, anchor="middle"))
    for number, plan in enumerate(plans):
        y = top + number * (BAR + GAP) + GAP / 2
        work, bar, bound = plan.makespan * scale, plan.iteration * scale, left + plan.bound * scale
        over = f",  {plan.makespan / plan.bound:.3f} x bound" if plan.bound else ""
        about = f"{plan.name}: iteration {_time(plan.iteration)}, makespan {_time(plan.makespan)}"
        about += f", bound {_time(plan.bound)}" if plan.bound else ""
        elements += [
            _text(left - 8, y + BAR / 2 + 4, plan.name, anchor="end", weight="bold" if number == 0 else "normal"),
            f"<g><title>{escape(about)}</title>"
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="{BAR}" class="sync"/>'
            f'<rect x="{left}" y="{y}" width="{work:.1f}" height="{BAR}" class="stage-0"/>',
            _bound_at(bound, y - GAP / 2, y + BAR + GAP / 2, 2) if plan.bound else "",
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
