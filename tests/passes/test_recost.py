"""The times of a lowered program, made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.cost.model import CostModel
from arachnec.cost.profile import Measurement, Synchronisation, fit_profile, write_profile
from arachnec.ir.nodes import Clip, Level, Module, Phase, quantity
from arachnec.lowering.programs import lower
from arachnec.passes.check import find_problems
from arachnec.passes.recost import Recost
from tests.passes.plans import cluster, module_of, timed

RUNS = [Measurement(1, tokens, 0, 1, 2e-2 * tokens) for tokens in (100, 1000, 4000)]
SLOW = [Measurement(1, tokens, 0, 1, 4e-2 * tokens) for tokens in (100, 1000, 4000)]


def lowered() -> Module:
    clips = [Clip(number, 17, 480, 832, 0, tokens) for number, tokens in enumerate((1000, 2000, 1000))]
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("a", Phase.TRAIN, 0, 1000, ("e",), (1.0, 31.0), (1,)),
        timed("e1", Phase.ENCODE, 1, 2000, (), (1.0, 2.0), (0,)),
        timed("e2", Phase.ENCODE, 2, 1000, (), (0.0, 1.0), (2,)),
        timed("b", Phase.TRAIN, 1, 2000, ("e1",), (31.0, 61.0), (0, 1)),
        timed("c", Phase.TRAIN, 2, 1000, ("e2",), (1.0, 31.0), (2,)),
    ]
    return lower(module_of(cluster(), clips, cascades))


def profile(path: Path) -> Path:
    end = Synchronisation("dit", 4, 4_000_000, 12.0, 7.0)
    runs = [("vae", "forward", RUNS), ("dit", "forward", RUNS), ("dit", "backward", SLOW)]
    write_profile(fit_profile(runs, machine="m", device="h100-80g", synchronisation=[end]), path)
    return path


def test_cascades_take_the_new_time_on_their_old_ranks_in_their_old_order(tmp_path: Path) -> None:
    recosted = Recost(str(profile(tmp_path / "p.json"))).run(lowered())
    spans = {cascade.name: (cascade.ranks, cascade.start, cascade.end) for cascade in recosted.cascades}
    assert recosted.level is Level.LOWERED
    assert spans["e"] == ((0,), 0.0, pytest.approx(20))
    assert spans["a"] == ((1,), pytest.approx(20), pytest.approx(80))
    assert spans["b"] == ((0, 1), pytest.approx(80), pytest.approx(140))
    assert spans["c"] == ((2,), pytest.approx(20), pytest.approx(80))
    assert quantity(recosted.attrs["makespan"]) == pytest.approx(140)


def test_an_encoder_takes_the_measured_time_of_its_clips_and_loses_that_of_another_machine(tmp_path: Path) -> None:
    measured = [Measurement(1, 1000, 0, 1, 33.0, sizes={"frames": 17, "height": 480, "width": 832})]
    runs = [("vae", "forward", measured), ("dit", "forward", RUNS), ("dit", "backward", SLOW)]
    write_profile(fit_profile(runs, machine="m", device="h100-80g"), tmp_path / "clips.json")
    recosted = Recost(str(tmp_path / "clips.json")).run(lowered())
    encode = next(step for step in recosted.programs[0].instructions if step.op == "encode")
    assert quantity(encode.attrs["time"]) == pytest.approx(33.0)
    assert (recosted.cascades[0].end, recosted.cascades[1].start) == pytest.approx((33.0, 33.0))
    assert not find_problems(recosted)
    assert Recost(str(profile(tmp_path / "p.json"))).run(recosted).cascades[0].end == pytest.approx(20)


def test_a_program_with_new_times_still_holds_every_rule(tmp_path: Path) -> None:
    before = lowered()
    recosted = Recost(str(profile(tmp_path / "p.json"))).run(before)
    assert not find_problems(before)
    assert not find_problems(recosted)
    assert quantity(recosted.attrs["bound"]) <= quantity(recosted.attrs["makespan"])


def test_forward_and_backward_share_a_cascades_time_as_they_were_measured(tmp_path: Path) -> None:
    recosted = Recost(str(profile(tmp_path / "p.json"))).run(lowered())
    times = {step.op: quantity(step.attrs["time"]) for step in recosted.programs[2].instructions if step.target == "c"}
    assert times == pytest.approx({"forward": 20, "backward": 40})


def test_the_measured_step_and_sum_end_the_iteration(tmp_path: Path) -> None:
    module = replace(lowered(), cluster=cluster())
    path = profile(tmp_path / "p.json")
    recosted = Recost(str(path)).run(module)
    ends = {step.op: quantity(step.attrs["time"]) for step in recosted.programs[0].instructions if step.target == "dit"}
    assert ends["step"] == pytest.approx(7.0)
    assert CostModel(recosted).step_time(recosted.stages[1]) == pytest.approx(7.0)
