"""Sampler files for Diffusers' video models. In: configurations or folders by name. Out: the file's functions.

Each is five lines: a name for each model, and what it is. A configuration's name gives random weights, a folder that
``save_pretrained`` wrote gives its own. See ``docs/sampling.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arachnec.checkpoint.trained_predictors import FILE as PREDICTORS
from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request
from arachnec.ir.diagnostic import user_error
from arachnec.models.diffusers import cogvideox, common, hunyuan_video, wan
from arachnec.models.diffusers.pretrained import pipeline_encoders
from arachnec.models.diffusers.tokenizations import COGVIDEOX_TOKENS, HUNYUAN_TOKENS, WAN_TOKENS
from arachnec.models.initial_weights import (
    InitialWeights,
    encoder_weights,
    initial_weights,
    read_config,
)
from arachnec.models.precision import arguments_in
from arachnec.models.sampler_file import VideoDecoder

UNIPC = "diffusers.schedulers.scheduling_unipc_multistep"
EULER = "diffusers.schedulers.scheduling_flow_match_euler_discrete"
SWITCH = "boundary=0.9"  # about 13 of 50 steps at a flow shift of 3
PREDICTION = "prediction types"
FLOW, VELOCITY = "flow_prediction", "v_prediction"  # what models are trained to predict, in the schedulers' words


class Adapter(Protocol):
    """What the model families' ``text_to_video`` returns."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def geometry(self) -> common.Geometry: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def build(self) -> nn.Module: ...


@dataclass(frozen=True)
class Expert:
    """A model and the folder of its weights; random ones without.

    Names and shapes are held against the folder's on the meta device too, so planning refuses what ranks would.
    """

    adapter: Any
    folder: Path | None

    def build(self) -> nn.Module:
        model: nn.Module = self.adapter.build().eval()
        if self.folder is not None:
            _fill(model, initial_weights(self.folder, model))
        return model


@dataclass(frozen=True)
class VideoSampler:
    """The functions of a sampler file: ``models``, ``scheduler``, ``start``, ``arguments`` and ``guidance``, and with
    a ``pipeline``'s folder ``encoders`` and ``decoder``; of two models ``switch``; of exported ones ``predictors``."""

    experts: Mapping[str, Expert]
    make_scheduler: Callable[[], Any]
    family: Any
    frames_first: bool = False
    true_guidance: float | None = None
    boundary: float | None = None
    pipeline: Path | None = None
    alphas: tuple[float, ...] | None = None  # the scheduler's, where the models have been trained with other ones

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        return {name: expert.build for name, expert in self.experts.items()}

    def scheduler(self) -> Any:
        return self.make_scheduler()

    def start(self, request: Request, generator: torch.Generator) -> Tensor:
        """Unit noise of the latents' shape, times what the scheduler begins at for so many steps."""
        geometry: common.Geometry = next(iter(self.experts.values())).adapter.geometry
        channels, frames, height, width = geometry.latent_shape(request.clip())
        order = (frames, channels) if self.frames_first else (channels, frames)
        noise = common.draw_normal((1, *order, height, width), generator)
        scheduler = self.scheduler()
        if isinstance(getattr(type(scheduler), "init_noise_sigma", None), property):  # of the timesteps that are set
            scheduler.set_timesteps(request.steps)
        return noise * getattr(scheduler, "init_noise_sigma", 1.0)

    def arguments(
        self, name: str, latents: Tensor, timestep: Tensor, request: Request, conditional: bool
    ) -> dict[str, object]:
        adapter = self.experts[name].adapter
        if self.alphas is not None:
            timestep = equally_noisy(timestep, self.alphas, adapter.alphas)
        given = {"hidden_states": latents, "timestep": timestep.expand(latents.shape[0]), "return_dict": False}
        own = self.family(adapter, request.clip(conditional), latents, request)
        return arguments_in(given | own, adapter.dtype)

    def guidance(self, name: str, request: Request) -> float:
        return request.guidance if self.true_guidance is None else self.true_guidance

    def switch(self) -> str:
        return SWITCH if self.boundary is None else f"boundary={self.boundary}"

    def predictors(self) -> dict[str, Path]:
        """Of models whose folder is an export with predictors of sparse attention."""
        folders = {name: expert.folder for name, expert in self.experts.items() if expert.folder is not None}
        return {name: folder for name, folder in folders.items() if (folder / PREDICTORS).is_file()}

    def encoders(self) -> dict[str, nn.Module]:
        """Those of the captions, with the pipeline's weights."""
        folder = self._pipeline()
        text = pipeline_encoders(folder)["text"]
        weights = encoder_weights(folder, "text", text)
        if weights is not None:
            _fill(text, weights)
        return {"text": text}

    def decoder(self) -> nn.Module:
        """The pipeline's VAE, from latents to pixels."""
        folder = self._pipeline() / "vae"
        config = read_config(folder)
        vae = common.constructor("diffusers", config["_class_name"]).from_config(config)
        _fill(vae, initial_weights(folder, vae))
        return VideoDecoder(vae, frames_first=self.frames_first)

    def _pipeline(self) -> Path:
        if self.pipeline is None:
            raise user_error(
                "the sampler has no folder with a text encoder and a VAE",
                help="give it one, as `pipeline=FOLDER`, or leave encoders and decoder out of the file",
            )
        return self.pipeline


