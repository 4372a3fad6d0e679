"""A run of requests on this machine: what is left to do, its plan, the ranks, the report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from arachnec.cluster.file import parse_cluster
from arachnec.data.requests import Request, read_requests
from arachnec.data.switch import ONE_MODEL, Switch, parse_switch
from arachnec.generation.plan import DEFAULT, ordered, planned, traced
from arachnec.generation.results import Outcome, Results
from arachnec.generation.settings import PLAN, REPORT, Settings, write_plan
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Module
from arachnec.ir.printer import print_module
from arachnec.launch.local_ranks import RankDied, launch
from arachnec.models.sampler_file import SamplerFile, load_sampler_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.sampling.loop import Sampling

SWITCH = "boundary=0.9"  # of two models where neither the file nor the person says
OUTCOMES = "outcomes"
WORKER = "arachnec.generation.worker"


@dataclass(frozen=True)
class NotFinite(Diagnostic):
    title: ClassVar[str] = "request `{request}` has no result: {reason}"
    help: ClassVar[str] = (
        "all other requests are finished; check its guidance, and the weights and their precision, and run again"
    )
    request: str
    reason: str


@dataclass(frozen=True)
class Generation:
    """What is to be generated and how. ``requests`` are those that have no files yet, ``finished`` the others."""

    sampler: SamplerFile
    settings: Settings
    requests: tuple[Request, ...]
    finished: tuple[Request, ...]
    module: Module | None  # None where nothing is left
    out: Path
    planning_ms: float
    tracing_ms: float

    @property
    def results(self) -> Results:
        return Results(self.out, self.settings, self.sampler.digest)


def prepare(
    sampler: Path,
    data: Path,
    cluster: str,
    out: Path,
    *,
    switch: str | None = None,
    first: str | None = None,
    history: Literal["carry", "restart"] = "carry",
    passes: str | Pipeline = DEFAULT,
) -> Generation:
    """Read everything, plan what is not there yet, and prove the plan. Raises ``UserError`` for any mistake."""
    asked = None if switch is None else parse_switch(switch)
    requests = read_requests(data)
    machine = parse_cluster(cluster)
    pipeline = passes if isinstance(passes, Pipeline) else Pipeline.parse(passes)
    file = load_sampler_file(sampler)
    names = ordered(file, first)
    rule = switch_of(file, names, asked)
    settings = Settings(str(Path(sampler).absolute()), names, str(rule), history, machine.attrs.get("device") == "cpu")
    left = Results(out, settings, file.digest).unfinished(requests)
    finished = tuple(request for request in requests if request not in left)
    if not left:
        return Generation(file, settings, left, finished, None, out, 0.0, 0.0)
    started = time.perf_counter()
    module = traced(Sampling(file, names, rule, settings.restart), left).module(machine)
    begun = time.perf_counter()
    program = planned(module, pipeline)
    tracing_ms, planning_ms = (begun - started) * 1e3, (time.perf_counter() - begun) * 1e3
    return Generation(file, settings, left, finished, program, out, planning_ms, tracing_ms)


def switch_of(file: SamplerFile, names: tuple[str, ...], asked: Switch | None) -> Switch:
    """The switch that is asked for, else the file's, else a boundary; a lone model takes all steps."""
    if len(names) == 1:
        return ONE_MODEL
    return asked or parse_switch(file.switch() if file.switch is not None else SWITCH)


def run_here(generation: Generation) -> dict[str, Any]:
    """Start the ranks; returns the report, which is written too.

    Raises ``UserError`` where a rank died, or where a request has no result; what is finished stays.
    """
    started = time.monotonic()
    shutil.rmtree(generation.out / PLAN / OUTCOMES, ignore_errors=True)
    world = 0
    if generation.module is not None:
        write_plan(generation.out, print_module(generation.module), generation.requests, generation.settings)
        (generation.out / PLAN / OUTCOMES).mkdir()
        world = len(generation.module.programs)
    try:
        if world:
            launch(world, [str(generation.out.absolute())], lambda line: None, worker=WORKER)
    except UserError as error:
        raise UserError(*map(resumable, error.diagnostics)) from None
    finally:  # a rank that died has taken the others along, but nothing that was finished
        report = report_of(generation, world, time.monotonic() - started)
        (generation.out / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    failed = [row for row in report["requests"] if row["failed"]]
    if failed:
        raise UserError(*(NotFinite(None, row["id"], row["failed"]) for row in failed))
    return report


def resumable(diagnostic: Diagnostic) -> Diagnostic:
    """A rank that died takes nothing along that was finished, and its message says so."""
    if not isinstance(diagnostic, RankDied):
        return diagnostic
    return replace(diagnostic, remedy=f"the same command does the requests that are not finished; {diagnostic.remedy}")


def report_of(generation: Generation, world: int, seconds: float) -> dict[str, Any]:
    """What became of every request, those of earlier runs included."""
    results, folder = generation.results, generation.out / PLAN / OUTCOMES
    rows = []
    for request in (*generation.finished, *generation.requests):
        told = folder / f"{request.id}.json"
        outcome = results.outcome(request)
        if outcome is None and told.is_file():
            outcome = msgspec.json.decode(told.read_bytes(), type=Outcome)
        if outcome is None:
            continue
        files: Mapping[str, Path] = {"latents": results.latents(request), "video": results.video(request)}
        shown = {name: str(path) for name, path in files.items() if path.is_file() and outcome.failed is None}
        rows.append({**msgspec.to_builtins(outcome), **shown, "earlier": request in generation.finished})
    settings = generation.settings
    return {
        "models": list(settings.models),
        "switch": settings.switch,
        "history": settings.history,
        "ranks": world,
        "seconds": seconds,
        "planning_ms": generation.planning_ms,
        "requests": rows,
    }
