"""Requests to a program. In: a sampler file, requests, a cluster, a pipeline. Out: a module, proved, and its folder."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL, parse_switch
from arachnec.executable.folder import REPORT
from arachnec.executable.sampling_folder import Settings, write_sampling_executable
from arachnec.generation.encoded import Encoders
from arachnec.generation.rank_models import model_kind, with_predictors
from arachnec.generation.results import Seen
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cluster, Graph, Level, Module, Stage
from arachnec.ir.values import Symbol, Value
from arachnec.models.batch import prediction_of
from arachnec.models.sampler_file import DECODER, FromLatents, SamplerFile, latents_of, load_sampler_file
from arachnec.passes.infra.instruments import Instrument, ReportProgress
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.sparsify import Sparsify
from arachnec.passes.trace import TRAINED, Trace, trace_model
from arachnec.planning.sampling.requests import SwitchForecast, inference_stage, sampling_module
from arachnec.sampling.loop import Sampling, begin, other_latents_error, sizes_of
from arachnec.tracing.cost import encoder_stage
from arachnec.tracing.errors import needs_values
from arachnec.tracing.find import find_blocks
from arachnec.tracing.record import Repeats
from arachnec.tracing.sample import meta_encoders
from arachnec.tracing.sample_reads import padded_text
from arachnec.views.executable_page import PAGE, executable_page

DEFAULT = "generate"  # a named pipeline
LATENT_BYTES = 4  # of a number of the latents, which are kept in fp32


@dataclass(frozen=True)
class Traced:
    """Every model of the requests, traced, and how they are sampled."""

    sampling: Sampling
    traces: Mapping[str, Trace]
    requests: tuple[Request, ...]
    decoder: Stage | None = None
    seen: tuple[Seen, ...] = ()  # switches so far, for the forecast
    text: int | None = None  # tokens that the sampler file pads captions to

    def module(self, cluster: Cluster) -> Module:
        """The requests as a module at level ``traced``."""
        first = self.traces[self.sampling.names[0]]
        stages: list[Stage] = [stage for stage in first.stages if not stage.trained]
        graphs: dict[str, Graph] = {}
        for name, trace in self.traces.items():
            (dit,) = [stage for stage in trace.stages if stage.name == TRAINED]
            dit, own = _apart(dit, trace.graphs, graphs, name)
            graphs |= own
            dit = inference_stage(replace(dit, name=name), self._latent_bytes(trace), kept=self._kept())
            trained = self.sampling.sampler.trained_predictors(name)
            stages.append(dit if trained is None else with_predictors(dit, tuple(own.values()), trained))
        if self.decoder is not None:
            stages.append(self.decoder)
        sampler, names = self.sampling.sampler, self.sampling.names
        forwards = [
            replace(r, steps=len(self.sampling.schedule(r)), text_tokens=self.text or r.text_tokens)
            for r in self.requests
        ]
        module = sampling_module(
            forwards,
            lambda request: first.tokens(request.clip()),
            stages,
            names,
            cluster,
            switch=str(self.sampling.switch) if len(self.sampling.names) == 2 else None,
            forecasts=[forecast(self.sampling, request, self.seen) for request in self.requests]
            if len(self.sampling.names) == 2
            else (),
            decoder=None if self.decoder is None else self.decoder.name,
            branches=sampler.branches,
        )
        whole = all(trace.graphs for trace in self.traces.values())  # a model that runs otherwise has none
        return replace(module, graphs=tuple(graphs.values()) if whole else ())

    def _kept(self) -> int:
        """The most tensors of the latents' size that a request hands on beside them: last prediction, history."""
        latents = begin(self.sampling, self.requests[0]).latents.float()
        longest = max(self.sampling.longest_history(request, latents) for request in self.requests)
        return 1 + longest // LATENT_BYTES

    def _latent_bytes(self, trace: Trace) -> float:
        """Of one token."""
        request = self.requests[0]
        latents = begin(self.sampling, request).latents
        return latents.numel() * LATENT_BYTES / trace.tokens(request.clip())


def ordered(sampler: SamplerFile, first: str | None) -> tuple[str, ...]:
    """The models in the order in which a request meets them. Raises ``UserError`` for a name that is none."""
    names = sampler.names()
    if first is None:
        return names
    if first not in names:
        raise user_error(f"the sampler file has no model `{first}`", help=f"its models are {', '.join(names)}")
    return (first, *(name for name in names if name != first))


def traced(
    sampling: Sampling, requests: Sequence[Request], seen: Sequence[Seen] = (), reporter: Reporter = unreported
) -> Traced:
    """Trace the models, and hold what they predict against the latents. Raises ``UserError`` for what cannot run."""
    clips = [request.clip() for request in requests]
    demand_steps(sampling, requests)
    demand_latents(sampling, requests)
    alone = len(sampling.names) == 1
    kinds = {name: name if alone else model_kind(sampling.sampler, name, clips) for name in sampling.names}
    first = {kind: name for name, kind in reversed(kinds.items())}
    of_kinds = {
        kind: trace_model(sampling.sampler.model_file(name), clips, gradients=False, reporter=reporter)
        for kind, name in first.items()
    }
    traces = {name: of_kinds[kind] for name, kind in kinds.items()}
    decoder = decoder_stage(sampling, clips, traces[sampling.names[0]].tokens)
    return Traced(sampling, traces, tuple(requests), decoder, tuple(seen), text_of_all(sampling, clips))


def text_of_all(sampling: Sampling, clips: Sequence[VideoClip]) -> int | None:
    """The text tokens of every forward, whatever the caption; None where these are the caption's own."""
    lengths = {padded_text(sampling.sampler.model_file(name), clips) for name in sampling.names}
    return lengths.pop() if len(lengths) == 1 else None


