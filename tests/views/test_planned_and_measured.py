"""What a run took otherwise than planned, and where the plan's costs come from; names of clips and text tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.reporting.report import StepReport, run_report
from arachnec.cost.profile import Profile
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Term
from arachnec.passes.annotate import profile_source
from arachnec.views.format import clip_names, size_of
from arachnec.views.planned_and_measured import cost_sources, costs_note, differences, differs, memory_words
from arachnec.views.timeline import Timeline, planned, read_measured
from tests.passes.plans import DIT
from tests.views.page_plans import slower, small


@pytest.mark.parametrize(
    ("measured", "said"), [(49.0, True), (51.0, False), (100.0, False), (149.0, False), (151.0, True), (1000.0, True)]
)
def test_a_time_differs_where_it_is_off_by_more_than_half_of_what_was_planned(measured: float, said: bool) -> None:
    assert differs(100.0, measured) == said


def test_costs_from_device_specs_have_a_remedy_and_those_of_a_profile_its_file_and_date() -> None:
    assert costs_note(cost_sources(small())) == "costs: device specs; run `arachnec profile`"
    profile = Profile("m", "cpu", [], measured_at="2026-03-01 12:30 UTC")
    source = profile_source(Path("/somewhere/profile.json"), profile)
    assert costs_note(source) == "costs: profile profile.json of 2026-03-01 12:30 UTC"
    assert profile_source(Path("old.json"), Profile("m", "cpu", [])) == "profile old.json"


def step(planned_ms: float, step_ms: float) -> StepReport:
    return StepReport(0, 0, 1.0, 1.0, step_ms, planned_ms, 0.0, 1.0, 0.0, 1.0, 1)


def test_the_report_of_a_run_has_where_costs_come_from_and_a_note_where_they_are_far_off() -> None:
    far = run_report(1, "cpu", [step(100.0, 900.0), step(100.0, 200.0)], {}, costs="device specs")
    assert far.costs == "device specs"
    assert far.note == "planned 100 ms, measured 200 ms; costs: device specs; run `arachnec profile`"
    near = run_report(1, "cpu", [step(100.0, 900.0), step(100.0, 120.0)], {}, costs="device specs")
    assert (near.costs, near.note) == ("device specs", "")


def test_what_took_more_than_twice_as_long_or_less_than_half_is_named() -> None:
    module = small()
    assert differences(module, planned(module), slower(module, 1.9)) == []
    words = differences(module, planned(module), slower(module, 3.0))
    assert words[0].startswith("Measured, step 3: ") and "3 times the planned" in words[0]
    assert {line.split(":")[0] for line in words[1:-1]} == {"Encode of @vae", "Forward of @dit", "Backward of @dit"}
    assert words[-1] == "Costs: device specs; run `arachnec profile`."
    assert any("0.4 times" in line for line in differences(module, planned(module), slower(module, 0.4)))


def test_a_rank_that_waits_for_another_does_not_make_a_stage_slow() -> None:
    module = small()
    waits = [
        replace(i, start=i.start - 2 * (i.end - i.start)) if (i.rank, i.target, i.op) == (1, "t0", "forward") else i
        for i in planned(module).intervals
    ]
    assert differences(module, planned(module), Timeline("measured", tuple(waits))) == []


def test_measured_memory_is_that_of_the_fullest_rank() -> None:
    run = Timeline("measured", (), peak_gib={0: 12.0, 1: 61.25})
    assert memory_words(small(), run) == ["Measured memory: at most 61.2 GiB, on rank 1."]
    assert memory_words(small(), Timeline("measured", ())) == []


def test_peaks_of_a_measured_file_are_read_and_held_to_what_can_be(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    content = {"step": 3, "iteration": 0, "intervals": []}
    file.write_text(json.dumps(content | {"peak_gib": [1.5, 2.0]}))
    assert read_measured(file).peak_gib == {0: 1.5, 1: 2.0}
    file.write_text(json.dumps(content))
    assert read_measured(file).peak_gib == {}
    for wrong in ([-1.0], [1e30], ["a"]):
        file.write_text(json.dumps(content | {"peak_gib": wrong}))
        with pytest.raises(UserError, match="peak_gib"):
            read_measured(file)


def test_a_stage_that_reads_captions_alone_shows_text_tokens() -> None:
    def encoder(*powers: tuple[tuple[str, int], ...]) -> Stage:
        work = Formula(tuple(Term(1e-9, term) for term in powers), "TFLOP")
        return Stage("e", False, Attributes.of(flops=work))

    encode = Cascade("e0", Phase.ENCODE, "e", (0,), 2, 32760, 226)
    assert size_of(encode, encoder((("B", 1), ("T", 2)), (("B", 1), ("T", 1)))) == "2 x 226 text"
    assert size_of(encode, encoder((("B", 1),))) == "2 x 226 text"  # a fixed length
    assert size_of(encode, encoder((("B", 1), ("S", 1)), (("B", 1), ("T", 1)))) == "2 x 32760"
    assert size_of(Cascade("t0", Phase.TRAIN, "dit", (0,), 2, 32760, 226), DIT) == "2 x 32760"


def test_clips_go_by_name_and_rows_without_a_file_by_number() -> None:
    names = {0: "cat", 1: "dog", 2: "fox", 3: "3", 4: "4"}
    assert clip_names(names, (0,)) == "cat"
    assert clip_names(names, (0, 1, 2, 3, 4)) == "cat, dog, fox and 2 more"
    assert clip_names(names, (3,)) == "clip 3"
    assert clip_names(names, (3, 4)) == "clips 3, 4"
    assert clip_names(names, ()) == ""
