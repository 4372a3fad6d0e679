"""Models sample with the sparse attention that a run has trained, whatever the plan."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL
from arachnec.generation.plan import planned, traced
from arachnec.generation.rank_models import RankModels
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import length_class
from arachnec.ir.nodes import Module
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.sampling.loop import Sampling
from tests.distributed.executor_cases import cluster
from tests.generation.cases import FIXED, REQUESTS, expected, lowered, run, sampling_of, traced_pair, written
from tests.generation.sparse_cases import FORCED, checkpoint, predictors
from tests.slow import SLOW, quick

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


DIFFUSERS = """
from arachnec.models.diffusers.sampler import {family}_sampler
from benchmarks.sampling.pipelines import {model}_model

sampler = {family}_sampler(large={model}_model(), text_length=8)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
guidance = sampler.guidance
"""
FAMILIES = {
    "cogvideox": ("cogvideox", 16, ("transformer_blocks.0", "transformer_blocks.1")),
    "hunyuan": ("hunyuan", 16, ("transformer_blocks.0", "single_transformer_blocks.0")),
}
OPTIONS = "overhead=0ms,forward_speed=1e6,choice_speed=1e6,group=8,block=4"


def planned_with(folder: Path, world: int, sparse: str, more: str, requests: tuple[Request, ...] = REQUESTS) -> Module:
    module = traced_pair(sampling_of(written(folder, more), FIXED), requests).module(cluster(world))
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


def test_requests_are_sampled_with_the_densities_of_their_class_of_length(tmp_path: Path) -> None:
    """Where the run measured that its class needs all keys, latents are dense; where of other classes, as without."""
    request = REQUESTS[0]
    (length,) = {length_class(cascade.tokens) for cascade in one_request(tmp_path, request, None).cascades}
    latents = {}
    for name, classes in {"none": None, "other": {2 * length: (1.0,) * 3}, "own": {length: (1.0,) * 3}}.items():
        program = one_request(tmp_path, request, classes)
        assert all(cascade.attrs["sparse"] == (0, 1) for cascade in program.cascades)
        latents[name] = latents_of(tmp_path, program, (request,))[str(request.id)]
    dense = expected(sampling_of(written(tmp_path), FIXED), request)
    torch.testing.assert_close(latents["own"], dense, rtol=1e-6, atol=1e-6)
    assert torch.equal(latents["other"], latents["none"]) and not torch.allclose(latents["none"], dense, rtol=1e-4)


def one_request(tmp_path: Path, request: Request, classes: dict[int, tuple[float, ...]] | None) -> Module:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    held = checkpoint(tmp_path / "run", classes=classes)
    return planned_with(tmp_path, 1, SPARSE, predictors(large=held, small=held), (request,))


@pytest.mark.parametrize(
    "plan", quick(list(PLANS), "branches on two ranks each, uneven shares", "a ring, which dense layers take")
)
def test_latents_do_not_depend_on_the_plan(tmp_path: Path, plan: str) -> None:
    """They are those of one rank, which are not the dense ones."""
    world, works = PLANS[plan]
    more = predictors(large=checkpoint(tmp_path / "run"), small=tmp_path / "run")
    sampling = sampling_of(written(tmp_path, more), FIXED)
    alone = latents_of(tmp_path, planned_with(tmp_path, 1, SPARSE, more))
    module = traced_pair(sampling, REQUESTS).module(cluster(world))
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
    module = traced_pair(sampling_of(written(tmp_path, more), FIXED), equal).module(cluster(1))
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


@SLOW
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_models_with_captions_in_the_sequence(tmp_path: Path, family: str) -> None:
    """With all keys the latents are the dense ones; with chosen keys two ranks have those of one."""
    name, size, paths = FAMILIES[family]
    requests = (Request("a", "fox", 9, 32, 48, steps=4, seed=3, guidance=3.0, text_tokens=4, negative_prompt="blur"),)
    held = checkpoint(tmp_path / "run", dict.fromkeys(paths, True), (0.3, 0.6), heads=2, size=size, rank=4)
    path = tmp_path / "sampler.py"
    path.write_text(DIFFUSERS.replace("{family}", name).replace("{model}", family) + predictors(large=held))
    once = traced(Sampling(load_sampler_file(path), ("large",), ONE_MODEL), requests)

    def latents(world: int, passes: str, policy: str = "steps=20") -> Tensor:
        module = once.module(cluster(world))
        rest = f"segment,annotate,schedule-sampling{{{policy}}},place,lower,check"
        program = planned(module, Pipeline.parse(f"{passes}{rest}"))
        assert all(cascade.attrs.get("sparse") == ((0, 1) if passes else None) for cascade in program.cascades)
        (tmp_path / "out" / "a.safetensors").unlink(missing_ok=True)
        ((_, told),) = run(tmp_path, program, ONE_MODEL, requests, "large", world=2).values()
        assert told is not None
        return told

    dense, chosen = latents(1, ""), latents(1, f"sparsify{{{OPTIONS}}},")
    torch.testing.assert_close(latents(1, f"sparsify{{density=1,{OPTIONS}}},"), dense, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(latents(2, f"sparsify{{{OPTIONS}}},", "policy=one-degree"), chosen, rtol=1e-4, atol=1e-5)
    assert float((chosen - dense).norm() / dense.norm()) > 1e-4


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers that are not there": ({"ready": {"blocks.7": True}}, "no attention over the clip's tokens in `blocks.7`"),
    "other heads": ({"heads": 2, "densities": (0.1, 0.2)}, "`blocks.0` has 2 heads there, and 3 here"),
    "other features": ({"size": 5, "rank": 1}, "those of `blocks.0` have 15 numbers, for 3 heads of 4 features"),
    "a rank above the heads' size": ({"rank": 5}, "those of `blocks.0` have 60 numbers"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_predictors_of_another_model_are_refused(tmp_path: Path, wrong: str) -> None:
    of_run, message = WRONG[wrong]
    more = predictors(large=checkpoint(tmp_path / "run", **of_run))
    with pytest.raises(UserError, match=message):
        traced_pair(sampling_of(written(tmp_path, more), FIXED), REQUESTS).module(cluster(1))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("return {'other': 'run'}", "`predictors` names `other`, which is no model of the file"),
        ("return ['run']", "`predictors` returned list"),
        ("return {'large': 3}", "`predictors` returned int as a folder"),
    ],
)
def test_what_a_sampler_file_says_of_predictors_is_checked(tmp_path: Path, told: str, message: str) -> None:
    sampler = written(tmp_path, f"\n\ndef predictors():\n    {told}\n")
    with pytest.raises(UserError, match=message):
        sampler.trained_predictors("large")


def test_a_run_whose_predictors_are_gone_since_the_plan_is_refused(tmp_path: Path) -> None:
    more = predictors(large=checkpoint(tmp_path / "run"))
    program = planned_with(tmp_path, 1, SPARSE, more)
    shutil.rmtree(tmp_path / "run")
    checkpoint(tmp_path / "run", {"blocks.0": True})
    models = RankModels(written(tmp_path, more), torch.device("cpu"))
    with pytest.raises(UserError, match="the plan has layers that are not there; compile again"):
        models.prepare(program, program.programs[0], REQUESTS)
