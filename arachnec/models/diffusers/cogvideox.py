"""CogVideoX (arXiv 2408.06072) in Diffusers: ``CogVideoXTransformer3DModel``, trained by v-prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arachnec.data.clip import UNIFORM, Timesteps, VideoClip
from arachnec.models.diffusers import common
from arachnec.models.diffusers.tokenizations import OfFolder
from arachnec.models.precision import arguments_in, in_precision

MODULE = "diffusers.models.transformers.cogvideox_transformer_3d"
EMBEDDINGS = "diffusers.models.embeddings"
PIPELINE = "diffusers.pipelines.cogvideo.pipeline_cogvideox"
SCHEDULER = "diffusers.schedulers.scheduling_ddim_cogvideox"
COGVIDEOX_1_0 = {
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "sample_frames": 49,
    "sample_height": 60,
    "sample_width": 90,
    "temporal_compression_ratio": 4,
    "text_embed_dim": 4096,
    "time_embed_dim": 512,
    "max_text_seq_length": 226,
    "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0,
    "use_learned_positional_embeddings": False,
}
# The transformer/config.json of huggingface.co/THUDM/CogVideoX-2b and CogVideoX-5b.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "CogVideoX-2B": {
        **COGVIDEOX_1_0,
        "num_attention_heads": 30,
        "num_layers": 30,
        "use_rotary_positional_embeddings": False,
    },
    "CogVideoX-5B": {
        **COGVIDEOX_1_0,
        "num_attention_heads": 48,
        "num_layers": 42,
        "use_rotary_positional_embeddings": True,
    },
}
# The one value in which the two checkpoints' scheduler/scheduler_config.json differ.
SNR_SHIFT = {"CogVideoX-2B": 3.0, "CogVideoX-5B": 1.0}
TIMESTEPS = 1000


@dataclass(frozen=True)
class CogVideoXTextToVideo(OfFolder):
    """``build``, ``sample`` and ``loss`` of a model file. See ``text_to_video``."""

    config: Mapping[str, Any]
    text_length: int | None
    alphas: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    snr_shift: float = 1.0
    folder: Path | None = None  # of the pretrained weights

    @property
    def geometry(self) -> common.Geometry:
        patch, stride = self.config["patch_size"], self.config["temporal_compression_ratio"]
        return common.Geometry(
            self.config["in_channels"], (self.config["patch_size_t"] or 1, patch, patch), (stride, 8, 8)
        )

    def build(self) -> torch.nn.Module:
        return in_precision(common.constructor(MODULE, "CogVideoXTransformer3DModel")(**self.config), self.dtype)

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
        x0 = common.latents(clip, self.geometry).transpose(1, 2)  # the model wants frames before channels
        x_t, timestep, target = velocity_prediction(
            x0, self.alphas, generator, common.timesteps_of(clip), self.geometry.tokens(clip)
        )
        text, _ = common.text_embeddings(clip, "CogVideoX", self.config["text_embed_dim"], self.text_length)
        arguments: dict[str, object] = {
            "hidden_states": x_t,
            "encoder_hidden_states": text,
            "timestep": timestep,
            "return_dict": False,
        }
        return arguments_in(arguments | self.positions(clip, x0.device), self.dtype), target

    loss = staticmethod(common.mean_squared_error)

    def positions(self, clip: VideoClip, device: torch.device) -> dict[str, object]:
        """The arguments that follow from a clip's size alone."""
        arguments: dict[str, object] = {}
        if self.config["use_rotary_positional_embeddings"]:
            arguments["image_rotary_emb"] = self._rotary(clip, device)
        if self.config["ofs_embed_dim"]:
            arguments["ofs"] = torch.full((1,), 2.0, device=device)  # the constant of the 1.5 pipelines
        return arguments

    def _rotary(self, clip: VideoClip, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[tokens, head_dim]``, as the pipeline's ``_prepare_rotary_positional_embeddings``."""
        table = common.constructor(EMBEDDINGS, "get_3d_rotary_pos_embed")
        time, height, width = self.geometry.patches(clip)
        base = tuple(self.config[size] // self.config["patch_size"] for size in ("sample_height", "sample_width"))
        placed: dict[str, Any] = {"crops_coords": None, "grid_type": "slice", "max_size": base}
        if self.config["patch_size_t"] is None:
            region = common.constructor(PIPELINE, "get_resize_crop_region_for_grid")
            placed = {"crops_coords": region((height, width), base[1], base[0])}
        cos, sin = table(
            embed_dim=self.config["attention_head_dim"],
            grid_size=(height, width),
            temporal_size=time,
            device=device,
            **placed,
        )
        return cos, sin


def text_to_video(
    name: str | None = None,
    /,
    *,
    text_length: int | None = None,
    snr_shift: float | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> CogVideoXTextToVideo:
    """A named configuration, or that in a folder of pretrained weights, with ``config`` laid over it.

    Without a name, the class's defaults with ``config``.

    With rotary positions the model reads a clip's ``text_tokens`` text tokens as they are, and ``text_length`` pads all
    captions with zeros to one length. Without, its position table starts after ``max_text_seq_length`` text tokens, so
    captions are always padded to that. ``snr_shift`` is the scheduler's ``snr_shift_scale``: a folder's
    own, 3 for the 2B, else 1.
    ``dtype`` is the precision of the weights and of what the model is given. Raises ``UserError`` for an unknown name
    or key.
    """
    model = common.constructor(MODULE, "CogVideoXTransformer3DModel")
    config = common.configuration("CogVideoX", model, CONFIGURATIONS, name, config)
    if not config["use_rotary_positional_embeddings"]:
        text_length = config["max_text_seq_length"]
    shift = snr_shift or SNR_SHIFT.get(name or "") or _snr_shift_of(name)
    return CogVideoXTextToVideo(config, text_length, alphas_cumprod(shift), dtype, shift, common.folder_of(name))


def _snr_shift_of(folder: str | None) -> float:
    """What the scheduler of the folder's pipeline has; else 1."""
    shift = common.scheduler_config(Path(folder or "")).get("snr_shift_scale")
    return float(shift) if isinstance(shift, int | float) and shift else 1.0


def velocity_prediction(
    x0: Tensor,
    alphas: tuple[float, ...],
    generator: torch.Generator,
    timesteps: Timesteps = UNIFORM,
    tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """One training point of v-prediction (Salimans and Ho, arXiv 2202.00512, section 4).

    The timestep is 1000 t rounded down, of a t drawn as ``timesteps`` say for so many tokens. With a its cumulated
    alpha, x_t = sqrt(a) x0 + sqrt(1 - a) noise and the target is sqrt(a) noise - sqrt(1 - a) x0. Returns x_t, the
    timestep of shape [1] (int64), and the target.
    """
    timestep = (common.draw_time(timesteps, tokens, generator) * len(alphas)).long().clamp(max=len(alphas) - 1)
    noise = common.draw_normal(x0.shape, generator)
    alpha = torch.tensor(alphas, device=x0.device)[timestep]
    signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
    return signal * x0 + spread * noise, timestep, signal * noise - spread * x0


def alphas_cumprod(snr_shift: float) -> tuple[float, ...]:
    """The cumulated alphas of CogVideoX's scheduler: scaled linear betas, shifted, with zero terminal SNR."""
    with torch.device("cpu"):
        return tuple(ddim_scheduler(snr_shift).alphas_cumprod.tolist())


def ddim_scheduler(snr_shift: float) -> Any:
    """CogVideoX's own scheduler, fresh."""
    return common.constructor(SCHEDULER, "CogVideoXDDIMScheduler")(
        num_train_timesteps=TIMESTEPS,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=snr_shift,
        timestep_spacing="trailing",
    )
