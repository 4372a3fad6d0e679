"""The Chrome trace: every interval, handoffs as flows between slices, transfers and memory."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given

from arachnec.backends.simulator import simulate
from arachnec.ir.nodes import Module
from arachnec.lowering.programs import lower
from arachnec.views.chrome_trace import chrome_trace
from arachnec.views.timeline import Interval, Timeline, memory_curves, planned
from tests.passes.plans import placed_modules


def events_of(module: Module, *timelines: Timeline) -> list[dict[str, Any]]:
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(module, *timelines)))
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


@given(placed_modules())
def test_a_trace_has_every_interval_in_microseconds_and_every_transfer(module: Module) -> None:
    lowered = lower(module)
    simulation = simulate(lowered)
    events = events_of(lowered, planned(lowered), simulation.timeline)
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(spans) == len(simulation.timeline.intervals)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(simulation.iteration_ms * 1e3)
    transfers = Counter(e["ph"] for e in events if e.get("cat") == "transfer")
    assert transfers["b"] == transfers["e"] == len(simulation.timeline.transfers)


@given(placed_modules())
def test_every_handoff_is_a_flow_from_the_slice_that_made_the_value_to_one_that_reads_it(module: Module) -> None:
    lowered = lower(module)
    timelines = (planned(lowered), simulate(lowered).timeline)
    events = events_of(lowered, *timelines)
    sends = [(i.target, p.rank, i.peers[0]) for p in lowered.programs for i in p.instructions if i.op == "send"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    inputs = {cascade.name: cascade.inputs for cascade in lowered.cascades}
    for process, timeline in enumerate(timelines):
        flows = [(s["name"], s["tid"], ends[i]["tid"]) for i, s in starts.items() if s["pid"] == process]
        assert sorted(flows) == sorted(sends)
        for number, begin in ((i, s) for i, s in starts.items() if s["pid"] == process):
            assert begin["name"] in {i.target for i in around(timeline, begin)}
            assert any(begin["name"] in inputs.get(i.target, ()) for i in around(timeline, ends[number]))


def around(timeline: Timeline, event: dict[str, Any]) -> list[Interval]:
    """The slices that a viewer would tie the event to."""
    lane, at = timeline.lanes[event["tid"]], event["ts"] / 1e3
    return [i for i in lane if i.start - 1e-9 <= at < i.end]


@given(placed_modules())
def test_memory_is_a_counter_that_never_exceeds_what_check_counts(module: Module) -> None:
    lowered = lower(module)
    events = events_of(lowered, planned(lowered))
    for rank, curve in memory_curves(lowered).items():
        counted = [e["args"]["GiB"] for e in events if e["ph"] == "C" and e["name"] == f"memory of rank {rank}"]
        assert counted == pytest.approx([held for _, held in curve], abs=1e-5)
