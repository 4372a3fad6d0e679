"""A user's sampler file. In: its path. Out: its functions, checked; its exceptions are shown at its own lines."""

from __future__ import annotations

import hashlib
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arachnec.checkpoint.trained_predictors import TrainedPredictors, trained_predictors
from arachnec.data.clip import VideoClip
from arachnec.data.requests import STEPS, Request
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Span
from arachnec.models.batch import clip_seed
from arachnec.models.compiled_modules import without_compilation
from arachnec.models.encoders import decode
from arachnec.models.file import (
    SAMPLER_FORM,
    ModelFile,
    called,
    definition,
    load_functions,
    own_errors,
    ran_out_of_memory,
    wrong_encoders,
)
from arachnec.models.weight_files import found_weights

if TYPE_CHECKING:
    import torch


MODELS = "a dict from one or two names to modules, or to functions that build them; the one of high noise first"
PAGE = "docs/sampling.md"


@dataclass(frozen=True)
class SamplerFile:
    """The functions of a sampler file; each reports the file's own exceptions as a ``UserError`` at its line.

    ``models`` names one model or two, the one of high noise first; a value is a module, or a function that builds it
    where it is needed. ``guidance`` gives the scale of classifier-free guidance of one model; without it the
    request's. ``switch`` gives the rule that is taken where none is asked for. ``predictors`` says for models by name
    where those of their sparse attention lie. ``digest`` is the SHA-256 of the source.
    """

    models: Callable[[], dict[str, Any]]
    scheduler: Callable[[], Any]
    start: Callable[[Request, torch.Generator], torch.Tensor]
    arguments: Callable[[str, torch.Tensor, torch.Tensor, Request, bool], dict[str, Any]]
    encoders: Callable[[], dict[str, torch.nn.Module]] | None
    decoder: Callable[[], torch.nn.Module] | None
    guidance: Callable[[str, Request], float] | None
    switch: Callable[[], str] | None
    predictors: Callable[[], dict[str, Any]] | None
    path: Path
    digest: str
    modules: tuple[str, ...] = ()

    def span(self, name: str) -> Span | None:
        """Where the file defines ``name``."""
        return definition(self.path, name)

    def names(self) -> tuple[str, ...]:
        """The models, the one of high noise first. Builds them on the meta device."""
        import torch

        with torch.device("meta"):
            return tuple(self.models())

    def build(self, name: str) -> torch.nn.Module:
        """One model on the device that is set; random weights are the same whichever models are built beside it."""
        import torch

        torch.manual_seed(0)
        model = self.models()[name]
        if not isinstance(model, torch.nn.Module):
            torch.manual_seed(clip_seed(0, 0, name))
            with own_errors(self.path, "models()", "sampler file"):
                model = model()
        if not isinstance(model, torch.nn.Module):
            raise user_error(
                f"the model `{name}` is built as {called(model)}, not as a module",
                help="have its function in models() return a torch.nn.Module",
                span=self.span("models"),
            )
        return without_compilation(model)

    def scale(self, name: str, request: Request) -> float:
        """The scale of guidance of a request's steps by this model; up to 1 there is none."""
        return float(self.guidance(name, request)) if self.guidance else request.guidance

    def trained_predictors(self, name: str) -> TrainedPredictors | None:
        """What a run has trained for a model's sparse attention; None where the file names nothing. Raises
        ``UserError`` for a place that holds no predictors."""
        places = {} if self.predictors is None else self.predictors()
        stray = next((other for other in places if other not in self.names()), None)
        if stray is not None:
            raise user_error(
                f"`predictors` names `{stray}`, which is no model of the file",
                help=f"its models are {', '.join(self.names())}",
                span=self.span("predictors"),
            )
        return trained_predictors(Path(places[name])) if name in places else None

    def branches(self, name: str, request: Request) -> int:
        """How many forwards a step takes: conditional, and with guidance unconditional."""
        return 2 if self.scale(name, request) > 1 else 1

    def noise(self, request: Request, generator: torch.Generator) -> torch.Tensor:
        """The latents that the first step is given, ``[1, ...]``."""
        import torch

        try:
            latents = self.start(request, generator)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            size = f"{request.frames} x {request.height} x {request.width}"
            raise user_error(
                f"this machine's memory does not hold the noise of request `{request.id}`, of {size}",
                help="give the request fewer frames, or a smaller height and width",
                span=self.span("start"),
            ) from error
        if not isinstance(latents, torch.Tensor) or not latents.is_floating_point() or latents.shape[:1] != (1,):
            actual = f"{latents.dtype} {list(latents.shape)}" if isinstance(latents, torch.Tensor) else called(latents)
            raise user_error(
                f"`start` returned {actual} for request `{request.id}`",
                label="must return latents",
                help="return a floating-point tensor [1, ...]: the noise that the first step is given",
                span=self.span("start"),
            )
        return latents

    def call(
        self, name: str, latents: torch.Tensor, timestep: torch.Tensor, request: Request, conditional: bool
    ) -> dict[str, Any]:
        """Forward's keyword arguments of one branch. Raises ``UserError`` where there is none."""
        arguments = self.arguments(name, latents, timestep, request, conditional)
        if arguments is None and not conditional:
            place = self.span("arguments")
            raise user_error(
                f"request `{request.id}` has guidance {self.scale(name, request)}, and `arguments` has no "
                "unconditional branch",
                label="returned None for conditional=False",
                help=(
                    "return the arguments of the negative prompt (`request.clip(conditional=False)`), or give the "
                    "request `guidance` 1"
                ),
                span=place,
            )
        if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
            raise user_error(
                f"`arguments` returned {called(arguments)} for request `{request.id}`",
                label="must return a dict",
                help="return forward's keyword arguments by name; docs/sampling.md has an example",
                span=self.span("arguments"),
            )
        return arguments

    def inputs(self, names: Sequence[str], *, sparse: bool) -> str:
        """SHA-256 of what the latents and videos of these models follow from and the source does not have: settings of
        a scheduler of Diffusers, weights in folders as their fingerprints tell them apart, and of ``sparse`` models
        what their predictors have measured. Builds all on the meta device."""
        import torch

        config = getattr(self.scheduler(), "config", {})
        settings = sorted((key, repr(value)) for key, value in config.items() if not key.startswith("_"))
        with found_weights() as folders, torch.device("meta"):
            for name in names:
                self.build(name)
            for make in filter(None, (self.encoders, self.decoder)):
                make()
        weights = [files.fingerprint() for files in folders]
        trained = [self.trained_predictors(name) for name in names] if sparse else []
        layers = [sorted(own.layers.items()) for own in trained if own is not None]
        return hashlib.sha256(repr((settings, weights, layers)).encode()).hexdigest()

    def model_file(self, name: str) -> ModelFile:
        """One model as a model file, to trace and measure: a clip stands for a request, the latents for a target."""

        def sample(clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
            request = request_of(clip)
            scheduler = self.scheduler()
            try:
                scheduler.set_timesteps(2)
            except Exception:  # PNDM takes no such few
                scheduler.set_timesteps(STEPS)
            latents = self.noise(request, generator)
            return self.call(name, latents, scheduler.timesteps[0], request, True), latents

        return ModelFile(
            build=lambda: self.build(name),
            sample=sample,
            loss=None,
            encoders=self.encoders,
            path=self.path,
            digest=self.digest,
            modules=self.modules,
        )


def load_sampler_file(
    path: str | Path, *, origin: str | Path | None = None, modules: tuple[str, ...] | None = None
) -> SamplerFile:
    """Import ``path`` as ``load_model_file`` does. Runs the file's code. Raises ``UserError`` for anything wrong."""
    return SamplerFile(**load_functions(path, SAMPLER_FILE, origin=origin, modules=modules))


def request_of(clip: VideoClip) -> Request:
    """A request for a video of a clip's size and caption."""
    return Request(
        clip.id, clip.caption, clip.frames, clip.height, clip.width,
        text_tokens=clip.text_tokens, encoded=clip.encoded, negative_encoded=clip.encoded,
    )  # fmt: skip


def _wrong_models(models: Any) -> tuple[str, str] | None:
    import torch

    if not isinstance(models, Mapping):
        return called(models), MODELS
    if not 1 <= len(models) <= 2:
        return f"{len(models)} models", MODELS
    for name, model in models.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            return f"a model named {name!r}", f"{MODELS}; names are words"
        if isinstance(model, type) or not (isinstance(model, torch.nn.Module) or callable(model)):
            return f"{called(model)} as the model `{name}`", MODELS
    return None


def _wrong_scheduler(scheduler: Any) -> tuple[str, str] | None:
    expected = "an object with set_timesteps(steps), timesteps and step(prediction, timestep, latents)"
    for name in ("set_timesteps", "step"):
        if isinstance(scheduler, type) or not callable(getattr(scheduler, name, None)):
            return f"{called(scheduler)} without `{name}`", expected
    return None


def _wrong_decoder(decoder: Any) -> tuple[str, str] | None:
    import torch

    if isinstance(decoder, torch.nn.Module):
        return None
    return called(decoder), "a torch.nn.Module from latents to pixels [1, 3, frames, height, width] on [-1, 1]"


def _wrong_guidance(scale: Any) -> tuple[str, str] | None:
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if number and math.isfinite(scale) and scale >= 0:
        return None
    return repr(scale) if number else called(scale), "a number of at least 0; up to 1 there is no guidance"


def _wrong_switch(rule: Any) -> tuple[str, str] | None:
    return None if isinstance(rule, str) else (called(rule), 'a switch rule as text, such as "boundary=0.875"')


def _wrong_predictors(places: Any) -> tuple[str, str] | None:
    expected = "a dict from models' names to folders: the checkpoints of a run with `sparsify`, or its export"
    if not isinstance(places, Mapping):
        return called(places), expected
    wrong = next((place for place in places.values() if not isinstance(place, str | Path)), None)
    return None if wrong is None else (f"{called(wrong)} as a folder", expected)


SAMPLER_FILE = replace(
    SAMPLER_FORM,
    results={
        "models": _wrong_models,
        "scheduler": _wrong_scheduler,
        "encoders": wrong_encoders,
        "decoder": _wrong_decoder,
        "guidance": _wrong_guidance,
        "switch": _wrong_switch,
        "predictors": _wrong_predictors,
    },
)


DECODER = "decoder"  # the name of a sampler file's decoder as a stage


class VideoDecoder(nn.Module):
    """The decoder of a Diffusers video VAE; the other way of ``VideoEncoder``.

    ``frames_first``: latents are ``[B, frames, channels, height, width]``, as CogVideoX has them.
    ``factor`` is the encoder's.
    """

    def __init__(self, vae: nn.Module, *, frames_first: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.vae = vae.requires_grad_(False).eval()
        self.frames_first = frames_first

    @torch.no_grad()
    def forward(self, latents: Tensor) -> Tensor:
        """Pixels ``[B, 3, frames, height, width]`` on [-1, 1], not clamped."""
        latents = latents.transpose(1, 2) if self.frames_first else latents
        return decode(self.vae, latents.to(next(self.vae.parameters()).dtype) / self.factor)


class FromLatents(nn.Module):
    """A decoder in an encoder's form, to be traced and timed: what it loads has the shape of a clip's latents."""

    def __init__(self, sampler: SamplerFile, decoder: nn.Module, latents: Callable[[VideoClip], Tensor]) -> None:
        super().__init__()
        self.sampler = sampler
        self.decoder = decoder
        self.latents = latents

    def load(self, clip: VideoClip, device: torch.device | str) -> Tensor:
        """Zeros ``[1, ...]``."""
        return torch.zeros_like(self.latents(clip), device=device)

    def forward(self, loaded: Tensor) -> Tensor:
        return decoded(self.sampler, self.decoder, loaded)


def decoded(sampler: SamplerFile, decoder: nn.Module, latents: Tensor) -> Tensor:
    """Pixels ``[1, 3, frames, height, width]`` of a sampler file's decoder.

    Raises ``UserError`` where it gives something else, or raises in the file's own code.
    """
    with own_errors(sampler.path, "the decoder's forward", "sampler file"):
        pixels = decoder(latents)
    if not isinstance(pixels, Tensor) or pixels.ndim != 5 or pixels.shape[:2] != (1, 3) or 0 in pixels.shape:
        got = str(list(pixels.shape)) if isinstance(pixels, Tensor) else called(pixels)
        raise user_error(
            f"the decoder gives {got} for latents {list(latents.shape)}",
            label="must return a module that gives pixels",
            help="give a floating-point tensor [1, 3, frames, height, width] on [-1, 1]",
            span=sampler.span("decoder"),
        )
    return pixels


def latents_of(sampler: SamplerFile, clips: Sequence[VideoClip]) -> Callable[[VideoClip], Tensor]:
    """The latents of a clip's shape, on the meta device."""
    generator = torch.Generator("cpu").manual_seed(0)
    known = {c.shape: sampler.noise(request_of(c), generator).to("meta") for c in {c.shape: c for c in clips}.values()}
    return lambda clip: known[clip.shape]