def wan_sampler(
    *,
    dtype: torch.dtype = torch.float32,
    scheduler: Callable[[], Any] | None = None,
    flow_shift: float = 3.0,
    boundary: float | None = None,
    text_length: int = WAN_TOKENS,
    pipeline: str | Path | None = None,
    **models: Any,
) -> VideoSampler:
    """Wan 2.1, or both experts of Wan 2.2: then ``boundary`` is the share of the noise levels below the switch.

    A model is a configuration's name, a folder, or what ``wan.text_to_video`` returned. The scheduler is the
    pipeline's UniPC with ``flow_shift`` (3 for 480p, 5 for 720p) unless given. Raises ``UserError``.
    """
    make = functools.partial(wan.text_to_video, text_length=text_length, dtype=dtype)
    unipc = functools.partial(_unipc, flow_shift)
    experts = _experts(models, wan.CONFIGURATIONS, make, FLOW)
    own = _fitting(experts, scheduler or _of_folder(pipeline) or unipc, FLOW)
    return VideoSampler(experts, own, _wan_text, boundary=boundary, pipeline=_path(pipeline))


def cogvideox_sampler(
    *,
    dtype: torch.dtype = torch.float32,
    scheduler: Callable[[], Any] | None = None,
    snr_shift: float | None = None,
    text_length: int = COGVIDEOX_TOKENS,
    pipeline: str | Path | None = None,
    **models: Any,
) -> VideoSampler:
    """CogVideoX; as ``wan_sampler``. The scheduler is CogVideoX's DDIM with ``snr_shift``: unless given that of the
    first model (1 for the 5B, 3 for the 2B).

    Where the second model was trained with another shift, its timesteps are those of its own schedule at which latents
    are as noisy: the pair has one scheduler, and each model sees the noise that it knows.
    """
    make = functools.partial(cogvideox.text_to_video, text_length=text_length, dtype=dtype)
    experts = _experts(models, cogvideox.CONFIGURATIONS, make, VELOCITY)
    first, *others = (expert.adapter for expert in experts.values())
    ddim = functools.partial(cogvideox.ddim_scheduler, snr_shift or first.snr_shift)
    own = _fitting(experts, scheduler or _of_folder(pipeline) or ddim, VELOCITY)
    unlike = any(other.alphas != first.alphas for other in others)
    alphas = _alphas_of(own(), first.alphas) if unlike else None
    return VideoSampler(experts, own, _cogvideox_text, frames_first=True, pipeline=_path(pipeline), alphas=alphas)


def hunyuan_sampler(
    *,
    dtype: torch.dtype = torch.float32,
    scheduler: Callable[[], Any] | None = None,
    flow_shift: float = 7.0,
    true_guidance: float = 1.0,
    text_length: int = HUNYUAN_TOKENS,
    pipeline: str | Path | None = None,
    **models: Any,
) -> VideoSampler:
    """HunyuanVideo; as ``wan_sampler``. It is told the request's guidance as an input, so one branch is enough;
    ``true_guidance`` above 1 adds an unconditional one. The scheduler is that of the ``pipeline``'s folder, else Euler
    with ``flow_shift``; its noise levels go from 1 to 0 as in HunyuanVideo's own pipeline."""
    make = functools.partial(hunyuan_video.text_to_video, text_length=text_length, dtype=dtype)
    experts = _experts(models, hunyuan_video.CONFIGURATIONS, make, FLOW)
    euler = functools.partial(_euler, flow_shift)
    own = _fitting(experts, scheduler or _of_folder(pipeline, from_one_to_zero) or euler, FLOW)
    return VideoSampler(experts, own, _hunyuan_text, true_guidance=true_guidance, pipeline=_path(pipeline))


def _fill(model: nn.Module, weights: InitialWeights) -> None:
    """Give a model its weights, unless it is on the meta device and has none."""
    if not any(tensor.is_meta for tensor in model.parameters()):
        weights.fill(model)


def _path(pipeline: str | Path | None) -> Path | None:
    return None if pipeline is None else Path(pipeline)


def _experts(
    models: Mapping[str, Any], named: Mapping[str, Any], make: Callable[[str], Adapter], kind: str
) -> dict[str, Expert]:
    """Every model with its folder; ``kind`` is what the family predicts. Raises ``UserError`` where two have not the
    same latents."""
    if not 1 <= len(models) <= 2:
        raise user_error(
            f"a sampler needs one model or two, and has {len(models)}",
            help='name them, the one of high noise first: sampler(large="Wan2.1-T2V-14B", small="...")',
        )
    experts = {
        name: Expert(make(str(given)), None if given in named else Path(given))
        if isinstance(given, str | Path)
        else Expert(given, None)
        for name, given in models.items()
    }
    first, *others = experts
    for second in others:
        a, b = experts[first], experts[second]
        facts = {
            "latent channels": [expert.adapter.geometry.channels for expert in (a, b)],
            "strides": [expert.adapter.geometry.stride for expert in (a, b)],
            PREDICTION: [_prediction_type(expert.folder) or kind for expert in (a, b)],
        }
        for what, (here, there) in facts.items():
            if here != there:
                alike = "trained with one scheduler" if what == PREDICTION else "of one family's VAE"
                raise user_error(
                    f"`{first}` and `{second}` have other {what}: {here} and {there}",
                    help=f"only models of one latent space can hand a request on: take two {alike}",
                )
    return experts


