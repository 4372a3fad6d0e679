"""What the executor would run as something else, it refuses at load, by operation and phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.plans.step_plans import checked_program
from arachnec.backends.torch_distributed.plans.supported import demand_supported
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.parser import parse_file

CHECKED = Path(__file__).parents[1] / "golden" / "check"


def refusal(text: str) -> UserError:
    with pytest.raises(UserError) as error:
        checked_program(text, "by_hand")
    return error.value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "pipeline_1f1b",
            {"send %f0", "forward %f0", "receive %h0", "free %f0", "backward %b0", "send %h0", "free %h0"},
        ),
        ("pipeline_zero_bubble", {"weight"}),
    ],
)
def test_a_pipeline_is_refused_with_the_cascades_that_cannot_run(name: str, expected: set[str]) -> None:
    error = refusal((CHECKED / f"{name}.cascade").read_text())
    said = "\n".join(map(render, error.diagnostics))
    for line in expected:
        assert f"`{line}" in said
    assert "takes `encode` of encode, `forward` of train" in said
    assert said.count("this back end trains a model as one stage") == 1


def test_two_trained_stages_whose_steps_would_reach_all_parameters_are_refused() -> None:
    module = parse_file(CHECKED / "buckets_valid.cascade")
    demand_supported(module, module.programs)
    other = replace(next(stage for stage in module.stages if stage.trained), name="other")
    with pytest.raises(UserError, match="`@dit` and `@other` are trained"):
        demand_supported(replace(module, stages=(*module.stages, other)), module.programs)


@pytest.mark.parametrize("name", ["buckets_valid", "valid"])
def test_what_lowering_makes_of_train_and_encode_cascades_is_taken(name: str) -> None:
    checked_program((CHECKED / f"{name}.cascade").read_text(), name)
