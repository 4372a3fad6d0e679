"""A run of requests on this machine: what is left to do, its program, the ranks, the report."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import cluster_for
from arachnec.data.requests import Request, read_requests
from arachnec.data.switch import parse_switch
from arachnec.executable.folder import MEASURED, MEASURED_PROGRAM, PROGRAM
from arachnec.executable.program_input import demand_own_requests
from arachnec.executable.sampling_folder import SAMPLER, SamplingExecutable, read_sampling_executable, sampler_digest
from arachnec.generation.plan import DEFAULT, CompiledRequests, asked, compile_requests, planned
from arachnec.generation.results import EXECUTED, Outcome, Results, Seen, read_seen, record_seen
from arachnec.ir.diagnostic import Diagnostic, Mistake, UserError
from arachnec.ir.nodes import Cluster, Module, Stage
from arachnec.ir.printer import print_module
from arachnec.launch.local_ranks import RankDied, launch
from arachnec.passes.check import checked
from arachnec.passes.infra.base import installed, load_file
from arachnec.passes.infra.instruments import Instrument
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.runtime.step_progress import Interval

PLAN, OUTCOMES, REPORT = "plan", "outcomes", "report.json"
WORKER = "arachnec.generation.worker"


@dataclass(frozen=True)
class Generation:
    """What is to be generated and where. ``requests`` are those that have no files yet, ``finished`` the others.

    ``folder`` is the executable; ``compiled`` is what is to be written there first, if anything. ``program`` is of the
    requests, None where nothing is left. ``sampler`` is the file that ranks import.
    """

    folder: Path
    sampler: Path
    results: Results
    requests: tuple[Request, ...]
    finished: tuple[Request, ...]
    program: Module | None
    planning_ms: float = 0.0
    compiled: CompiledRequests | None = None


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
    instruments: Sequence[Instrument] = (),
) -> Generation:
    """Read everything, plan what is not there yet, and prove the plan. Raises ``UserError`` for any mistake."""
    requests, machine = read_requests(data), parse_cluster(cluster)
    pipeline = passes if isinstance(passes, Pipeline) else Pipeline.parse(passes)
    sampling, settings = asked(sampler, switch, first, history, pipeline)
    results = Results.of(out, settings, sampling.sampler, sampler_digest(sampling.sampler))
    left = results.unfinished(requests)
    finished = tuple(request for request in requests if request not in left)
    generation = Generation(out / PLAN, sampling.sampler.path, results, left, finished, None)
    if not left:
        return generation
    compiled = compile_requests(sampling, settings, left, machine, pipeline, instruments, read_seen(out))
    return replace(generation, program=compiled.module, planning_ms=compiled.planning_ms, compiled=compiled)


def prepare_executable(folder: Path, out: Path, ranks: int | None = None) -> Generation:
    """What an executable has left to do: its own program for all requests on its own ranks, else one planned anew.

    Raises ``UserError`` for a folder that is no executable, a program of something else, or one that ``check`` refuses.
    """
    executable = read_sampling_executable(folder)
    program, traced = checked(executable.program), executable.traced
    demand_own_requests(executable, program, planned_stages(executable))
    results = Results.of(out, executable.header.settings, executable.sampler_file(), executable.header.digest)
    left = results.unfinished(executable.requests)
    finished = tuple(request for request in executable.requests if request not in left)
    assert traced.cluster is not None
    machine = cluster_for(traced.cluster, ranks or traced.cluster.world)
    generation = Generation(folder, folder / SAMPLER, results, left, finished, program)
    if not left:
        return replace(generation, program=None)
    if not finished and machine == traced.cluster:
        return generation
    started = time.perf_counter()
    program = planned_again(executable, left, machine)
    return replace(generation, program=program, planning_ms=(time.perf_counter() - started) * 1e3)


def planned_again(executable: SamplingExecutable, requests: Sequence[Request], machine: Cluster) -> Module:
    """A program of some of an executable's requests on this cluster, by its own pipeline."""
    names = {request.id for request in requests}
    clips = tuple(clip for clip in executable.traced.clips if executable.requests[clip.id].id in names)
    with contextlib.chdir(executable.folder):  # where the pipeline finds its profile
        return planned(replace(executable.traced, clips=clips, cluster=machine), _pipeline(executable))


def planned_stages(executable: SamplingExecutable) -> tuple[Stage, ...]:
    """The stages of an executable as its pipeline plans with them."""
    with contextlib.chdir(executable.folder):
        return _pipeline(executable).run_model_part(executable.traced).stages


