"""Diffusers' own pipelines, tiny, offline, with random weights: what a request's latents must be.

A case is a family, a scheduler and a scale of guidance. ``ours`` and ``theirs`` give the latents after all steps, from
the same weights, noise and prompt embeddings.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL, Switch
from arachnec.models.diffusers import cogvideox, hunyuan_video, sampler, wan
from arachnec.models.sampler_file import SamplerFile
from arachnec.sampling.forward import all_branches, branches_of
from arachnec.sampling.loop import Loop, Sampling, begin, run

TEXT = 8  # tokens that prompts are padded to
FLOW = {"num_train_timesteps": 1000}
SOLVER = {**FLOW, "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
REQUEST = Request("a", "fox", 9, 32, 48, steps=6, seed=3, text_tokens=4, negative_prompt="blur")


def _scheduler(name: str, **options: Any) -> Callable[[], Any]:
    import diffusers

    return lambda: getattr(diffusers, name)(**options)


def flow_schedulers() -> dict[str, Callable[[], Any]]:
    """Of models that predict a velocity from data to noise."""
    return {
        "euler": _scheduler("FlowMatchEulerDiscreteScheduler", **FLOW, shift=3.0),
        "heun": _scheduler("FlowMatchHeunDiscreteScheduler", **FLOW, shift=3.0),
        "unipc": _scheduler("UniPCMultistepScheduler", **SOLVER),
        "unipc-3": _scheduler("UniPCMultistepScheduler", **SOLVER, solver_order=3),
        "dpm": _scheduler("DPMSolverMultistepScheduler", **SOLVER),
        "dpm-3": _scheduler("DPMSolverMultistepScheduler", **SOLVER, solver_order=3),
        "dpm-sde": _scheduler("DPMSolverMultistepScheduler", **SOLVER, algorithm_type="sde-dpmsolver++"),
        "dpm-single": _scheduler("DPMSolverSinglestepScheduler", **SOLVER),
    }


def diffusion_schedulers() -> dict[str, Callable[[], Any]]:
    """Of models that predict v (arXiv 2202.00512)."""
    v = {
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    return {
        "cogvideox-ddim": _scheduler("CogVideoXDDIMScheduler", **v),
        "cogvideox-dpm": _scheduler("CogVideoXDPMScheduler", **v),
        "ddim": _scheduler("DDIMScheduler", **v, clip_sample=False),
        "unipc": _scheduler("UniPCMultistepScheduler", **v),
        "dpm": _scheduler("DPMSolverMultistepScheduler", **v),
    }


def other_schedulers() -> dict[str, Callable[[], Any]]:
    """Further ones of Diffusers, some of which draw at every step, with a history, an inner step or a flag to keep."""
    linear = {"num_train_timesteps": 1000, "beta_schedule": "scaled_linear"}
    names = ("EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete", "KDPM2AncestralDiscrete")
    more = ("LMSDiscrete", "PNDM", "DDPM", "LCM", "TCD")
    return {
        "deis": _scheduler("DEISMultistepScheduler", **SOLVER),
        "sa": _scheduler("SASolverScheduler", **SOLVER),
        "flow-lcm": _scheduler("FlowMatchLCMScheduler", **FLOW),
        "edm": _scheduler("EDMDPMSolverMultistepScheduler"),
        "edm-euler": _scheduler("EDMEulerScheduler"),
        "ipndm": _scheduler("IPNDMScheduler"),
        **{name: _scheduler(f"{name}Scheduler", **linear) for name in (*names, *more)},
    }


def hunyuan_schedulers() -> dict[str, Callable[[], Any]]:
    """Those whose ``set_timesteps`` takes noise levels, which the pipeline gives."""
    import diffusers

    euler = sampler.from_one_to_zero(diffusers.FlowMatchEulerDiscreteScheduler)
    unipc = sampler.from_one_to_zero(diffusers.UniPCMultistepScheduler)
    return {"euler": lambda: euler(**FLOW, shift=7.0), "unipc": lambda: unipc(**SOLVER)}


SIZE = {"num_attention_heads": 2, "in_channels": 4, "out_channels": 4}


def wan_model(layers: int = 2) -> wan.WanTextToVideo:
    return wan.text_to_video(
        text_length=TEXT, num_layers=layers, attention_head_dim=12, ffn_dim=32, text_dim=16, freq_dim=16, **SIZE
    )


def cogvideox_model() -> cogvideox.CogVideoXTextToVideo:
    return cogvideox.text_to_video(
        text_length=TEXT, num_layers=2, attention_head_dim=16, text_embed_dim=16, time_embed_dim=8,
        sample_height=4, sample_width=6, use_rotary_positional_embeddings=True, max_text_seq_length=TEXT, **SIZE,
    )  # fmt: skip


def hunyuan_model() -> hunyuan_video.HunyuanTextToVideo:
    return hunyuan_video.text_to_video(
        text_length=TEXT, num_layers=1, num_single_layers=1, num_refiner_layers=1, attention_head_dim=16,
        rope_axes_dim=(4, 6, 6), text_embed_dim=16, pooled_projection_dim=8, guidance_embeds=True, **SIZE,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A pipeline of Diffusers with one scheduler. ``boundary`` gives Wan a second transformer."""

    family: str
    scheduler: str
    guidance: float
    boundary: float | None = None

    def __str__(self) -> str:
        both = "" if self.boundary is None else f", boundary {self.boundary:g}"
        return f"{self.family}, {self.scheduler}, guidance {self.guidance:g}{both}"

    @property
    def request(self) -> Request:
        from dataclasses import replace

        return replace(REQUEST, guidance=self.guidance)


