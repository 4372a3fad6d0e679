"""A sampler file and requests to an executable. In: what a person names. Out: a program, proved, and its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL, Switch, parse_switch
from arachnec.executable.folder import REPORT
from arachnec.executable.sampling_folder import Settings, write_sampling_executable
from arachnec.generation.plan import ordered, planned, traced
from arachnec.generation.switches_seen import Seen
from arachnec.ir.diagnostic import user_error
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cluster, Module
from arachnec.models.sampler_file import SamplerFile, load_sampler_file
from arachnec.passes.infra.instruments import Instrument, ReportProgress
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.sparsify import Sparsify
from arachnec.sampling.loop import Sampling
from arachnec.views.executable_page import PAGE, executable_page

SWITCH = "boundary=0.9"  # of two models where neither the file nor the person says


@dataclass(frozen=True)
class CompiledRequests:
    """Requests, by their numbers in the IR, and the checked program of all of them."""

    sampler: SamplerFile
    settings: Settings
    requests: tuple[Request, ...]
    traced: Module
    module: Module
    pipeline: Pipeline
    planning_ms: float
    tracing_ms: float

    def write(self, folder: Path, report: Mapping[str, Any] | None = None, load: Sequence[Path] = ()) -> Path:
        """Write the executable folder that ``arachnec run`` takes, with the plan as a page to be looked at.

        ``report`` is what ``--json`` prints of it."""
        clips = [request.clip() for request in self.requests]
        page = executable_page(self.module, pipeline=str(self.pipeline), clips=clips)
        return write_sampling_executable(
            folder,
            program=self.module,
            traced=self.traced,
            pipeline=str(self.pipeline),
            sampler=self.sampler,
            requests=self.requests,
            settings=self.settings,
            load=load,
            extra={PAGE: page} | ({} if report is None else {REPORT: json.dumps(report, indent=2) + "\n"}),
        )


def asked(
    sampler: Path,
    switch: str | None,
    first: str | None,
    history: Literal["carry", "restart"],
    pipeline: Pipeline | None = None,
) -> tuple[Sampling, Settings]:
    """How requests are to be sampled: by the first model alone where the pipeline leaves the second one out.

    Raises ``UserError`` for a rule, a name or a file that is none.
    """
    rule = None if switch is None else parse_switch(switch)
    file = load_sampler_file(sampler)
    option = f"--switch {switch}" if switch is not None else "--history restart" if history == "restart" else None
    if option is not None and len(file.names()) == 1:
        raise user_error(
            f"`{option}` says when a second model takes over, and the sampler file has `{file.names()[0]}` alone",
            label="one model",
            help="leave the option out, or name a second model in `models`",
            span=file.span("models"),
        )
    alone = pipeline is not None and any(getattr(step, "models", 2) == 1 for step in pipeline.passes)
    names = ordered(file, first)[: 1 if alone else None]
    rule = switch_of(file, names, rule)
    sparse = [str(step) for step in pipeline.passes if isinstance(step, Sparsify)] if pipeline else []
    settings = Settings(str(Path(sampler).absolute()), names, str(rule), history, " ".join(sparse))
    return Sampling(file, names, rule, settings.restart), settings


def switch_of(file: SamplerFile, names: tuple[str, ...], asked: Switch | None) -> Switch:
    """The switch that is asked for, else the file's, else a boundary; a lone model takes all steps."""
    if len(names) == 1:
        return ONE_MODEL
    return asked or parse_switch(file.switch() if file.switch is not None else SWITCH)


def compile_requests(
    sampling: Sampling,
    settings: Settings,
    requests: Sequence[Request],
    machine: Cluster,
    pipeline: Pipeline,
    instruments: Sequence[Instrument] = (),
    seen: Sequence[Seen] = (),
    reporter: Reporter = unreported,
) -> CompiledRequests:
    """Trace the models, plan the requests, and prove the plan. ``seen`` are switches so far, to forecast by.

    Raises ``UserError`` for any mistake.
    """
    started = time.perf_counter()
    module = traced(sampling, requests, seen, reporter).module(machine)
    begun = time.perf_counter()
    program = planned(module, pipeline, (*instruments, ReportProgress(reporter)))
    tracing_ms, planning_ms = (begun - started) * 1e3, (time.perf_counter() - begun) * 1e3
    return CompiledRequests(
        sampling.sampler, settings, tuple(requests), module, program, pipeline, planning_ms, tracing_ms
    )
