"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

One process is a timeline, one thread a rank. Handoffs are flow events from the end of what made a value to the start of
what reads it; where a timeline knows when the bytes moved, that is an asynchronous slice of its own. What each rank
holds by the plan is a counter.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arachnec.ir.nodes import Module
from arachnec.views.timeline import COMPUTE, Interval, Timeline, memory_curves

Event = dict[str, Any]
SOON = 1e-3  # of a slice's length before its end: an event at the very end would belong to no slice


def chrome_trace(module: Module, *timelines: Timeline) -> dict[str, Any]:
    """The trace of a lowered module; the first of the timelines is its plan."""
    events: list[Event] = []
    for process, timeline in enumerate(timelines):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        events += _slices(module, timeline, process)
        events += _flows(module, timeline, process)
        events += _transfers(timeline, process)
    for rank, curve in memory_curves(module, timelines[0]).items():
        events += [
            {"ph": "C", "name": f"memory of rank {rank}", "pid": 0, "ts": time * 1e3, "args": {"GiB": round(held, 6)}}
            for time, held in curve
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _slices(module: Module, timeline: Timeline, process: int) -> Iterator[Event]:
    cascades = {cascade.name: cascade for cascade in module.cascades}
    for rank, lane in timeline.lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": rank, "args": {"sort_index": rank}}
        for interval in lane:
            cascade = cascades.get(interval.target)
            about: Event = {}
            if cascade is not None:
                about = {
                    "phase": cascade.phase.value,
                    "clips": list(cascade.clips),
                    "batch": cascade.batch,
                    "tokens": cascade.tokens,
                    "degree": cascade.degree,
                    "ranks": list(cascade.ranks),
                }
            yield {
                "ph": "X",
                "name": f"{interval.op} {interval.target}",
                "cat": cascade.stage if cascade is not None else interval.target,
                "pid": process,
                "tid": rank,
                "ts": interval.start * 1e3,
                "dur": (interval.end - interval.start) * 1e3,
                "args": about,
            }


def _flows(module: Module, timeline: Timeline, process: int) -> Iterator[Event]:
    """From the slice that made a value, on the rank that sends it, to the first that reads it where it was sent."""
    producers: dict[tuple[str, int], Interval] = {}
    first: dict[tuple[str, int], Interval] = {}
    for interval in sorted(timeline.intervals, key=lambda i: i.start):
        if interval.op in COMPUTE:
            producers[interval.target, interval.rank] = interval
            first.setdefault((interval.target, interval.rank), interval)
    readers: dict[str, list[str]] = {}
    for cascade in module.cascades:
        for name in cascade.inputs:
            readers.setdefault(name, []).append(cascade.name)
    number = 0
    for program in module.programs:
        for instruction in program.instructions:
            if instruction.op != "send":
                continue
            value, target = instruction.target, instruction.peers[0]
            producer = producers.get((value, program.rank))
            reading = [first[name, target] for name in readers.get(value, ()) if (name, target) in first]
            if producer is None or not reading:
                continue
            consumer = min(reading, key=lambda i: i.start)
            departure = producer.end - SOON * (producer.end - producer.start)
            flow = {"name": value, "cat": "handoff", "id": f"{process}.{number}", "pid": process}
            size = {"bytes": instruction.attrs.get("bytes", 0)}
            yield {"ph": "s", **flow, "tid": program.rank, "ts": departure * 1e3, "args": size}
            yield {"ph": "f", "bp": "e", **flow, "tid": target, "ts": max(departure, consumer.start) * 1e3}
            number += 1


def _transfers(timeline: Timeline, process: int) -> Iterator[Event]:
    for number, transfer in enumerate(timeline.transfers):
        moving = {
            "name": f"{transfer.cascade}: rank {transfer.source} to {transfer.target}",
            "cat": "transfer",
            "id": f"{process}.{number}",
            "pid": process,
            "tid": transfer.source,
        }
        yield {"ph": "b", **moving, "ts": transfer.start * 1e3, "args": {"bytes": transfer.bytes}}
        yield {"ph": "e", **moving, "ts": transfer.end * 1e3}