def cases() -> Iterator[Case]:
    for guidance in (1.0, 5.0):
        for scheduler in flow_schedulers():
            yield Case("wan", scheduler, guidance)
            yield Case("wan", scheduler, guidance, boundary=0.875)
        for scheduler in diffusion_schedulers():
            yield Case("cogvideox", scheduler, guidance)
        for scheduler in hunyuan_schedulers():
            yield Case("hunyuan_video", scheduler, guidance)


def video_sampler(case: Case) -> sampler.VideoSampler:
    """The adapter's sampler of a case."""
    if case.family == "wan":
        models: dict[str, Any] = {"high": wan_model()} | ({} if case.boundary is None else {"low": wan_model(1)})
        return sampler.wan_sampler(
            scheduler=flow_schedulers()[case.scheduler], text_length=TEXT, boundary=case.boundary, **models
        )
    if case.family == "cogvideox":
        own = diffusion_schedulers()[case.scheduler]
        return sampler.cogvideox_sampler(scheduler=own, text_length=TEXT, model=cogvideox_model())
    return sampler.hunyuan_sampler(
        scheduler=hunyuan_schedulers()[case.scheduler],
        text_length=TEXT,
        true_guidance=case.guidance,
        model=hunyuan_model(),
    )


def sampler_file(video: sampler.VideoSampler) -> SamplerFile:
    """The sampler as a file would have it."""
    return SamplerFile(
        models=video.models, scheduler=video.scheduler, start=video.start, arguments=video.arguments, encoders=None,
        decoder=None, guidance=video.guidance, switch=None, predictors=None,
        path=Path(__file__), digest=_digest(__file__),
    )  # fmt: skip


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def build(file: SamplerFile) -> dict[str, nn.Module]:
    """Its models, their weights spread so that predictions depend on every input."""
    models = {name: file.build(name).eval() for name in file.names()}
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for model in models.values():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return models


def loop(file: SamplerFile, models: dict[str, nn.Module], request: Request, switch: Switch, **options: Any) -> Loop:
    """A request before its first step, and the prediction of its models."""
    return begin(Sampling(file, options.pop("names", file.names()), switch, **options), request)


def ours(case: Case, models: dict[str, nn.Module], file: SamplerFile) -> Tensor:
    switch = ONE_MODEL if case.boundary is None else Switch("boundary", case.boundary)
    state = loop(file, models, case.request, switch)
    run([state], all_branches(file, branches_of(file, models.__getitem__)))
    return state.latents


def theirs(case: Case, models: dict[str, nn.Module], file: SamplerFile, device: str | torch.device = "cpu") -> Tensor:
    """The pipeline's latents, given our noise and embeddings; on the device where the models are."""
    import diffusers

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    request = case.request
    generator = torch.Generator().manual_seed(request.seed)
    latents = file.noise(request, generator)
    first = next(iter(models))
    time = torch.tensor(1.0)
    conditional, other = (file.call(first, latents, time, request, branch) for branch in (True, False))
    given: dict[str, Any] = {
        "height": request.height, "width": request.width, "num_frames": request.frames,
        "num_inference_steps": request.steps, "latents": latents, "prompt_embeds": conditional["encoder_hidden_states"],
        "output_type": "latent", "return_dict": False,
    }  # fmt: skip
    negative = {"negative_prompt_embeds": other["encoder_hidden_states"]}
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": file.scheduler()}
    transformer = models[first]
    if case.family == "wan":
        two = {"boundary_ratio": case.boundary, "transformer_2": models.get("low")}
        pipeline: Any = diffusers.WanPipeline(**parts, transformer=transformer, **two)
        given |= negative | {"guidance_scale": case.guidance}
    elif case.family == "cogvideox":
        pipeline = diffusers.CogVideoXPipeline(**parts, transformer=transformer)
        pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal = 8, 4
        given |= negative | {"guidance_scale": case.guidance, "generator": generator}
    else:
        pipeline = diffusers.HunyuanVideoPipeline(
            **parts, transformer=transformer, text_encoder_2=None, tokenizer_2=None
        )
        given |= {
            "pooled_prompt_embeds": conditional["pooled_projections"],
            "prompt_attention_mask": conditional["encoder_attention_mask"],
            "guidance_scale": case.guidance, "true_cfg_scale": case.guidance, **negative,
            "negative_pooled_prompt_embeds": other["pooled_projections"],
            "negative_prompt_attention_mask": other["encoder_attention_mask"],
        }  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    with torch.random.fork_rng():  # some pipelines hand no generator to a scheduler that draws
        torch.set_rng_state(generator.get_state())
        on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
        result: Tensor = pipeline(**on_device)[0]
    return result


def difference(case: Case) -> float:
    """The largest difference of the latents, relative to the largest of them."""
    file = sampler_file(video_sampler(case))
    models = build(file)
    expected = theirs(case, models, file)
    return float((ours(case, models, file) - expected).abs().max() / expected.abs().max())
