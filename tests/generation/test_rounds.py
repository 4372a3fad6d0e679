"""Requests that are planned again while they run get the latents that each would get alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from arachnec.data.switch import Switch, parse_switch
from arachnec.executable.sampling_folder import Settings
from arachnec.generation.rank import GenerationRank
from arachnec.generation.results import LATENTS, Outcome, Results
from arachnec.generation.round_planning import Question, plan_again
from arachnec.generation.rounds import RoundPlanner, Rounds, open_windows, prefixed, round_seconds
from arachnec.ir.nodes import Level
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import cluster
from tests.distributed.harness import run_ranks
from tests.distributed.rank_device import rank_device
from tests.generation import cases
from tests.generation.cases import ENCODER, REQUESTS, expected, partitioned, sampling_of, traced_pair, written
from tests.generation.sparse_cases import FORCED, checkpoint, predictors

pytest.importorskip("diffusers")

OUTCOMES = {12: 1, 10: 10, 11: 5}  # K of the request of so many steps
ROWS = tuple(replace(request, steps=steps) for request, steps in zip(REQUESTS, OUTCOMES, strict=True))


@dataclass(frozen=True)
class ForcedBySteps(Switch):
    """An adaptive rule whose outcome follows from a request's steps."""

    def switches(self, distances: object, step: int, steps: int) -> bool:
        return step >= OUTCOMES[steps]


RULE = ForcedBySteps("adaptive", 0.1, least=1, most=12)


def _run(folder: Path, text: str) -> tuple[list[Outcome], int, str]:
    sampler, module = load_sampler_file(folder / "sampler.py"), parse_module(text)
    settings = Settings(str(folder / "sampler.py"), ("large", "small"), str(RULE))
    outcomes: list[Outcome] = []
    results = Results(folder / "out", settings, sampler.digest)
    own = sampling_of(sampler, RULE)
    rank = GenerationRank(dist.get_rank(), own, module, ROWS, results, rank_device(), outcomes.append)
    store = dist.distributed_c10d._get_default_store()
    rank.rounds = Rounds(rank.rank, prefixed(store, str(folder)))
    programs = [module]

    def plan(round: int, windows: Mapping[int, tuple[int, int]]) -> tuple[str, float | None]:
        programs.append(plan_again(programs[-1], Question(round, dict(windows))))
        return print_module(programs[-1]), round_seconds(programs[-1], round)

    planner = RoundPlanner(prefixed(store, str(folder)), plan, open_windows(module), 0.0, patience_s=60.0)
    if rank.rank == 0:
        planner.start()
    rank.connect()
    rank.run()
    if rank.rank == 0:
        planner.close()
    dist.barrier()
    rank.groups.close()
    rank.connections.close()
    return outcomes, rank.rounds.taken, print_module(rank.module)


def test_latents_do_not_depend_on_what_is_planned_again(tmp_path: Path) -> None:
    """Two ranks, three requests whose switches come early, late and between, the rest planned again at every border."""
    sampling = sampling_of(written(tmp_path, ENCODER), RULE)
    passes = "schedule-sampling{policy=replica},place,rounds{most=5,least=1us},lower,check"
    program = Pipeline.parse(passes).run(replace(partitioned(sampling, ROWS, 2), level=Level.COSTED))
    (tmp_path / "out").mkdir()
    told = run_ranks(2, _run, tmp_path, print_module(program))
    assert all(taken >= 1 for _, taken, _ in told)
    assert len({text for *_, text in told}) == 1
    checked(parse_module(told[0][2]))
    ended = {outcome.id: outcome for outcomes, *_ in told for outcome in outcomes}
    for request in ROWS:
        assert ended[str(request.id)].switched == OUTCOMES[request.steps]
        fixed = sampling_of(sampling.sampler, parse_switch(f"fixed={OUTCOMES[request.steps]}"))
        latents = load_file(tmp_path / "out" / f"{request.id}.safetensors")[LATENTS]
        torch.testing.assert_close(latents, expected(fixed, request), rtol=1e-4, atol=1e-5)


def test_what_is_planned_again_attends_to_the_same_keys(tmp_path: Path) -> None:
    """The rest has other segments, on other ranks; layers stay sparse in it."""
    more = predictors(large=checkpoint(tmp_path / "run"), small=tmp_path / "run")
    sampling = sampling_of(written(tmp_path, more), RULE)
    sparse = f"sparsify{{{FORCED}}},segment{{length=2}},annotate,schedule-sampling"
    passes = f"{sparse}{{policy=one-degree}},place,rounds{{most=5,least=1us}},lower,check"
    program = Pipeline.parse(passes).run(traced_pair(sampling, ROWS).module(cluster(2)))
    (tmp_path / "out").mkdir()
    told = run_ranks(2, _run, tmp_path, print_module(program))
    assert all(taken >= 1 for _, taken, _ in told)
    last = checked(parse_module(told[0][2]))
    assert all(cascade.attrs.get("sparse") == (0, 1) for cascade in last.cascades)
    rounds = {id: load_file(tmp_path / "out" / f"{id}.safetensors")[LATENTS] for id in "abc"}
    for request in ROWS:
        rule = parse_switch(f"fixed={OUTCOMES[request.steps]}")
        one = traced_pair(sampling_of(sampling.sampler, rule), (request,)).module(cluster(1))
        (tmp_path / "out" / f"{request.id}.safetensors").unlink()
        alone = Pipeline.parse(f"{sparse}{{steps=20}},place,lower,check").run(one)
        ((_, latents),) = cases.run(tmp_path, alone, rule, (request,)).values()
        torch.testing.assert_close(rounds[str(request.id)], latents, rtol=1e-4, atol=1e-5)


class StoreOfOneProcess(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_does_not_wait_for_a_plan_that_takes_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on with the program at hand, and nothing is planned again behind that."""
    store, ended, asked = StoreOfOneProcess(), threading.Event(), []

    def plan(round: int, windows: dict[int, tuple[int, int]]) -> tuple[str, float | None]:
        asked.append(round)
        ended.wait(60.0)
        return "a program", 1.0

    planner, rank = RoundPlanner(store, plan, {}, 0.0, patience_s=0.05), Rounds(0, store)
    planner.start()
    rank.enter(0)
    assert rank.next_program(1) is None
    planner.close(ended.set)
    assert asked == [1] and rank.waited_s < 30.0
    assert "round 1 stays as planned: planning takes longer than it" in capsys.readouterr().err
