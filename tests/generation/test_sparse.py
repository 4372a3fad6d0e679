"""Models sample with the sparse attention that a run has trained, whatever the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arachnec.data.requests import Request
from arachnec.generation.plan import planned, traced
from arachnec.ir.nodes import Module
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import cluster
from tests.generation.cases import FIXED, REQUESTS, expected, lowered, run, sampling_of, written
from tests.generation.sparse_cases import FORCED, checkpoint, predictors

pytest.importorskip("diffusers")

REST = "segment,annotate,schedule-sampling{steps=20},place,lower,check"
SPARSE = f"sparsify{{{FORCED}}}"
PLANS: dict[str, tuple[int, dict[str, dict[str, object]]]] = {
    "both ranks share every sequence": (2, {f"r{n}.{s}": {"ranks": (0, 1)} for n in range(3) for s in range(2)}),
    "a branch on each rank": (2, {f"r{n}.{s}": {"ranks": (0, 1), "side": 2} for n in range(2) for s in range(2)}),
    "branches on two ranks each, uneven shares": (
        4,
        {
            "r0.0": {"ranks": (0, 1, 2, 3), "side": 2},
            "r0.1": {"ranks": (1, 2, 3)},
            "r1.0": {"ranks": (2,)},
            "r2.0": {"ranks": (3, 0), "shards": (13, 7)},
            "r2.1": {"ranks": (0, 1, 2, 3)},
        },
    ),
    "a ring, which dense layers take": (
        3,
        {f"r{n}.{s}": {"ranks": (0, 1, 2), "ring": 3} for n in (0, 2) for s in (0, 1)},
    ),
    "branches on unequal numbers of ranks": (
        4,
        {
            "r0.0": {"ranks": (0, 1, 2), "side": 2, "degree": 2, "unconditional": (1, 1)},
            "r0.1": {"ranks": (3, 0, 1, 2), "side": 2, "degree": 1, "unconditional": (3, 1)},
            "r1.0": {"ranks": (1, 3, 2, 0), "side": 2, "degree": 3, "unconditional": (1, 1)},
        },
    ),
}


def planned_with(folder: Path, world: int, sparse: str, more: str, requests: tuple[Request, ...] = REQUESTS) -> Module:
    module = traced(sampling_of(written(folder, more), FIXED), requests).module(cluster(world))
    return planned(module, Pipeline.parse(f"{sparse},{REST}"))


def latents_of(folder: Path, program: Module, requests: tuple[Request, ...] = REQUESTS) -> dict[str, Tensor]:
    results = run(folder, program, FIXED, requests)
    for id in results:
        (folder / "out" / f"{id}.safetensors").unlink()
    return {id: latents for id, (_, latents) in results.items() if latents is not None}


def test_all_keys_kept_give_the_dense_latents(tmp_path: Path) -> None:
    more = predictors(large=checkpoint(tmp_path / "run"), small=tmp_path / "run")
    program = planned_with(tmp_path, 1, f"sparsify{{density=1,{FORCED}}}", more)
    assert all("sparse" in cascade.attrs for cascade in program.cascades)
    latents, sampling = latents_of(tmp_path, program), sampling_of(written(tmp_path), FIXED)
    for request in REQUESTS:
        torch.testing.assert_close(latents[str(request.id)], expected(sampling, request), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_latents_do_not_depend_on_the_plan(tmp_path: Path, plan: str) -> None:
    """They are those of one rank, which are not the dense ones."""
    world, works = PLANS[plan]
    more = predictors(large=checkpoint(tmp_path / "run"), small=tmp_path / "run")
    sampling = sampling_of(written(tmp_path, more), FIXED)
    alone = latents_of(tmp_path, planned_with(tmp_path, 1, SPARSE, more))
    module = traced(sampling, REQUESTS).module(cluster(world))
    costed = Pipeline.parse(f"{SPARSE},segment{{length=2}},annotate").run(module)
    shared = latents_of(tmp_path, lowered(costed, works))
    for request in REQUESTS:
        own, dense = alone[str(request.id)], expected(sampling, request)
        torch.testing.assert_close(shared[str(request.id)], own, rtol=1e-4, atol=1e-5)
        assert float((own - dense).norm() / dense.norm()) > 1e-3


def test_layers_that_are_not_ready_and_models_without_predictors_stay_dense(tmp_path: Path) -> None:
    run_folder = checkpoint(tmp_path / "run", {"blocks.0": False, "blocks.1": True})
    program = planned_with(tmp_path, 1, SPARSE, predictors(large=run_folder))
    layers = {cascade.stage: cascade.attrs.get("sparse") for cascade in program.cascades}
    assert layers == {"large": (1,), "small": None}
    reasons = {stage.name: stage.attrs["dense"] for stage in program.stages}
    assert reasons["small"] == (("small", "the sampler file names no predictors of it"),)
    assert reasons["large"] == (("Block", "layer 0 has no predictor that is ready"),)
    one = latents_of(tmp_path, program)
    both = predictors(large=checkpoint(tmp_path / "both"))
    other = latents_of(tmp_path, planned_with(tmp_path, 1, SPARSE, both))
    assert all(not torch.equal(one[id], other[id]) for id in one)


def test_every_request_of_a_batch_has_its_own_keys(tmp_path: Path) -> None:
    more = predictors(large=checkpoint(tmp_path / "run"), small=tmp_path / "run")
    equal = tuple(replace(REQUESTS[0], id=id, seed=seed) for seed, id in enumerate("abc"))
    module = traced(sampling_of(written(tmp_path, more), FIXED), equal).module(cluster(1))
    passes = f"{SPARSE},segment{{batch=3}},annotate,schedule-sampling{{steps=20}},place,lower,check"
    program = planned(module, Pipeline.parse(passes))
    assert {cascade.batch for cascade in program.cascades} == {3}
    together = latents_of(tmp_path, program, equal)
    for request in equal:
        (own,) = latents_of(tmp_path, planned_with(tmp_path, 1, SPARSE, more, (request,)), (request,)).values()
        torch.testing.assert_close(together[str(request.id)], own, rtol=1e-4, atol=1e-5)


def test_fused_blocks_attend_to_the_same_keys(tmp_path: Path) -> None:
    more = predictors(large=checkpoint(tmp_path / "run"), small=tmp_path / "run")
    plain = latents_of(tmp_path, planned_with(tmp_path, 1, SPARSE, more))
    fused = latents_of(tmp_path, planned_with(tmp_path, 2, f"fuse,{SPARSE}", more))
    for id, latents in plain.items():
        torch.testing.assert_close(fused[id], latents, rtol=1e-4, atol=1e-5)
