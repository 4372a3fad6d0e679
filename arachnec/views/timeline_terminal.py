"""A Gantt chart for the terminal: one row a rank, readable with and without colour."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from arachnec.ir.limits import MOST_TERMINAL_RANKS
from arachnec.ir.nodes import Module
from arachnec.views.colours import PALETTE, stage_numbers
from arachnec.views.format import clip_names, names_of, printable
from arachnec.views.timeline import DRAWN, Interval, Timeline, imbalance, scale_end
from arachnec.views.timeline_svg import stage_loads, time_text

WIDTH = 100
IDLE = "·"
# What an operation is drawn with: the first for the first stage that has it, the next for the next stage.
FILL = {
    "encode": "▒░▞◇",
    "denoise": "█▉",
    "decode": "░▒",
    "forward": "▓▤▥",
    "backward": "█▦▩",
    "weight": "▚▟",
    "reduce": "=",
}
OTHERS = "|"
GREY = "#8a8f98"


def gantt(module: Module, timeline: Timeline, *, end: float | None = None, width: int = WIDTH) -> Text:
    """The timeline in ``width`` columns; ``end`` in ms puts several charts on one scale.

    More than ``MOST_TERMINAL_RANKS`` ranks share rows; a cell shows what its ranks do most of its time.
    """
    ranks = sorted(timeline.lanes)
    shown_end = scale_end(timeline.end if end is None else end)
    per_row = -(-len(ranks) // MOST_TERMINAL_RANKS) if ranks else 1
    groups = [ranks[i : i + per_row] for i in range(0, len(ranks), per_row)]
    names = [f"{g[0]}-{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups]
    margin = max([len("rank"), *map(len, names)]) + 1
    cells = width - margin - len(" 100%")
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    numbers = stage_numbers(stage_loads(module, (timeline,)))
    colours = {name: PALETTE[number % len(PALETTE)] for name, number in numbers.items()}
    fills = _fills(timeline, stage_of)
    names_of_clips = names_of(module)
    clips = {cascade.name: printable(clip_names(names_of_clips, cascade.clips, 1)) for cascade in module.cascades}
    busy = {rank: timeline.busy_ms(rank) for rank in ranks}
    text = Text(no_wrap=True)
    text.append(printable(timeline.title), style="bold")
    text.append(f"  {time_text(float(f'{timeline.end:.4g}'))}, imbalance {imbalance(busy.values()):.1%}\n")
    text.append(f"{'rank'.rjust(margin - 1)} {_axis(shown_end, cells)} busy\n", style="dim")
    for name, group in zip(names, groups, strict=True):
        text.append(f"{name.rjust(margin - 1)} ")
        row = [interval for rank in group for interval in timeline.lanes[rank] if interval.op in DRAWN]
        for character, interval in _cells(row, cells, shown_end, len(group), fills, stage_of, clips):
            stage = stage_of.get(interval.target) if interval else None
            text.append(character, style=colours[stage] if stage else GREY)
        share = sum(busy[rank] for rank in group) / len(group) / shown_end
        text.append(f" {share:4.0%}\n")
    text.append(" " * margin)
    for stage, colour in colours.items():
        legend = "  ".join(f"{fill} {op}" for (op, target), fill in fills.items() if target == stage)
        text.append(f"{printable(stage)}: ", style=colour)
        text.append(f"{legend}    ", style=colour)
    shared = dict.fromkeys(f"{fill} {op}" for (op, target), fill in fills.items() if target is None)
    text.append("  ".join(shared), style="dim")
    return text


def _fills(timeline: Timeline, stage_of: Mapping[str, str]) -> dict[tuple[str, str | None], str]:
    """The character of every operation of every stage; of what belongs to no cascade, of the operation alone."""
    drawn = {(i.op, stage_of.get(i.target)) for i in timeline.intervals if i.op in DRAWN}
    stages = list(dict.fromkeys(stage_of.values()))
    fills: dict[tuple[str, str | None], str] = {}
    for op in dict.fromkeys((*FILL, *DRAWN)):
        characters = FILL.get(op, OTHERS)
        owners = [stage for stage in (*stages, None) if (op, stage) in drawn]
        fills |= {(op, stage): characters[n % len(characters)] for n, stage in enumerate(owners)}
    return fills


def _cells(
    intervals: list[Interval],
    cells: int,
    shown_end: float,
    ranks: int,
    fills: Mapping[tuple[str, str | None], str],
    stage_of: Mapping[str, str],
    clips: Mapping[str, str],
) -> list[tuple[str, Interval | None]]:
    """A character and what it stands for, for each cell; names where they fit."""
    size = shown_end / cells
    shares: list[dict[tuple[str, str], float]] = [{} for _ in range(cells)]
    intervals_by_key: dict[tuple[str, str], Interval] = {}
    for interval in intervals:
        key = (interval.op, interval.target)
        intervals_by_key.setdefault(key, interval)
        first = max(0, int(interval.start / size))
        for cell in range(first, min(cells, int(interval.end / size) + 1)):
            covered = min(interval.end, (cell + 1) * size) - max(interval.start, cell * size)
            if covered > 0:
                shares[cell][key] = shares[cell].get(key, 0.0) + covered
    winners: list[Interval | None] = []
    for share in shares:
        idle = ranks * size - sum(share.values())
        best = max(share, key=lambda key: share[key]) if share else None
        winners.append(intervals_by_key[best] if best is not None and share[best] >= idle / 2 else None)
    characters = [fills[winner.op, stage_of.get(winner.target)] if winner else IDLE for winner in winners]
    _write_names(characters, winners, clips)
    return list(zip(characters, winners, strict=True))


def _write_names(characters: list[str], winners: list[Interval | None], clips: Mapping[str, str]) -> None:
    """The names of a cascade's clips on the first of its cells, or its own, if it fits between two fills."""
    start = 0
    while start < len(winners):
        stop = start
        while stop < len(winners) and _target(winners[stop]) == _target(winners[start]):
            stop += 1
        target = _target(winners[start])
        fitting = [name for name in (clips.get(target, target), f"%{target}") if len(name) + 2 <= stop - start]
        if target and fitting:
            characters[start + 1 : start + 1 + len(fitting[0])] = fitting[0]
        start = stop


def _target(interval: Interval | None) -> str:
    return interval.target if interval else ""


def _axis(shown_end: float, cells: int) -> str:
    """0 on the left, the end on the right, the half between."""
    marks = [
        (0, "0"),
        (cells // 2, time_text(float(f"{shown_end / 2:.3g}"))),
        (cells, time_text(float(f"{shown_end:.3g}"))),
    ]
    line = [" "] * cells
    for position, mark in marks:
        at = max(0, min(cells - len(mark), position - len(mark) // 2))
        line[at : at + len(mark)] = mark
    return "".join(line)
