"""Models sample with the sparse attention that a run has trained, whatever the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

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
    "branches on unequal numbers of ranks": (
        4,
        {
            "r0.0": {"ranks": (0, 1, 2), "side": 2, "degree": 2, "unconditional": (1, 1)},
            "r0.1": {"ranks": (3, 0, 1, 2), "side": 2, "degree": 1, "unconditional": (3, 1)},
            "r1.0": {"ranks": (1, 3, 2, 0), "side": 2, "degree": 3, "unconditional": (1, 1)},
        },
    ),
}


def planned_with(folder: Path, world: int, sparse: str, more: str) -> Module:
    module = traced(sampling_of(written(folder, more), FIXED), REQUESTS).module(cluster(world))
    return planned(module, Pipeline.parse(f"{sparse},{REST}"))


def latents_of(folder: Path, program: Module) -> dict[str, Tensor]:
    results = run(folder, program, FIXED)
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