def decoder_stage(sampling: Sampling, clips: Sequence[VideoClip], tokens: Callable[[VideoClip], int]) -> Stage | None:
    """The sampler file's decoder, measured on the meta device; None without one."""
    sampler = sampling.sampler
    if sampler.decoder is None:
        return None
    with torch.device("meta"):
        decoder = sampler.decoder()
    taken = {*sampling.names, *(meta_encoders(sampling.sampler.model_file(sampling.names[0])))}
    name = next(name for name in (DECODER, "video_decoder", "to_pixels") if name not in taken)
    return encoder_stage(name, FromLatents(sampler, decoder, latents_of(sampler, clips)), clips, tokens)


def forecast(sampling: Sampling, request: Request, seen: Sequence[Seen] = ()) -> SwitchForecast:
    """Where the first model may end. An adaptive switch is planned for where most requests so far have switched: at the
    median of K, as a share of their steps; before any has, in the middle of its window."""
    steps = len(sampling.schedule(request))
    least, most = sampling.bounds(sampling.schedule(request))
    shares = [row.switched / row.steps for row in seen if row.of(sampling)]
    middle = round(statistics.median(shares) * steps) if shares else (least + most) // 2
    return SwitchForecast(least, most, min(max(middle, least), most))


def demand_steps(sampling: Sampling, requests: Sequence[Request]) -> None:
    """Raises ``UserError`` where the scheduler does not take a request's steps, or it ends before it is to switch."""
    for request in {request.steps: request for request in requests}.values():
        sampling.longest_history(request, begin(sampling, request).latents)
    rule = sampling.switch
    least = {"fixed": int(rule.value), "adaptive": rule.least}.get(rule.kind, 0)
    if len(sampling.names) == 1:
        return
    for request in requests:
        steps = len(sampling.schedule(request))
        if steps < least:
            raise user_error(
                f"request `{request.id}` has {counted(steps, 'step')}, and `{rule}` switches after {least} at the "
                "earliest",
                help=f"give it at least {least} steps, or switch earlier: after all of a request's steps is the latest",
            )


def demand_latents(sampling: Sampling, requests: Sequence[Request]) -> None:
    """Raises ``UserError`` where a model's prediction has not the latents' shape, or a branch is missing.

    Every model is built once, on the meta device, and runs each kind of its blocks once for each shape.
    """
    sampler, encoded = sampling.sampler, Encoders(sampling.sampler, sampling.names, torch.device("cpu"))
    for name in sampling.names:
        with torch.device("meta"):
            model = sampler.build(name)
        repeats = Repeats(model, find_blocks(model))
        kinds = {(request.shape, sampler.branches(name, request)): request for request in reversed(requests)}
        for request in reversed(kinds.values()):
            try:
                whole = encoded.with_noise(request)
            except Exception:
                return  # tracing says what is wrong with an encoder, and where
            _demand_latents_of(sampling, name, model, repeats, whole)


def _demand_latents_of(
    sampling: Sampling, name: str, model: torch.nn.Module, repeats: Repeats, request: Request
) -> None:
    loop, sampler = begin(sampling, request), sampling.sampler
    guided = sampler.branches(name, request) > 1
    for conditional in (True, False) if guided else (True,):
        given = sampler.call(name, loop.latents, loop.schedule.timesteps[0], request, conditional)
        moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        try:
            with torch.no_grad(), torch.device("meta"), repeats:
                shape = prediction_of(model(**moved)).shape
        except UserError:
            raise
        except Exception as error:
            if needs_values(error):
                continue
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise other_latents_error(sampling, name, reason, loop.latents, request) from error
        if shape != loop.latents.shape:
            raise other_latents_error(sampling, name, sizes_of(shape), loop.latents, request)


def _apart(
    stage: Stage, graphs: Sequence[Graph], known: Mapping[str, Graph], model: str
) -> tuple[Stage, dict[str, Graph]]:
    """A model's stage and graphs, by names that no other graph of the models ``known`` has."""
    taken = {graph.name for graph in graphs if known.get(graph.name, graph) != graph}
    names = {graph.name: f"{graph.name}_{model}" if graph.name in taken else graph.name for graph in graphs}
    rows = stage.attrs.get("blocks", ())
    assert isinstance(rows, tuple)
    blocks: list[Value] = []
    for row in rows:
        assert isinstance(row, tuple) and isinstance(row[0], Symbol)
        blocks.append((Symbol(names.get(row[0].name, row[0].name)), *row[1:]))
    stage = replace(stage, attrs=stage.attrs.updated(blocks=tuple(blocks) or None))
    return stage, {names[graph.name]: replace(graph, name=names[graph.name]) for graph in graphs}


def planned(module: Module, pipeline: Pipeline, instruments: Sequence[Instrument] = ()) -> Module:
    """The lowered program, with the models' graphs where they have fused regions. Raises ``UserError`` where no plan
    is."""
    pipeline.demand(Level.TRACED, Level.LOWERED)
    program = pipeline.run(module, instruments)
    return program if any(graph.fused for graph in program.graphs) else replace(program, graphs=())


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
    if len(names) == 1:
        rule = ONE_MODEL  # which takes all steps
    elif rule is None:
        rule = parse_switch(file.switch() if file.switch is not None else SWITCH)
    sparse = [str(step) for step in pipeline.passes if isinstance(step, Sparsify)] if pipeline else []
    settings = Settings(str(Path(sampler).absolute()), names, str(rule), history, " ".join(sparse))
    return Sampling(file, names, rule, settings.restart), settings


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
