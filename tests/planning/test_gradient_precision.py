"""fp32 gradients where they fit, and never at the cost of a clip."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.ir.nodes import Clip, Cluster, Level, Module, Stage, quantity
from arachnec.ir.stage_sizes import gradient_bytes
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.planning.gradient_precision import least_degrees, with_gradient_precision

GIB = 2**30


def module(memory: float, *, params: int = 2**30, sharded: int | None = None, dtype: str = "bf16") -> Module:
    """A model of 2 GiB of bf16 parameters; a clip of 1000 tokens needs 10 GiB."""
    cluster = Cluster("c", Attributes.of(nodes=1, gpus=8, memory=Quantity(memory, "GiB")))
    optimizer = 16 * params / GIB
    state = 4 * params / GIB + optimizer / (sharded or 1)
    attrs = Attributes.of(
        params=params, dtype=dtype, saved_recompute=Formula((Term(0.01, (("S", 1),)),), "GiB"),
        state=Quantity(state, "GiB"), optimizer=Quantity(optimizer, "GiB"), sharded=sharded,
    )  # fmt: skip
    clips = (Clip(0, 1, 16, 16, 0, 1000, Attributes()), Clip(1, 1, 16, 16, 0, 100, Attributes()))
    return Module("m", Level.TRACED, cluster, clips, (Stage("dit", True, attrs),))


def test_whole_on_every_rank_fp32_gradients_take_less_for_the_optimizer_has_no_copy() -> None:
    before = module(80.0)
    (stage,) = with_gradient_precision(before).stages
    assert stage.attrs["gradients"] == "f32"
    assert quantity(stage.attrs["state"]) == pytest.approx(2 + 4 + 12)
    assert quantity(stage.attrs["optimizer"]) == pytest.approx(12)
    assert gradient_bytes(stage) == 4 * 2**30
    assert gradient_bytes(before.stages[0]) == 2 * 2**30


def test_dealt_out_they_take_more_and_are_kept_where_clips_need_no_more_ranks() -> None:
    (stage,) = with_gradient_precision(module(40.0, sharded=8)).stages
    assert stage.attrs["gradients"] == "f32"
    assert quantity(stage.attrs["state"]) == pytest.approx(2 + 4 + 12 / 8)


def test_where_a_clip_would_need_more_ranks_they_stay_in_the_parameters_precision() -> None:
    own = module(17.1, sharded=8)  # 16.07 GiB for use: 10.07 beside 6 of state, and 8.57 beside 7.5
    chosen = with_gradient_precision(own)
    (stage,) = chosen.stages
    assert least_degrees(own) == (1, 1)
    assert stage.attrs["gradients"] == "bf16"
    assert stage.attrs["state"] == own.stages[0].attrs["state"]
    assert least_degrees(chosen) == (1, 1)


def test_a_model_of_fp32_is_left_as_it_is_and_so_is_a_frozen_stage() -> None:
    exact = module(80.0, dtype="f32")
    assert with_gradient_precision(exact) == exact
    frozen = module(80.0)
    frozen = replace(frozen, stages=tuple(replace(stage, trained=False) for stage in frozen.stages))
    assert with_gradient_precision(frozen) == frozen
    again = with_gradient_precision(module(80.0))
    assert with_gradient_precision(again) == again
