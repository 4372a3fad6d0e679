"""The page's text: self-contained, safe with any text, small enough; and its memory curves and critical paths."""

from __future__ import annotations

import json
import re
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.memory import high_water, usages
from arachnec.analysis.uses import Values
from arachnec.backends.simulator import simulate
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Module
from arachnec.lowering.programs import lower
from arachnec.views.critical_path import critical_path
from arachnec.views.executable_page import PARTS, executable_page, page, script_json
from arachnec.views.timeline import DRAWN, Interval, Timeline, memory_curves, planned
from tests.passes.plans import placed_modules
from tests.views.page_plans import large, slower, small


class Page(HTMLParser):
    """The elements of a page, and the text of its script elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.scripts[0])
        return data


def test_the_page_loads_nothing_from_anywhere() -> None:
    parsed = Page(executable_page(small(), slower(small())))
    assert not [tag for tag, attributes in parsed.tags if {"src", "href", "srcset", "action"} & attributes.keys()]
    policy = next(a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    text = executable_page(small())
    assert not re.search(r"https?:|@import|url\(", text)


def test_a_wheel_has_every_part_of_the_page() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["arachnec"]
    assert {f"**/*{part.suffix}" for part in PARTS.iterdir()} <= set(patterns)


ODD = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "&amp; ' \"",
    "\u2028\u2029\0",
    "{{data}} {{script}}",
    "é ☃",
)


@pytest.mark.parametrize("odd", ODD)
def test_odd_names_captions_and_paths_stay_text(odd: str) -> None:
    module = small((odd, odd + "2", "c"))
    clips = [VideoClip(i, 17, 480, 832, 40, caption=odd, path=Path(odd.replace("\0", ""))) for i in range(3)]
    plain, parsed = Page(executable_page(small())), Page(executable_page(module, clips=clips, pipeline=odd))
    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in plain.tags]
    assert parsed.data["clips"]["name"][0] == odd
    assert parsed.data["clips"]["caption"] == [odd] * 3


@given(st.text())
def test_any_text_comes_back_from_a_script_element_as_it_was(text: str) -> None:
    parsed = Page(f'<script type="application/json">{script_json([text])}</script><p>')
    assert [tag for tag, _ in parsed.tags] == ["script", "p"]
    assert json.loads(parsed.scripts[0]) == [text]


def test_a_timeline_of_what_the_plan_does_not_have_is_left_out() -> None:
    foreign = (Interval(99, "forward", "t0", 0.0, 1.0), Interval(0, "forward", "gone", 0.0, 1.0))
    stranger = Timeline("measured, step 3", (*slower(small()).intervals, *foreign))
    boxes = Page(page(small(), planned(small()), stranger)).data["timelines"][1]["boxes"]
    assert boxes == Page(page(small(), planned(small()), slower(small()))).data["timelines"][1]["boxes"]


def test_a_page_of_1024_ranks_and_4096_cascades_is_below_10_mb() -> None:
    module = large(1024, 4096)
    assert len(executable_page(module, slower(module)).encode()) < 10e6


@given(placed_modules())
def test_the_page_has_every_interval_in_a_box(module: Module) -> None:
    lowered = lower(module)
    timeline = planned(lowered)
    flat = Page(page(lowered, timeline)).data["timelines"][0]["boxes"]
    boxes = [flat[i : i + 6] for i in range(0, len(flat), 6)]
    assert sum(last - first + 1 for _, _, first, last, _, _ in boxes) == len(timeline.intervals)
    spent = sum((last - first + 1) * (end - start) for _, _, first, last, start, end in boxes)
    assert spent == pytest.approx(sum(i.end - i.start for i in timeline.intervals), rel=1e-3, abs=0.1)


@given(placed_modules())
def test_memory_over_time_begins_with_state_and_communicators_and_peaks_where_check_says(module: Module) -> None:
    lowered = lower(module)
    values = Values(lowered)
    for program in lowered.programs:
        curve = memory_curves(lowered)[program.rank]
        assert curve[0] == (0.0, next(usages(values, program)).total)
        assert max(held for _, held in curve) == pytest.approx(high_water(values, program).total)
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def test_memory_is_given_back_when_a_cascade_ends_and_not_when_the_next_one_starts() -> None:
    curve = memory_curves(small())[1]
    held = [gib for time, gib in curve if time <= 80.0]
    assert held[-1] == pytest.approx(curve[0][1], abs=0.01)
    assert max(held) > curve[0][1] + 1


@given(placed_modules(), st.booleans())
def test_the_critical_path_leads_from_the_start_to_the_end_without_a_break(module: Module, simulated: bool) -> None:
    lowered = lower(module)
    timeline = simulate(lowered).timeline if simulated else planned(lowered)
    path = critical_path(lowered, timeline)
    assert path[-1].end == pytest.approx(timeline.end)
    assert path[0].because == "start"
    for before, link in pairwise(path):
        assert link.waited == before.target
        assert link.start == pytest.approx(before.end + link.gap, abs=1e-5)
        inputs = {c.name: c.inputs for c in lowered.cascades}.get(link.target, ())
        assert set(before.ranks) & set(link.ranks) if link.because == "ranks" else before.target in inputs


@given(placed_modules())
def test_every_link_of_the_path_ran_as_the_timeline_says(module: Module) -> None:
    lowered = lower(module)
    timeline = planned(lowered)
    for link in critical_path(lowered, timeline):
        own = [i for i in timeline.intervals if i.target == link.target and i.op in link.ops and i.op in DRAWN]
        assert set(link.ranks) <= {i.rank for i in own}
        assert link.end in {i.end for i in own}


def test_the_path_of_a_plan_goes_through_what_it_waited_for() -> None:
    path = critical_path(small(), planned(small()))
    assert [(link.target, link.because) for link in path] == [("t1", "start"), ("t2", "ranks"), ("dit", "ranks")]
    assert path[1].waited == "t1"


def test_the_path_of_a_measured_step_waits_for_the_rank_that_came_last() -> None:
    module = small()
    straggling = [
        Interval(i.rank, i.op, i.target, i.start, i.end + (70.0 if i.op == "backward" and i.target == "t0" else 0.0))
        for i in planned(module).intervals
        if i.op not in ("reduce", "step")
    ]
    path = critical_path(module, Timeline("measured, step 0", tuple(straggling)))
    assert [(link.target, link.because) for link in path] == [("e0", "start"), ("t0", "input")]
