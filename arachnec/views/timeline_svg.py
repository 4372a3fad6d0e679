"""A Gantt chart as one SVG without scripts or outside references: timelines below each other on one time axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from arachnec.ir.nodes import Module
from arachnec.views.format import title_of
from arachnec.views.timeline import DRAWN, Interval, Timeline, imbalance, scale_end

WIDTH = 1200
LEFT, RIGHT = 72, 24
AXIS, HEADER, GAP = 26, 46, 18
CHARACTER = 6.4  # px of one character at 11 px

# Okabe and Ito's colours, which the colour-blind can tell apart; the first is for the stage that takes most time.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
SYNCHRONISATION = "#8a8f98"
OPACITY = {
    "forward": 0.62,
    "backward": 0.95,
    "weight": 0.8,
    "encode": 0.85,
    "denoise": 0.85,
    "decode": 0.6,
    "reduce": 0.9,
}
OTHERS = 0.5  # of what is drawn


@dataclass(frozen=True)
class Box:
    """One instruction on ranks that stand next to each other."""

    first: int  # row
    last: int
    interval: Interval


def draw(module: Module, *timelines: Timeline) -> str:
    """The timelines as SVG text. Cascades are coloured by stage, forwards lighter than backwards."""
    colours = stage_colours(module, timelines)
    ranks = sorted({rank for timeline in timelines for rank in timeline.lanes})
    rows = {rank: row for row, rank in enumerate(ranks)}
    height = row_height(len(ranks))
    end = scale_end(*(timeline.end for timeline in timelines))
    elements: list[str] = []
    top: float = HEADER
    for timeline in timelines:
        elements += _panel(module, timeline, rows, colours, top, height, end)
        top += 20 + height * len(ranks) + AXIS + GAP
    return "\n".join([*_head(module, top, colours), *elements, "</svg>"]) + "\n"


def row_height(ranks: int) -> float:
    """px, so that the chart of a thousand ranks still fits a screen or two."""
    return max(2.0, min(26.0, 800 / max(1, ranks)))


def stage_colours(module: Module, timelines: Sequence[Timeline]) -> dict[str, str]:
    """A colour for every stage; the stage with the most time first, the same in all panels."""
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    total = {stage.name: 0.0 for stage in module.stages}
    for timeline in timelines[:1]:
        for interval in timeline.intervals:
            if interval.target in stage_of:
                total[stage_of[interval.target]] += interval.end - interval.start
    order = sorted(total, key=lambda name: -total[name])
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(order)}


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


def _head(module: Module, height: float, colours: dict[str, str]) -> list[str]:
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold" fill="#1b1f24">{escape(title_of(module))}</text>',
    ]
    x = float(WIDTH - RIGHT)
    entries = [*colours.items(), ("reduce, step", SYNCHRONISATION)]
    for name, colour in reversed(entries):
        x -= CHARACTER * len(name) + 4
        elements.append(f'<text x="{x:.1f}" y="26" fill="#1b1f24">{escape(name)}</text>')
        x -= 16
        elements.append(f'<rect x="{x:.1f}" y="17" width="11" height="11" fill="{colour}"/>')
        x -= 14
    return elements


def _panel(
    module: Module,
    timeline: Timeline,
    rows: dict[int, int],
    colours: dict[str, str],
    top: float,
    height: float,
    end: float,
) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = top + 20 + height * len(rows)
    busy = [timeline.busy_ms(rank) for rank in timeline.lanes]
    summary = f"{time_text(float(f'{timeline.end:.4g}'))}, imbalance {imbalance(busy):.1%}"
    elements = [
        f'<text x="{LEFT}" y="{top + 12}" font-weight="bold" fill="#1b1f24">{escape(timeline.title)}'
        f'<tspan dx="8" font-weight="normal" fill="#57606a">{summary}</tspan></text>'
    ]
    every = max(1, round(14 / height))
    for rank, row in rows.items():
        y = top + 20 + row * height
        shade = "#f3f4f6" if row % 2 == 0 else "#fafbfc"
        elements.append(
            f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{height:.1f}" fill="{shade}"/>'
        )
        if row % every == 0:
            middle = y + min(height, 14) / 2 + 4 if height < 14 else y + height / 2 + 4
            elements.append(
                f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end" fill="#57606a">rank {rank}</text>'
            )
    for time in ticks(end):
        x = LEFT + time * scale
        elements.append(f'<line x1="{x:.1f}" y1="{top + 20}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#d0d7de"/>')
        elements.append(
            f'<text x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle" fill="#57606a">{time_text(time)}</text>'
        )
    cascades = {cascade.name: cascade for cascade in module.cascades}
    for box in boxes(timeline, rows, tolerance=0.5 / scale):
        interval = box.interval
        cascade = cascades.get(interval.target)
        colour = colours[cascade.stage] if cascade else SYNCHRONISATION
        x, width = LEFT + interval.start * scale, max(0.4, (interval.end - interval.start) * scale)
        y, tall = top + 20 + box.first * height, height * (box.last - box.first + 1)
        inset = 1.0 if height >= 8 else 0.2
        about = f"{interval.op} {interval.target}"
        if cascade:
            about += f" @{cascade.stage}: clips {list(cascade.clips)}, {cascade.batch} x {cascade.tokens} tokens"
        about += f", {interval.start:.4g} to {interval.end:.4g} ms"
        elements.append(
            f'<rect x="{x:.2f}" y="{y + inset:.2f}" width="{width:.2f}" height="{tall - 2 * inset:.2f}" '
            f'fill="{colour}" fill-opacity="{OPACITY.get(interval.op, OTHERS)}" stroke="#ffffff" stroke-width="0.5">'
            f"<title>{escape(about)}</title></rect>"
        )
        label = _label(interval, cascade.tokens if cascade else None, width, tall)
        if label:
            dark = interval.op in ("step", "forward") and colour not in (PALETTE[0], PALETTE[4])
            fill = "#1b1f24" if dark or colour in (PALETTE[1], PALETTE[5]) else "#ffffff"
            elements.append(
                f'<text x="{x + width / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle" fill="{fill}" '
                f'pointer-events="none">{escape(label)}</text>'
            )
    return elements


def _label(interval: Interval, tokens: int | None, width: float, height: float) -> str:
    """What fits into the box: cascade and tokens, the cascade alone, or nothing."""
    if height < 11:
        return ""
    choices = [interval.target if tokens is not None else f"{interval.op} {interval.target}"]
    if tokens is not None:
        size = f"{tokens / 1000:.3g}k" if tokens >= 1000 else str(tokens)
        choices.insert(0, f"{interval.target} · {size} tokens")
        choices.insert(1, f"{interval.target} · {size}")
    return next((choice for choice in choices if CHARACTER * len(choice) + 4 <= width), "")