def _pipeline(executable: SamplingExecutable) -> Pipeline:
    files = [executable.folder / name for name in executable.header.load]
    registry = functools.reduce(lambda registry, path: load_file(path, registry), files, installed())
    return Pipeline.parse(executable.header.pipeline, registry)


def run_here(generation: Generation, stall_timeout: float | None = None) -> dict[str, Any]:
    """Start the ranks; returns the report, which is written too. ``stall_timeout``: see ``arachnec generate --help``.

    Raises ``UserError`` where a rank died, or where a request has no result; what is finished stays.
    """
    started, out, world = time.monotonic(), generation.results.folder, 0
    shutil.rmtree(out / OUTCOMES, ignore_errors=True)
    if generation.compiled is not None:
        generation.compiled.write(generation.folder)
    try:
        if generation.program is not None:
            (out / OUTCOMES).mkdir(parents=True)
            own = out / OUTCOMES / PROGRAM
            own.write_text(print_module(generation.program), encoding="utf-8")
            world = len(generation.program.programs)
            paths = generation.folder, generation.sampler, own, out
            limits = () if stall_timeout is None else ("--stall-timeout", str(stall_timeout))
            words = [*(str(path.absolute()) for path in paths), generation.results.digest, *limits]
            launch(world, words, lambda line: None, worker=WORKER, stopped_s=stall_timeout)
            _keep_measured(generation, world)
    except UserError as error:
        raise UserError(*map(resumable, error.diagnostics)) from None
    finally:  # a rank that died has taken the others along, but nothing that was finished
        report = report_of(generation, world, time.monotonic() - started)
        out.mkdir(parents=True, exist_ok=True)
        record_seen(out, _seen(generation, report))
        (out / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    failed = [row for row in report["requests"] if row["failed"]]
    if failed:
        remedy = (
            "all other requests are finished; check its guidance, and the weights and their precision, and run again"
        )
        told = (f"request `{row['id']}` has no result: {row['failed']}" for row in failed)
        raise UserError(*(Mistake(None, title, help=remedy) for title in told))
    return report


def _seen(generation: Generation, report: Mapping[str, Any]) -> list[Seen]:
    """Where the requests of this run have switched, if a rule that looks at them has decided it."""
    settings = generation.results.settings
    if not parse_switch(settings.switch).adaptive:
        return []
    ended = [row for row in report["requests"] if not row["earlier"] and not row["failed"]]
    switched = [row for row in ended if row["switched"] is not None]
    return [Seen(settings.models, settings.switch, row["steps"], row["switched"]) for row in switched]


def _keep_measured(generation: Generation, world: int) -> None:
    """What every rank measured, as ``arachnec show`` reads it beside the plan."""
    assert generation.program is not None
    folder = generation.results.folder / OUTCOMES
    intervals = [
        interval
        for rank in range(world)
        for interval in msgspec.json.decode((folder / f"rank{rank}.measured").read_bytes(), type=list[Interval])
    ]
    told = msgspec.json.encode({"step": None, "intervals": intervals})
    (generation.folder / MEASURED).write_bytes(told)
    executed = folder / EXECUTED  # planned again in rounds
    text = executed.read_text(encoding="utf-8") if executed.is_file() else print_module(generation.program)
    (generation.folder / MEASURED_PROGRAM).write_text(text, encoding="utf-8")


def resumable(diagnostic: Diagnostic) -> Diagnostic:
    """A rank that died takes nothing along that was finished, and its message says so."""
    if not isinstance(diagnostic, RankDied):
        return diagnostic
    return replace(diagnostic, remedy=f"the same command does the requests that are not finished; {diagnostic.remedy}")


def report_of(generation: Generation, world: int, seconds: float) -> dict[str, Any]:
    """What became of every request, those of earlier runs included."""
    results = generation.results
    rows = []
    for request in (*generation.finished, *generation.requests):
        told = results.folder / OUTCOMES / f"{request.id}.json"
        outcome = results.outcome(request)
        if outcome is None and told.is_file():
            outcome = msgspec.json.decode(told.read_bytes(), type=Outcome)
        if outcome is None:
            continue
        files: Mapping[str, Path] = {"latents": results.latents(request), "video": results.video(request)}
        shown = {name: str(path) for name, path in files.items() if path.is_file() and outcome.failed is None}
        rows.append({**msgspec.to_builtins(outcome), **shown, "earlier": request in generation.finished})
    settings = results.settings
    return {
        "models": list(settings.models),
        "switch": settings.switch if len(settings.models) > 1 else None,
        "history": settings.history,
        "ranks": world,
        "seconds": seconds,
        "planning_ms": generation.planning_ms,
        "requests": rows,
    }
