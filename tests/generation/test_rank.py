"""A program of requests on gloo ranks gives each the latents of a loop of its own, however it is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arachnec.data.requests import Request
from arachnec.data.switch import Switch, parse_switch
from arachnec.generation import rank_models
from arachnec.generation.plan import planned, traced
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import cluster
from tests.generation.cases import (
    BROKEN_DECODER,
    DECODER,
    ENCODER,
    FIXED,
    HALF,
    NOT_A_NUMBER,
    REQUESTS,
    WAN_PAIR,
    Forced,
    expected,
    lowered,
    partitioned,
    run,
    sampling_of,
    traced_pair,
    written,
)

pytest.importorskip("diffusers")

OTHER_BLOCKS = """

class OtherBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, t):
        return x + torch.tanh(t)[:, None] * self.down(nn.functional.gelu(self.up(self.norm(x)) * 1.5))


OtherBlock.__name__ = OtherBlock.__qualname__ = "Block"


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.time, self.head = nn.Linear(4, 8), nn.Linear(1, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(OtherBlock() for _ in range(3))

    def forward(self, x, time):
        x, t = self.embed(x), self.time(time[:, None])
        for block in self.blocks:
            x = block(x, t)
        return self.head(x)


def models():
    return {"large": lambda: Tiny(), "small": lambda: Other()}
"""
PLANS: dict[str, dict[str, dict[str, object]]] = {
    "every request on a rank": {"r1.0": {"ranks": (1,)}, "r1.1": {"ranks": (1,)}},
    "a rank for each model": {f"r{n}.1": {"ranks": (1,)} for n in range(3)},
    "both ranks share every sequence": {f"r{n}.{s}": {"ranks": (0, 1)} for n in range(3) for s in range(2)},
    "a branch on each rank": {f"r{n}.{s}": {"ranks": (0, 1), "side": 2} for n in range(2) for s in range(2)},
    "one shares and hands on to one": {"r0.0": {"ranks": (1, 0)}, "r1.1": {"ranks": (0, 1), "ring": 2}},
}


@pytest.mark.parametrize("plan", PLANS)
def test_latents_do_not_depend_on_the_plan(tmp_path: Path, plan: str) -> None:
    sampling = sampling_of(written(tmp_path), FIXED)
    program = lowered(partitioned(sampling, REQUESTS, 2), PLANS[plan])
    results = run(tmp_path, program, FIXED)
    for request in REQUESTS:
        outcome, latents = results[str(request.id)]
        assert outcome.switched == 3 and outcome.failed is None
        torch.testing.assert_close(latents, expected(sampling, request), rtol=1e-4, atol=1e-5)


def test_uneven_degrees_and_branches_on_four_ranks(tmp_path: Path) -> None:
    """Conditional on two ranks and unconditional on two; three ranks share fifteen tokens; handed on in between."""
    sampling = sampling_of(written(tmp_path), FIXED)
    works = {
        "r0.0": {"ranks": (0, 1, 2, 3), "side": 2},
        "r0.1": {"ranks": (1, 2, 3), "ring": 3},
        "r1.0": {"ranks": (2,)},
        "r2.0": {"ranks": (3, 0), "shards": (13, 7)},
        "r2.1": {"ranks": (1,)},
    }
    results = run(tmp_path, lowered(partitioned(sampling, REQUESTS, 4), works), FIXED)
    for request in REQUESTS:
        torch.testing.assert_close(results[str(request.id)][1], expected(sampling, request), rtol=1e-4, atol=1e-5)


def test_branches_on_ranks_of_unequal_number(tmp_path: Path) -> None:
    """Two and one, one and three, one and a ring of two, three and one; handed on in between, by two requests."""
    sampling = sampling_of(written(tmp_path), FIXED)
    works = {
        "r0.0": {"ranks": (0, 1, 2), "side": 2, "degree": 2, "unconditional": (1, 1)},
        "r0.1": {"ranks": (3, 0, 1, 2), "side": 2, "degree": 1, "unconditional": (3, 1)},
        "r1.0": {"ranks": (1, 3, 2), "side": 2, "degree": 1, "unconditional": (1, 2)},
        "r1.1": {"ranks": (2, 1, 0, 3), "side": 2, "degree": 3, "ring": 3, "unconditional": (1, 1)},
    }
    program = lowered(partitioned(sampling, REQUESTS, 4), works)
    results = run(tmp_path, program, FIXED)
    for request in REQUESTS:
        torch.testing.assert_close(results[str(request.id)][1], expected(sampling, request), rtol=1e-4, atol=1e-5)


def test_every_outcome_of_a_switch_runs_through_one_program(tmp_path: Path) -> None:
    """Segments of two steps over the window, from rank to rank, some shared: whatever K is, both models' steps."""
    rule = Switch("adaptive", 0.1, least=1, most=5)
    sampling = sampling_of(written(tmp_path), rule)
    requests = REQUESTS[:1]
    module = partitioned(sampling, requests, 2)
    works: dict[str, dict[str, object]] = {
        cascade.name: {"ranks": ((0,), (1,), (0, 1))[number % 3]} for number, cascade in enumerate(module.cascades)
    }
    program = lowered(module, works)
    for outcome in range(1, 6):
        forced = Forced("adaptive", 0.1, least=1, most=5, outcome=outcome)
        told, latents = run(tmp_path, program, forced, requests)["a"]
        assert told.switched == outcome and told.steps == 6
        fixed = sampling_of(sampling.sampler, parse_switch(f"fixed={outcome}"))
        torch.testing.assert_close(latents, expected(fixed, requests[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outcome", [0, 6])
def test_a_switch_before_the_first_step_and_one_behind_the_last(tmp_path: Path, outcome: int) -> None:
    """Four ranks, branches on unequal numbers of them, segments of three steps over all steps."""
    rule = Switch("adaptive", 0.1, least=0, most=6)
    sampling = sampling_of(written(tmp_path), rule)
    module = partitioned(sampling, REQUESTS[:1], 4, length=3)
    ways: tuple[dict[str, object], ...] = (
        {"ranks": (0, 1, 2), "side": 2, "degree": 2, "unconditional": (1, 1)},
        {"ranks": (3, 0, 1, 2), "side": 2, "degree": 1, "unconditional": (3, 1)},
        {"ranks": (2,)},
    )
    works = {cascade.name: ways[number % 3] for number, cascade in enumerate(module.cascades)}
    forced = Forced("adaptive", 0.1, least=0, most=6, outcome=outcome)
    told, latents = run(tmp_path, lowered(module, works), forced, REQUESTS[:1])["a"]
    assert told.switched == outcome and told.steps == 6
    fixed = sampling_of(sampling.sampler, parse_switch(f"fixed={outcome}"))
    torch.testing.assert_close(latents, expected(fixed, REQUESTS[0]), rtol=1e-4, atol=1e-5)


def test_blocks_run_as_they_were_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models have a class of blocks of one name, and other blocks. Fused forms are installed; latents are those of
    plain blocks, on one rank and on two."""
    sampling = sampling_of(written(tmp_path, OTHER_BLOCKS), FIXED)
    module = traced(sampling, REQUESTS).module(cluster(2))
    program = planned(module, Pipeline.parse("fuse,segment,annotate,schedule-sampling{steps=20},place,lower,check"))
    assert {graph.name for graph in program.graphs} == {"Block", "Block_small"}
    assert all(graph.fused for graph in program.graphs)
    results = run(tmp_path, program, FIXED)
    for request in REQUESTS:
        torch.testing.assert_close(results[str(request.id)][1], expected(sampling, request), rtol=1e-4, atol=1e-5)
    installed: dict[str, object] = {}
    monkeypatch.setattr(rank_models, "install", lambda model, captured, how: installed.update({str(model): how}))
    models = rank_models.RankModels(sampling.sampler, torch.device("cpu"))
    for own in program.programs:
        models.prepare(program, own, REQUESTS)
    assert len(installed) == 2 and all(installed.values())
    unfused = planned(module, Pipeline.parse("segment,annotate,schedule-sampling{steps=20},place,lower,check"))
    assert unfused.graphs == ()


@pytest.mark.parametrize("work", [{}, {"ranks": (0, 1)}, {"ranks": (1, 0), "side": 2}])
def test_a_batch_of_requests_has_the_latents_of_each_alone(tmp_path: Path, work: dict[str, object]) -> None:
    """On one rank; sharing every sequence of the batch; a branch of all on each rank. Handed on in between."""
    sampling = sampling_of(written(tmp_path), FIXED)
    requests = tuple(replace(REQUESTS[0], id=id, seed=seed) for seed, id in enumerate("xyz"))
    module = partitioned(sampling, requests, 2, batch=3)
    assert [cascade.batch for cascade in module.cascades] == [3, 3]
    results = run(tmp_path, lowered(module, {"r0.0": work, "r0.1": {"ranks": (1,)}}), FIXED, requests)
    for request in requests:
        torch.testing.assert_close(results[str(request.id)][1], expected(sampling, request), rtol=1e-4, atol=1e-5)


def test_requests_with_captions_of_other_lengths_are_one_batch(tmp_path: Path) -> None:
    """Wan pads captions, so they are one forward; latents are those of one by one."""
    path = tmp_path / "sampler.py"
    path.write_text(WAN_PAIR)
    sampling = sampling_of(load_sampler_file(path), FIXED)
    alike = Request("", None, 9, 32, 48, steps=5, guidance=3.0)
    captions = {"fox": 4, "a cat": 6, "owl": 3}
    requests = tuple(
        replace(alike, id=f"r{seed}", caption=caption, text_tokens=text, seed=seed)
        for seed, (caption, text) in enumerate(captions.items())
    )
    module = traced(sampling, requests).module(cluster(2))
    assert {clip.text for clip in module.clips} == {8}
    passes = "segment{batch=3},annotate,schedule-sampling{policy=one-degree},place,lower,check"
    program = planned(module, Pipeline.parse(passes))
    assert {cascade.batch for cascade in program.cascades} == {3}
    results = run(tmp_path, program, FIXED, requests)
    for request in requests:
        torch.testing.assert_close(results[str(request.id)][1], expected(sampling, request), rtol=1e-4, atol=1e-5)


def test_encoders_run_where_the_plan_says_and_videos_are_written(tmp_path: Path) -> None:
    sampling = sampling_of(written(tmp_path, ENCODER + DECODER), FIXED)
    module = partitioned(sampling, REQUESTS, 2)
    works: dict[str, dict[str, object]] = {f"r{n}.text": {"ranks": (1,)} for n in range(3)}
    results = run(tmp_path, lowered(module, works), FIXED)
    for request in REQUESTS:
        torch.testing.assert_close(results[str(request.id)][1], expected(sampling, request), rtol=1e-4, atol=1e-5)
        assert (tmp_path / "out" / f"{request.id}.mp4").stat().st_size > 0


def test_latents_that_are_no_numbers_stop_their_request_alone(tmp_path: Path) -> None:
    sampling = sampling_of(written(tmp_path, NOT_A_NUMBER), FIXED)
    results = run(tmp_path, lowered(partitioned(sampling, REQUESTS, 2), PLANS["a rank for each model"]), FIXED)
    assert [outcome.failed is not None for outcome, _ in results.values()] == [id == "b" for id in results]
    assert results["b"][1] is None
    torch.testing.assert_close(results["a"][1], expected(sampling, REQUESTS[0]), rtol=1e-4, atol=1e-5)


def test_pixels_that_are_no_numbers_stop_their_request_alone(tmp_path: Path) -> None:
    sampling = sampling_of(written(tmp_path, BROKEN_DECODER), FIXED)
    results = run(tmp_path, lowered(partitioned(sampling, REQUESTS, 2), PLANS["a rank for each model"]), FIXED)
    told = {id: outcome.failed for id, (outcome, _) in results.items()}
    assert told == {"a": None, "b": "its pixels are no numbers, though its latents are", "c": None}
    assert not [*(tmp_path / "out").glob("b.*")]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("scheduler", ["FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_latents_keep_the_precision_of_their_noise_and_are_handed_on_in_it(tmp_path: Path, scheduler: str) -> None:
    """Predictions are fp32, whatever the latents are, and so is what a scheduler may keep of them."""
    options = "" if scheduler.startswith("Flow") else "prediction_type='flow_prediction', use_flow_sigmas=True"
    sampler = written(tmp_path, HALF.replace("SCHEDULER", scheduler).replace("OPTIONS", options))
    sampling = sampling_of(sampler, FIXED)
    results = run(tmp_path, lowered(partitioned(sampling, REQUESTS, 2), PLANS["a rank for each model"]), FIXED)
    for request in REQUESTS:
        latents = results[str(request.id)][1]
        assert latents is not None and latents.dtype is torch.bfloat16
        assert torch.equal(latents, expected(sampling, request))


def test_a_plan_has_room_for_the_longest_history_whichever_request_stands_first(tmp_path: Path) -> None:
    rows = (replace(REQUESTS[0], steps=1), replace(REQUESTS[0], id="longer"))
    sampling = sampling_of(written(tmp_path), parse_switch("fixed=1"))
    planned_for = [traced_pair(sampling, order).module(cluster(2)) for order in (rows, rows[::-1])]
    outputs = [module.stages[0].attrs["output"] for module in planned_for]
    assert outputs[0] == outputs[1]
