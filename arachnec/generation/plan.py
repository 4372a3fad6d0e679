"""Requests to a program. In: a sampler file, requests, a cluster and a pipeline. Out: a lowered module, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from arachnec.data.requests import Request
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Cluster, Level, Module, Stage
from arachnec.models.batch import prediction_of
from arachnec.models.sampler_file import SamplerFile
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.trace import TRAINED, Trace, trace_model
from arachnec.planning.sampling.requests import SwitchForecast, inference_stage, sampling_module
from arachnec.sampling.loop import Sampling, begin
from arachnec.tracing.needs_values import needs_values

DEFAULT = "generate"  # a named pipeline
LATENT_BYTES = 4  # of a number of the latents, which are kept in fp32


@dataclass(frozen=True)
class UnknownModel(Diagnostic):
    title: ClassVar[str] = "the sampler file has no model `{name}`"
    help: ClassVar[str] = "its models are {names}"
    name: str
    names: str


@dataclass(frozen=True)
class OtherLatents(Diagnostic):
    title: ClassVar[str] = "the model `{name}` predicts {found} from latents {latents}"
    label: ClassVar[str] = "for request `{request}`"
    help: ClassVar[str] = (
        "both models need the latent channels, strides and patches that `start` makes: take models of one latent space"
    )
    name: str
    found: str
    latents: str
    request: str | int


@dataclass(frozen=True)
class Traced:
    """Every model of the requests, traced, and how they are sampled."""

    sampling: Sampling
    traces: Mapping[str, Trace]
    requests: tuple[Request, ...]

    def module(self, cluster: Cluster) -> Module:
        """The requests as a module at level ``traced``."""
        first = self.traces[self.sampling.names[0]]
        stages: list[Stage] = [stage for stage in first.stages if not stage.trained]
        for name, trace in self.traces.items():
            (dit,) = [stage for stage in trace.stages if stage.name == TRAINED]
            stages.append(inference_stage(replace(dit, name=name), self._latent_bytes(trace), kept=self._kept()))
        sampler, names = self.sampling.sampler, self.sampling.names
        forwards = [replace(r, steps=len(self.sampling.schedule(r))) for r in self.requests]
        return sampling_module(
            forwards,
            lambda request: first.tokens(request.clip()),
            stages,
            names,
            cluster,
            switch=str(self.sampling.switch) if len(self.sampling.names) == 2 else None,
            forecasts=[forecast(self.sampling, request) for request in self.requests]
            if len(self.sampling.names) == 2
            else (),
            branches=sampler.branches,
        )

    def _kept(self) -> int:
        """Tensors of the latents' size that a request hands on beside them: the last prediction, the history."""
        return 1 + self.sampling.schedule(self.requests[0]).longest_history() // LATENT_BYTES

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
        raise UserError(UnknownModel(None, first, ", ".join(names)))
    return (first, *(name for name in names if name != first))


def traced(sampling: Sampling, requests: Sequence[Request]) -> Traced:
    """Trace the models, and hold what they predict against the latents. Raises ``UserError`` for what cannot run."""
    clips = [request.clip() for request in requests]
    for request in {request.shape: request for request in requests}.values():
        demand_latents(sampling, request)
    traces = {name: trace_model(sampling.sampler.model_file(name), clips) for name in sampling.names}
    return Traced(sampling, traces, tuple(requests))


def forecast(sampling: Sampling, request: Request) -> SwitchForecast:
    """Where the first model may end; an adaptive switch is planned for in the middle of its window."""
    least, most = sampling.bounds(sampling.schedule(request))
    return SwitchForecast(least, most, (least + most) // 2)


def demand_latents(sampling: Sampling, request: Request) -> None:
    """Raises ``UserError`` where a model's prediction has not the latents' shape, or a branch is missing."""
    loop = begin(sampling, request)
    timestep, sampler = loop.schedule.timesteps[0], sampling.sampler
    if sampler.encoders is not None:
        return  # what they give is not here
    for name in sampling.names:
        arguments = [sampler.call(name, loop.latents, timestep, request, True)]
        if sampler.branches(name, request) > 1:
            arguments.append(sampler.call(name, loop.latents, timestep, request, False))
        with torch.device("meta"):
            model = sampler.build(name)
        for given in arguments:
            moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            try:
                with torch.no_grad(), torch.device("meta"):
                    shape = prediction_of(model(**moved)).shape
            except UserError:
                raise
            except Exception as error:
                if needs_values(error):
                    continue
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                raise UserError(_other(sampling, name, reason, loop.latents, request)) from error
            if shape != loop.latents.shape:
                raise UserError(_other(sampling, name, _sizes(shape), loop.latents, request))


def _other(sampling: Sampling, name: str, held: str, latents: torch.Tensor, request: Request) -> OtherLatents:
    return OtherLatents(sampling.sampler.span("models"), name, held, _sizes(latents.shape), request.id)


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def planned(module: Module, pipeline: Pipeline) -> Module:
    """The lowered program. Raises ``UserError`` where no plan is."""
    pipeline.demand(Level.TRACED, Level.LOWERED)
    return pipeline.run(module)
