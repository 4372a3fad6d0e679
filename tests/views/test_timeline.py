"""Timelines in all their forms: measured files, Chrome traces, SVG and the terminal."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from arachnec.backends.simulator import simulate
from arachnec.ir.diagnostic import UserError
from arachnec.ir.limits import MOST_TERMINAL_RANKS
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.parser import parse_module
from arachnec.lowering.programs import lower
from arachnec.views.executable_page import executable_page
from arachnec.views.format import title_of
from arachnec.views.timeline import Interval, Timeline, planned, read_measured
from arachnec.views.timeline_svg import draw, ticks
from arachnec.views.timeline_terminal import gantt
from tests.passes.plans import cluster, equal_clips, module_of, placed_modules, timed

SVG = "{http://www.w3.org/2000/svg}"


def wide(ranks: int) -> Module:
    clips = equal_clips(ranks)
    cascades = [timed(f"t{n}", Phase.TRAIN, n, 1000, (), (0.0, 30.0), (n,)) for n in range(ranks)]
    return lower(module_of(cluster(gpus=ranks), clips, cascades))


def in_terminal(module: Module, timeline: Timeline, width: int = 100) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width).print(gantt(module, timeline, width=width))
    return output.getvalue().splitlines()


@given(placed_modules())
def test_the_planned_timeline_has_the_cascades_where_the_plan_has_them(module: Module) -> None:
    lanes = planned(lower(module)).lanes
    for cascade in module.cascades:
        for rank in cascade.ranks:
            own = [i for i in lanes[rank] if i.target == cascade.name]
            assert min(i.start for i in own) == pytest.approx(cascade.start)
            assert max(i.end for i in own) == pytest.approx(cascade.end)


@given(placed_modules())
def test_the_drawing_is_xml_and_every_box_lies_inside(module: Module) -> None:
    lowered = lower(module)
    root = ElementTree.fromstring(draw(lowered, planned(lowered), simulate(lowered).timeline))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert boxes
    for box in boxes:
        assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert 0 <= float(box.attrib["y"]) <= float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_ranks_next_to_each_other_in_one_cascade_are_one_box_and_measured_ones_apart_are_not() -> None:
    cascades = [timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0, 1, 2, 3))]
    lowered = lower(module_of(cluster(), equal_clips(), cascades))
    assert draw(lowered, planned(lowered)).count("<title>forward t ") == 1
    measured = Timeline("measured", tuple(Interval(r, "forward", "t", 5.0 * r, 10.0 + 5.0 * r) for r in range(4)))
    assert draw(lowered, measured).count("<title>forward t ") == 4


def test_planned_and_measured_are_drawn_below_each_other_on_one_scale() -> None:
    lowered = wide(2)
    measured = Timeline("measured, step 3", (Interval(0, "forward", "t0", 0.0, 60.0),))
    text = draw(lowered, planned(lowered), measured)
    assert text.index("planned") < text.index("measured, step 3")


def test_names_are_escaped_in_the_drawing() -> None:
    odd = Timeline("a < b & c", (Interval(0, "forward", "t0", 0.0, 60.0),))
    root = ElementTree.fromstring(draw(replace(wide(1), name="<m> & 'n'"), odd))
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert "<m> & 'n', 1 clip on 1 x h100-80g" in words
    assert any(word is not None and word.startswith("a < b & c") for word in words)


@pytest.mark.parametrize("ranks", [1, 8, 33, 1000])
def test_the_terminal_chart_fits_its_width_and_a_screen(ranks: int) -> None:
    lowered = wide(ranks)
    lines = in_terminal(lowered, planned(lowered))
    assert max(map(len, lines)) <= 100
    assert len(lines) <= MOST_TERMINAL_RANKS + 3


def test_the_title_says_model_clips_and_cluster() -> None:
    module = replace(wide(2), name="iteration_3")
    known = tuple(replace(s, attrs=s.attrs.updated(source="Net" if s.trained else None)) for s in module.stages)
    module = replace(module, stages=known)
    device = module.cluster.attrs["device"] if module.cluster else ""
    title = f"Net, 2 clips on 2 x {device}, iteration 3"
    assert title_of(module) == title
    assert title in draw(module, planned(module))
    assert title in executable_page(module)


def test_stages_can_be_told_apart_without_colour() -> None:
    text = (Path(__file__).parents[1] / "golden" / "check" / "pipeline_1f1b.cascade").read_text()
    module = parse_module(text)
    *_, first, second, legend = in_terminal(module, planned(module))
    entries = [entry for entry in legend.replace("|", "").split("  ") if entry.strip()]
    characters = [entry.split()[-2] for entry in entries if entry.split()[-1] in ("forward", "backward")]
    assert len(characters) == len(set(characters)) == 4
    assert not set(first) & set(second) & set(characters)
    assert set(characters) < set(first) | set(second)


def test_ranks_without_anything_to_do_have_a_row_and_count_as_imbalance() -> None:
    cascades = [timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0,))]
    lowered = lower(module_of(cluster(gpus=4), equal_clips(), cascades))
    idle = replace(lowered, programs=tuple(replace(p, instructions=p.instructions[:-2]) for p in lowered.programs))
    lines = in_terminal(idle, planned(idle))
    assert [line.split()[0] for line in lines[2:6]] == ["0", "1", "2", "3"]
    assert "imbalance 75.0%" in lines[0]
    assert "rank 3" in draw(idle, planned(idle))


def test_the_terminal_chart_names_clips_and_shows_idle_ranks() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("long", Phase.TRAIN, 0, 1000, (), (0.0, 100.0), (0,)),
        timed("half", Phase.TRAIN, 1, 1000, (), (0.0, 50.0), (1,)),
    ]
    lowered = lower(module_of(cluster(gpus=2), clips, cascades))
    lines = in_terminal(lowered, planned(lowered))
    first, second = lines[2], lines[3]
    assert "clip 0" in first
    assert "clip 1" in second
    assert 35 <= second.count("·") <= 50


@given(st.floats(0.01, 1e7))
def test_ticks_are_few_and_cover_the_axis(end: float) -> None:
    marks = ticks(end)
    assert 2 <= len(marks) <= 10
    assert marks[0] == 0
    assert marks[-1] <= end * (1 + 1e-6)
    assert end < marks[-1] + marks[1]


def test_a_measured_file_is_read_and_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text('{"step": 3, "intervals": [{"rank": 0, "op": "forward", "target": "t", "start": 1.5, "end": 2}]}')
    timeline = read_measured(path)
    assert timeline.title == "measured, step 3"
    assert timeline.intervals == (Interval(0, "forward", "t", 1.5, 2.0),)
    path.write_text('{"step": 3}')
    with pytest.raises(UserError):
        read_measured(path)
