"""The critical path of a timeline: going back from its end, what each thing that ran had to wait for.

The last thing to end started when its ranks were free and its inputs were there. Whatever of these came last is the
link before it, and so on back to the start. Nothing on the path can take longer without the end being later, and
nothing off it is what keeps the end from being earlier. This holds for planned, simulated and measured timelines alike,
since it looks at times alone.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from arachnec.cluster.topology import handoff_time
from arachnec.ir.nodes import Instruction, Module
from arachnec.views.timeline import AFTER, DRAWN, Interval, Timeline

TOLERANCE_MS = 1e-6
Because = Literal["start", "input", "ranks"]
Event = tuple[str, str, int]  # instruction, target, and how often its ranks have it again later
Lane = tuple[list[float], list[Event]]  # the ends of what a rank did, ascending, and what it was


@dataclass(frozen=True)
class Link:
    """A cascade, or a stage's ``reduce`` or ``step``, on the path.

    ``because`` says why it did not start earlier: at the ``start`` nothing was before it; else it waited for ``waited``
    to hand over its ``input`` or to leave the ``ranks``. ``gap`` is the ms from the end of that one to this start.
    """

    ops: tuple[str, ...]
    target: str
    ranks: tuple[int, ...]
    start: float
    end: float
    because: Because
    waited: str | None = None
    gap: float = 0.0


def critical_path(module: Module, timeline: Timeline) -> tuple[Link, ...]:
    """From the first link to the last; empty for an empty timeline."""
    events = _events(timeline)
    if not events:
        return ()
    lanes = _lanes(events)
    arrivals = _Arrivals(module, events)
    current: Event | None = max(events, key=lambda event: max(interval.end for interval in events[event]))
    links: list[Link] = []
    visited: set[Event] = set()
    while current is not None and current not in visited:
        visited.add(current)
        link, current = _link(events, lanes, arrivals, current)
        links.append(link)
    return tuple(_joined(reversed(links)))


def _events(timeline: Timeline) -> dict[Event, list[Interval]]:
    """What the ranks of a group do together, as one.

    A stage may have several gradient all-reduces, and the first can be missing on a rank where they are hidden. So they
    are counted from the last.
    """
    events: dict[Event, list[Interval]] = defaultdict(list)
    for lane in timeline.lanes.values():
        count: dict[tuple[str, str], int] = defaultdict(int)
        for interval in reversed(lane):
            if interval.op in DRAWN:
                key = interval.op, interval.target
                events[*key, count[key]].append(interval)
                count[key] += 1
    return dict(events)


def _lanes(events: dict[Event, list[Interval]]) -> dict[int, Lane]:
    rows: dict[int, list[tuple[float, Event]]] = defaultdict(list)
    for event, intervals in events.items():
        for interval in intervals:
            rows[interval.rank].append((interval.end, event))
    return {
        rank: ([end for end, _ in ordered], [event for _, event in ordered])
        for rank, ordered in ((rank, sorted(row)) for rank, row in rows.items())
    }


class _Arrivals:
    """Which value a cascade reads came last, and when."""

    def __init__(self, module: Module, events: dict[Event, list[Interval]]) -> None:
        self._inputs = {cascade.name: cascade.inputs for cascade in module.cascades}
        self._producers = {
            target: event for event in events for op, target, _ in [event] if op not in (*AFTER, "weight")
        }
        self._events = events
        self._cluster = module.cluster
        self._sends: dict[tuple[str, int], tuple[int, Instruction]] = {}
        for program in module.programs:
            for instruction in program.instructions:
                if instruction.op == "send":
                    self._sends[instruction.target, instruction.peers[0]] = program.rank, instruction

    def inputs(self, event: Event) -> tuple[str, ...]:
        """The cascades whose values it reads."""
        return () if event[0] in AFTER else self._inputs.get(event[1], ())

    def __call__(self, event: Event, ranks: Iterable[int]) -> Iterator[tuple[float, float, Event]]:
        """For every input: when it is there, when it was made, and by what."""
        for name in self.inputs(event):
            producer = self._producers.get(name)
            if producer is None:
                continue
            end = max(interval.end for interval in self._events[producer])
            yield end + max((self._transfer(name, rank) for rank in ranks), default=0.0), end, producer

    def _transfer(self, name: str, target: int) -> float:
        sent = self._sends.get((name, target))
        if sent is None or self._cluster is None:
            return 0.0
        source, send = sent
        size = send.attrs.get("bytes", 0)
        return handoff_time(self._cluster, source, target, float(size if isinstance(size, int) else 0))


def _link(
    events: dict[Event, list[Interval]], lanes: dict[int, Lane], arrivals: _Arrivals, event: Event
) -> tuple[Link, Event | None]:
    """The event as a link, and the event that it waited for."""
    intervals = events[event]
    start = max(interval.start for interval in intervals)
    ranks = tuple(sorted({interval.rank for interval in intervals}))
    link = Link((event[0],), event[1], ranks, start, max(interval.end for interval in intervals), "start")
    # a rank that came before the others waited for them, and is not what they waited for
    last_to_come = [interval.rank for interval in intervals if interval.start >= start - TOLERANCE_MS]
    candidates = [*_before(lanes, last_to_come, event, start), *arrivals(event, ranks)]
    waits = [
        (min(ready, start), end, waited_event) for ready, end, waited_event in candidates if end <= start + TOLERANCE_MS
    ]
    if not waits:
        return link, None
    latest = max(ready for ready, _, _ in waits)
    # of what came at the same time the input, which is last in the list, says most
    _, end, waited = [wait for wait in waits if wait[0] >= latest - TOLERANCE_MS][-1]
    reads = waited[1] == event[1] or waited[1] in arrivals.inputs(event)
    return replace(link, because="input" if reads else "ranks", waited=waited[1], gap=max(0.0, start - end)), waited


def _before(
    lanes: dict[int, Lane], ranks: Iterable[int], event: Event, start: float
) -> Iterator[tuple[float, float, Event]]:
    """For every rank: when it was free, twice, and of what."""
    for rank in ranks:
        ends, rows = lanes[rank]
        before = bisect.bisect_right(ends, start + TOLERANCE_MS) - 1
        while before >= 0 and rows[before] == event:
            before -= 1
        if before >= 0:
            yield ends[before], ends[before], rows[before]


def _joined(links: Iterable[Link]) -> Iterator[Link]:
    """A cascade's forward and backward, one after the other, as one link."""
    last: Link | None = None
    for link in links:
        if last is not None and (link.target, link.ranks) == (last.target, last.ranks):
            last = replace(last, ops=tuple(dict.fromkeys((*last.ops, *link.ops))), end=link.end)
            continue
        if last is not None:
            yield last
        last = link
    if last is not None:
        yield last
