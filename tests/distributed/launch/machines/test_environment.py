"""What a rank's environment is set to, that a user's own value stays, and that the page says the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.ir.nodes import Level, Module, Program
from arachnec.ir.values import Attributes, Quantity
from arachnec.launch.environment import SETTINGS, leave_gpus_to_ranks, prepare_environment, show_gpus, shown_gpus, table
from arachnec.launch.phases import LONGER, MOST_PLANNED_S, PLAN_S, STALL_S, START_S, STEP_S, Timeouts

ROOT = Path(__file__).parents[4]


def test_everything_is_set_with_a_reason_and_what_a_user_gave_stays() -> None:
    environment: dict[str, str] = {}
    prepare_environment(environment)
    assert set(environment) == {setting.name for setting in SETTINGS}
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"
    assert "{" not in "".join(environment.values())
    assert all(setting.reason for setting in SETTINGS)
    given = {setting.name: "mine" for setting in SETTINGS}
    prepare_environment(given)
    assert set(given.values()) == {"mine"}


def test_the_allocators_other_name_counts_as_given() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}
    prepare_environment(environment)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment


@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_gpus_that_a_command_hides_from_itself_are_there_for_its_ranks(given: dict[str, str]) -> None:
    environment = dict(given)
    for _ in range(2):  # a command that starts a command
        leave_gpus_to_ranks(environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
    with shown_gpus(environment):
        assert environment == given
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    show_gpus(environment)
    assert environment == given
    with shown_gpus(environment):
        assert environment == given
    assert environment == given


def test_a_command_s_own_process_sees_no_gpu() -> None:
    code = "import os, runpy, sys; sys.argv = ['arachnec', 'passes']\n"
    code += "try: runpy.run_module('arachnec', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print('mask', repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.endswith("mask ''\n")


def test_the_page_has_the_table_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "running.md").read_text(encoding="utf-8")


def program(rank: int, state: float) -> Program:
    return Program(rank, (), Attributes.of(state=Quantity(state, "GiB")))


def test_limits_follow_from_the_plan() -> None:
    module = Module("m", Level.LOWERED, None, programs=(program(0, 30.0), program(1, 10.0)))
    limits = Timeouts()
    assert limits.of_start(module) == START_S + 400.0
    assert limits.of_step(planned_ms=100.0, longest_ms=0.0) == STEP_S
    assert limits.of_step(planned_ms=20_000.0, longest_ms=0.0) == LONGER * 20.0
    assert limits.of_step(planned_ms=20_000.0, longest_ms=50_000.0) == LONGER * 50.0
    assert limits.of_step(planned_ms=100.0, longest_ms=0.0, first=700.0) == STEP_S + 700.0
    assert limits.of_step(planned_ms=100.0, longest_ms=0.0, applies=False) > STEP_S
    assert limits.of_instruction(2000.0, longest_ms=0.0, ends_ms=4000.0) == STALL_S + 2.0
    assert limits.of_instruction(2000.0, longest_ms=12_000.0, ends_ms=4000.0) == STALL_S + 6.0  # three times slower
    assert limits.of_instruction(2000.0, longest_ms=1000.0, ends_ms=4000.0, first=7.0) == STALL_S + 2.0 + 7.0
    assert limits.of_instruction(9e9, longest_ms=0.0, ends_ms=9e9) == STALL_S + MOST_PLANNED_S
    assert limits.of_instruction(9e9, longest_ms=2e6, ends_ms=9e9) == STALL_S + 2000.0
    assert limits.of_plan(planning_ms=2000.0) == STEP_S + LONGER * 2.0
    assert limits.of_plan() == PLAN_S  # not known, or planned for other ranks


def test_limits_can_be_given() -> None:
    options = RunOptions(start_timeout=1.0, plan_timeout=2.0, step_timeout=3.0)
    module = Module("m", Level.LOWERED, None, programs=(program(0, 30.0),))
    limits = options.timeouts()
    assert (limits.of_start(module), limits.of_plan(), limits.of_step(9e9, 9e9)) == (1.0, 2.0, 3.0)
    assert options.arguments() == ["--start-timeout", "1.0", "--plan-timeout", "2.0", "--step-timeout", "3.0"]
