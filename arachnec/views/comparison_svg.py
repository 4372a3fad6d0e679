"""Several plans of the same clips in one SVG: how long each takes against its bound, and a small Gantt of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from arachnec.ir.nodes import Module
from arachnec.views.timeline import Timeline
from arachnec.views.timeline_svg import (
    CHARACTER,
    OPACITY,
    OTHERS,
    PALETTE,
    SYNCHRONISATION,
    WIDTH,
    boxes,
    stage_colours,
    ticks,
    time_text,
)

MARGIN, LABEL, BAR, GAP = 24, 150, 20, 8
VALUES = 150  # px right of the longest bar, for its figures
TITLE = 44
COLUMNS, BETWEEN, PANEL, PANEL_TITLE = 2, 40, 96, 34
MOST_ROWS = 48  # of one Gantt: beyond, every second rank is drawn, or every third, ...
LONGEST = 1.6  # times the shortest, at which Gantts are cut off
INK, FAINT, LINE, BOUND = "#1b1f24", "#57606a", "#d0d7de", "#d1242f"


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
    colours = stage_colours(ordered[0].module, [ordered[0].timeline])
    bars, below = _bars(ordered)
    end = min(max(plan.iteration for plan in ordered), LONGEST * ordered[0].iteration)
    elements = [*bars]
    width = (WIDTH - 2 * MARGIN - BETWEEN * (COLUMNS - 1)) / COLUMNS
    for number, plan in enumerate(ordered):
        row, column = divmod(number, COLUMNS)
        left = MARGIN + column * (width + BETWEEN)
        top = below + row * (PANEL_TITLE + PANEL + 22)
        elements += _gantt(plan, colours, left, top, width, end)
    height = below + -(-len(ordered) // COLUMNS) * (PANEL_TITLE + PANEL + 22)
    return (
        "\n".join([*_head(title, height, colours, bound=any(plan.bound for plan in ordered)), *elements, "</svg>"])
        + "\n"
    )


def _head(title: str, height: float, colours: Mapping[str, str], *, bound: bool) -> list[str]:
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        _text(MARGIN, 26, title, size=15, weight="bold"),
    ]
    x = float(WIDTH - MARGIN)
    marks = [*colours.items(), ("reduce, step", SYNCHRONISATION), *([("lower bound", BOUND)] if bound else [])]
    for name, colour in reversed(marks):
        x -= CHARACTER * len(name) + 4
        elements.append(_text(x, 26, name))
        x -= 16
        wide = 2 if colour == BOUND else 11
        elements.append(f'<rect x="{x + 11 - wide:.1f}" y="17" width="{wide}" height="11" fill="{colour}"/>')
        x -= 14
    return elements


def _bars(plans: Sequence[Plan]) -> tuple[list[str], float]:
    """One bar a plan with its own bound, which differs where micro-batches do; and where the drawing goes on."""
    scale = (WIDTH - 2 * MARGIN - LABEL - VALUES) / plans[-1].iteration
    left = MARGIN + LABEL
    bottom = TITLE + len(plans) * (BAR + GAP)
    elements = []
    for time in ticks(plans[-1].iteration):
        x = left + time * scale
        elements.append(f'<line x1="{x:.1f}" y1="{TITLE}" x2="{x:.1f}" y2="{bottom}" stroke="{LINE}"/>')
        elements.append(_text(x, bottom + 15, time_text(time), colour=FAINT, anchor="middle"))
    for number, plan in enumerate(plans):
        y = TITLE + number * (BAR + GAP) + GAP / 2
        work, bar, bound = plan.makespan * scale, plan.iteration * scale, left + plan.bound * scale
        over = f",  {plan.makespan / plan.bound:.3f} x bound" if plan.bound else ""
        about = f"{plan.name}: iteration {_time(plan.iteration)}, makespan {_time(plan.makespan)}"
        about += f", bound {_time(plan.bound)}" if plan.bound else ""
        elements += [
            _text(left - 8, y + BAR / 2 + 4, plan.name, anchor="end", weight="bold" if number == 0 else "normal"),
            f"<g><title>{escape(about)}</title>"
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="{BAR}" fill="{SYNCHRONISATION}"/>'
            f'<rect x="{left}" y="{y}" width="{work:.1f}" height="{BAR}" fill="{PALETTE[0]}" fill-opacity="0.85"/>',
            _bound_at(bound, y - GAP / 2, y + BAR + GAP / 2, 2) if plan.bound else "",
            "</g>",
            _text(left + bar + 8, y + BAR / 2 + 4, f"{_time(plan.iteration)}{over}", colour=FAINT),
        ]
    return elements, bottom + 36


def _gantt(plan: Plan, colours: Mapping[str, str], left: float, top: float, width: float, end: float) -> list[str]:
    """One plan, every rank a row; what lies after ``end`` is cut off."""
    ranks = list(plan.timeline.lanes)
    step = -(-len(ranks) // MOST_ROWS)
    rows = {rank: row for row, rank in enumerate(ranks[::step])}
    shown = replace(plan.timeline, intervals=tuple(i for i in plan.timeline.intervals if i.rank in rows))
    tall, scale, base = PANEL / max(1, len(rows)), width / end, top + PANEL_TITLE
    stage_of = {cascade.name: cascade.stage for cascade in plan.module.cascades}
    every = f"every {step}th of {len(ranks)} ranks" if step > 1 else f"{len(ranks)} ranks"
    elements = [
        _text(left, base - 6, plan.name, weight="bold"),
        _text(left + width, base - 6, f"{every}, {_time(plan.iteration)}", colour=FAINT, anchor="end"),
        f'<rect x="{left:.1f}" y="{base}" width="{width:.1f}" height="{PANEL}" fill="#f3f4f6"/>',
    ]
    for box in boxes(shown, rows, tolerance=0.5 / scale):
        interval = box.interval
        if interval.start >= end:
            continue
        x, long = left + interval.start * scale, (min(interval.end, end) - interval.start) * scale
        y, high = base + box.first * tall, tall * (box.last - box.first + 1)
        colour = colours.get(stage_of.get(interval.target, ""), SYNCHRONISATION)
        elements.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(long, 0.2):.2f}" height="{high:.2f}" fill="{colour}" '
            f'fill-opacity="{OPACITY.get(interval.op, OTHERS)}" stroke="#ffffff" stroke-width="0.3">'
            f"<title>{escape(f'{interval.op} {interval.target}')}</title></rect>"
        )
    if plan.bound:
        elements.append(_bound_at(left + plan.bound * scale, base - 3, base + PANEL + 3, 1.5))
    for time in ticks(end, limit=5):
        elements.append(_text(left + time * scale, base + PANEL + 14, time_text(time), colour=FAINT, anchor="middle"))
    if plan.iteration > end * (1 + 1e-9):
        elements.append(_text(left + width + 4, base + PANEL / 2 + 4, "...", colour=FAINT))
    return elements


def _bound_at(x: float, top: float, bottom: float, wide: float) -> str:
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{BOUND}" stroke-width="{wide}"/>'


def _time(ms: float) -> str:
    return time_text(float(f"{ms:.4g}"))


def _text(
    x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", weight: str = "normal", size: int = 11
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