def _fitting(experts: Mapping[str, Expert], scheduler: Callable[[], Any], kind: str) -> Callable[[], Any]:
    """The scheduler, held to what the models predict: what their folders say, else their family's ``kind``.

    A scheduler that does not say what it takes fits. Raises ``UserError``.
    """
    own = scheduler()
    taken = taken_by(own)
    for name, expert in experts.items():
        predicted = _prediction_type(expert.folder) or kind
        if taken is not None and predicted != taken:
            raise user_error(
                f"`{name}` predicts `{predicted}`, and the scheduler {type(own).__name__} takes `{taken}`",
                help="give the sampler the scheduler of the model's own pipeline, as `scheduler=` or `pipeline=FOLDER`",
            )
    return scheduler


def taken_by(scheduler: Any) -> str | None:
    """The prediction type that a scheduler takes; None where it does not say. Flow-matching ones are so by class."""
    kind = getattr(getattr(scheduler, "config", None), "prediction_type", None)
    if kind is None and type(scheduler).__name__.startswith("FlowMatch"):
        return FLOW
    return None if kind is None else str(kind)


def _alphas_of(scheduler: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    alphas = getattr(scheduler, "alphas_cumprod", None)
    return tuple(alphas.tolist()) if isinstance(alphas, Tensor) else default


def equally_noisy(timestep: Tensor, given: Sequence[float], own: Sequence[float]) -> Tensor:
    """The timestep, of a schedule of cumulated alphas ``own``, at which latents are as noisy as at one of ``given``."""
    here, there = (torch.tensor(alphas, device=timestep.device) for alphas in (given, own))
    level = here.index_select(0, timestep.reshape(-1).long())
    return (there - level[:, None]).abs().argmin(1).reshape(timestep.shape).to(timestep.dtype)


def _prediction_type(folder: Path | None) -> str | None:
    kind = common.scheduler_config(folder).get("prediction_type")
    return kind if isinstance(kind, str) else None


def _of_folder(
    pipeline: str | Path | None, adapted: Callable[[Any], Any] = lambda kind: kind
) -> Callable[[], Any] | None:
    """The scheduler that a pipeline's folder describes, its class ``adapted``."""
    config = common.scheduler_config(_path(pipeline))
    if not config:
        return None
    kind = adapted(common.constructor("diffusers", config["_class_name"]))
    return functools.partial(kind.from_config, config)


def _unipc(flow_shift: float) -> Any:
    return common.constructor(UNIPC, "UniPCMultistepScheduler")(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )


def _euler(shift: float) -> Any:
    return from_one_to_zero(common.constructor(EULER, "FlowMatchEulerDiscreteScheduler"))(shift=shift)


def from_one_to_zero(scheduler: Any) -> Any:
    """A scheduler class whose noise levels, before its shift, go from 1 in equal parts, as HunyuanVideo's pipeline has
    them."""

    def set_timesteps(self: Any, steps: int | None = None, device: Any = None, sigmas: Any = None) -> None:
        if sigmas is None and steps is not None:
            sigmas = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)[:-1].numpy()
        scheduler.set_timesteps(self, sigmas=sigmas, device=device)

    return type(scheduler.__name__, (scheduler,), {"set_timesteps": set_timesteps})


def _wan_text(adapter: Any, clip: VideoClip, latents: Tensor, request: Request) -> dict[str, object]:
    text, _ = common.text_embeddings(clip, "Wan", adapter.config["text_dim"], adapter.text_length)
    return {"encoder_hidden_states": text.to(latents.device)}


def _cogvideox_text(adapter: Any, clip: VideoClip, latents: Tensor, request: Request) -> dict[str, object]:
    text, _ = common.text_embeddings(clip, "CogVideoX", adapter.config["text_embed_dim"], adapter.text_length)
    return {"encoder_hidden_states": text.to(latents.device), **adapter.positions(clip, latents.device)}


def _hunyuan_text(adapter: Any, clip: VideoClip, latents: Tensor, request: Request) -> dict[str, object]:
    text, _ = common.text_embeddings(clip, "HunyuanVideo", adapter.config["text_embed_dim"], adapter.text_length)
    own: dict[str, object] = {
        "encoder_hidden_states": text.to(latents.device),
        "encoder_attention_mask": common.shown_text(text).to(latents.device),
        "pooled_projections": common.pooled_text(clip, adapter.config["pooled_projection_dim"]).to(latents.device),
    }
    if adapter.config["guidance_embeds"]:
        own["guidance"] = torch.full((latents.shape[0],), 1000.0 * request.guidance, device=latents.device)
    return own
