"""What the adapters share: latent sizes, where latents and text embeddings come from, the flow-matching objective."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arachnec.data.clip import UNIFORM, Timesteps, VideoClip
from arachnec.ir.diagnostic import user_error
from arachnec.models.initial_weights import INDEX, model_folder, pipeline_folder, read_config, read_json_object

LOW_NOISE = "transformer_2"  # a pipeline's second expert


@dataclass(frozen=True)
class Geometry:
    """How pixels become latents and latents become tokens; triples are (time, height, width)."""

    channels: int
    patch: tuple[int, int, int]
    stride: tuple[int, int, int] = (4, 8, 8)

    def patches(self, clip: VideoClip) -> tuple[int, int, int]:
        """Tokens along each axis. Both divisions round up: 1080 pixels are 135 latents and 68 patches."""
        pixels = (clip.frames, clip.height, clip.width)
        latent = [-(-size // stride) for size, stride in zip(pixels, self.stride, strict=True)]
        time, height, width = (-(-size // patch) for size, patch in zip(latent, self.patch, strict=True))
        return time, height, width

    def tokens(self, clip: VideoClip) -> int:
        time, height, width = self.patches(clip)
        return time * height * width

    def latent_shape(self, clip: VideoClip) -> tuple[int, int, int, int]:
        """``(channels, frames, height, width)`` of the clip's latents, whole patches."""
        time, height, width = (n * patch for n, patch in zip(self.patches(clip), self.patch, strict=True))
        return self.channels, time, height, width

    @property
    def multiple(self) -> int:
        """Heights and widths are rounded up to a multiple of this many pixels, at which videos are decoded."""
        return self.stride[1] * self.patch[1]


def constructor(module: str, name: str) -> Any:
    """A class of Diffusers, imported when it is first needed."""
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise user_error(
            f"this model file needs Diffusers, and `{error.name or 'diffusers'}` is not installed",
            help="pip install 'diffusers>=0.35' 'transformers>=4.56' sentencepiece",
        ) from None


def configuration(
    model: str, parameters: Any, named: Mapping[str, Mapping[str, Any]], name: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The constructor's defaults, then a named configuration or a folder's, then ``given``, every key held to its
    parameters."""
    defaults = {key: p.default for key, p in list(inspect.signature(parameters.__init__).parameters.items())[1:]}
    laid = {} if name is None else named.get(name) or _of_folder(model, parameters, named, name)
    known = list(defaults)
    for key in (*laid, *given):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            suggestion = f"did you mean `{near[0]}`?" if near else f"the keys are {', '.join(known)}"
            raise user_error(f"`{model}` has no configuration key `{key}`", label="no such key", help=suggestion)
    return {**defaults, **laid, **given}


def _of_folder(model: str, parameters: Any, named: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The configuration in a folder of pretrained weights. Raises ``UserError`` for none, and for another class's."""
    folder = Path(name)
    if not folder.is_dir() and "/" not in name:
        near = difflib.get_close_matches(name, named, n=1)
        suggestion = f"did you mean `{near[0]}`?" if near else ""
        raise user_error(
            f"there is no configuration named `{name}`",
            label=suggestion,
            help=f"the names are {', '.join(named)}; or give a folder of pretrained weights, or keywords",
        )
    config = read_config(model_folder(folder))
    kind = config.get("_class_name")
    if not config or kind not in (None, parameters.__name__):
        reason = f", but a {kind}'s" if config else ""
        raise user_error(
            f"{name} has no config.json of a {model} transformer{reason}",
            help=(
                "give a folder that `save_pretrained` wrote, of the pipeline or of its transformer; an absolute path "
                "is there wherever ranks are started"
            ),
        )
    return {key: value for key, value in config.items() if not key.startswith("_")}


def strides_of(folder: str | None, usual: tuple[int, int, int] = (4, 8, 8)) -> tuple[int, int, int]:
    """Pixels a latent along time, height and width, as the VAE of a pipeline's folder says; else as ``usual``."""
    config = read_config(pipeline / "vae") if (pipeline := _pipeline_of(folder)) else {}
    time = next((config[key] for key in ("scale_factor_temporal", "temporal_compression_ratio") if config.get(key)), 0)
    space = next((config[key] for key in ("scale_factor_spatial", "spatial_compression_ratio") if config.get(key)), 0)
    return int(time) or usual[0], int(space) or usual[1], int(space) or usual[2]


def noise_levels_of(folder: str | None) -> tuple[float, float]:
    """The noise levels that the model of a folder is for: of two experts, as the ``boundary_ratio`` divides them."""
    pipeline = _pipeline_of(folder)
    boundary = None if pipeline is None else read_json_object(pipeline / INDEX).get("boundary_ratio")
    if not isinstance(boundary, int | float) or not 0 < boundary < 1:
        return 0.0, 1.0
    low = model_folder(Path(str(folder))).absolute().name == LOW_NOISE
    return (0.0, float(boundary)) if low else (float(boundary), 1.0)


def _pipeline_of(folder: str | None) -> Path | None:
    return pipeline_folder(Path(folder)) if folder is not None and Path(folder).is_dir() else None


def scheduler_config(folder: Path | None) -> dict[str, Any]:
    """Of a pipeline's folder, or of the folder that a transformer's lies in; empty without."""
    places = () if folder is None else (folder, folder.parent)
    path = next((p for place in places if (p := place / "scheduler" / "scheduler_config.json").is_file()), None)
    return {} if path is None else read_json_object(path)


def folder_of(name: str | None) -> Path | None:
    """The folder that a configuration's name is; None where it is a name."""
    return Path(name) if name is not None and Path(name).is_dir() else None


def is_of_pipeline(folder: Path) -> bool:
    """Whether a folder is a pipeline's, or the transformer of one, with its tokenizer."""
    return any((place / "tokenizer").is_dir() for place in (folder, folder.parent))


def latents(clip: VideoClip, geometry: Geometry) -> Tensor:
    """``[1, channels, frames, height, width]``: the VAE encoder's output, precomputed, or synthetic.

    Synthetic latents are unit Gaussian noise seeded by the clip's id alone: the same data in every step. They stand in
    for a clip that has no video, to plan and to measure, not to learn from.
    """
    shape = (1, *geometry.latent_shape(clip))
    if "vae" in clip.encoded:
        encoded = clip.encoded["vae"]
    elif clip.path is not None and clip.path.suffix == ".safetensors":
        encoded = _precomputed(clip, clip.path, shape)
    else:
        return synthetic(shape, f"latents/{clip.id}")
    if tuple(encoded.shape) != shape:
        pixels = [n * p * s for n, p, s in zip(geometry.patches(clip), geometry.patch, geometry.stride, strict=True)]
        frames = pixels[0] - geometry.stride[0] + 1  # a causal VAE makes the first latent frame from one frame
        found, expected = (" x ".join(map(str, sizes)) for sizes in (encoded.shape, shape))
        raise user_error(
            f"the latents of clip `{clip.name}` are {found}, expected {expected}",
            help=f"encode the clip at {frames} x {pixels[1]} x {pixels[2]} pixels, as channels x frames x height x "
            "width",
        )
    return encoded


def text_embeddings(clip: VideoClip, model: str, width: int, length: int | None) -> tuple[Tensor, int]:
    """``[1, T, width]`` and how many of the T are the caption's.

    T is the clip's ``text_tokens``, or ``length``, to which shorter captions are padded with zeros. The embeddings are
    the text encoder's output; without one they are Gaussian noise seeded by the caption (or the clip's id).
    """
    real = clip.text_tokens
    if real < 1:
        raise user_error(
            f"clip `{clip.name}` has no text tokens, and {model} attends to text",
            help="give the clip a caption (an empty one has 1 token) or `text_tokens` of at least 1",
        )
    if length is not None and real > length:
        raise user_error(
            f"clip `{clip.name}` has {real} text tokens, and {model} takes {length}",
            help="correct its `text_tokens`, or raise `text_length`",
        )
    if "text" in clip.encoded:
        encoded = clip.encoded["text"]
        real = encoded.shape[1]
    else:
        encoded = synthetic((1, real, width), f"text/{clip.id if clip.caption is None else clip.caption}")
    if length is not None and length > real:
        encoded = torch.cat([encoded, encoded.new_zeros(1, length - real, encoded.shape[2])], dim=1)
    return encoded, real


def shown_text(text: Tensor) -> Tensor:
    """bool ``[1, T]``: which embeddings are a caption's. Padding is zero, by the encoder or by ``text_embeddings``."""
    return (text != 0).any(-1)


def pooled_text(clip: VideoClip, width: int) -> Tensor:
    """``[1, width]``: the output of the encoder named ``pooled``, or noise seeded by the caption (or the clip's id)."""
    if "pooled" in clip.encoded:
        return clip.encoded["pooled"]
    return synthetic((1, width), f"pooled/{clip.id if clip.caption is None else clip.caption}")


def flow_matching(
    x0: Tensor,
    generator: torch.Generator,
    timesteps: Timesteps = UNIFORM,
    tokens: int = 1,
    levels: tuple[float, float] = (0.0, 1.0),
) -> tuple[Tensor, Tensor, Tensor]:
    """One training point on the straight path from data to noise (Flow Matching, arXiv 2210.02747).

    t is drawn as ``timesteps`` say for a clip of so many tokens, from the ``levels`` that the model is for;
    x_t = (1 - t) x0 + t noise; the target is the path's velocity, noise - x0. Returns x_t, the timestep 1000 t of shape
    [1], and the target.
    """
    t = draw_time(timesteps, tokens, generator, levels)
    noise = draw_normal(x0.shape, generator)
    return (1 - t) * x0 + t * noise, 1000 * t, noise - x0


def timesteps_of(clip: object) -> Timesteps:
    """How the noise level of a clip is to be drawn; of a clip that is not ours, uniformly."""
    given: Timesteps = getattr(clip, "timesteps", UNIFORM)
    return given


def draw_time(
    timesteps: Timesteps, tokens: int, generator: torch.Generator, levels: tuple[float, float] = (0.0, 1.0)
) -> Tensor:
    """float32 ``[1]`` on [0, 1]: the noise level of a clip of so many tokens, by a model that is for these ``levels``
    where ``timesteps`` do not give others."""
    factor = timesteps.factor(tokens)
    low, high = timesteps.levels or levels
    if timesteps.sampling == "uniform":
        t = draw_uniform(generator)
        if (low, high) != (0.0, 1.0):
            first, last = _unshifted(low, factor), _unshifted(high, factor)
            t = first + (last - first) * t
    else:
        z = draw_normal((1,), generator)
        if (low, high) != (0.0, 1.0):
            z = _between(z, *((_logit(_unshifted(t, factor)) - timesteps.mean) / timesteps.std for t in (low, high)))
        t = torch.sigmoid(timesteps.mean + timesteps.std * z)
    t = t if factor == 1.0 else factor * t / (1 + (factor - 1) * t)
    return t if (low, high) == (0.0, 1.0) else t.clamp(low, high)


def _unshifted(t: float, factor: float) -> float:
    """Which noise level is shifted to ``t``."""
    return t / (factor - (factor - 1) * t)


def _logit(t: float) -> float:
    return math.log(t / (1 - t)) if 0 < t < 1 else (t - 0.5) * math.inf


def _between(z: Tensor, low: float, high: float) -> Tensor:
    """A standard normal number as one of those between ``low`` and ``high``, at the same quantile."""
    below, above = (torch.special.ndtr(torch.tensor(edge, dtype=torch.float64)) for edge in (low, high))
    quantile = below + (above - below) * torch.special.ndtr(z.double())
    bounded: Tensor = torch.special.ndtri(quantile).clamp(low, high).float()
    return bounded


def draw_normal(shape: tuple[int, ...] | torch.Size, generator: torch.Generator) -> Tensor:
    """Standard normal float32 on the generator's device; while planning, a shape and no draw."""
    if planning():
        return torch.empty(shape, dtype=torch.float32)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)


def draw_uniform(generator: torch.Generator) -> Tensor:
    """float32 ``[1]`` on [0, 1)."""
    if planning():
        return torch.empty(1, dtype=torch.float32)
    return torch.rand(1, generator=generator, dtype=torch.float32, device=generator.device)


def synthetic(shape: tuple[int, ...], name: str) -> Tensor:
    """Standard normal float32 that depends on ``name`` and nothing else."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
    return draw_normal(shape, torch.Generator("cpu").manual_seed(seed))


def planning() -> bool:
    """Whether tensors made here have a shape and no values: on the meta device, or under a mode that fakes them."""
    placeholder = torch.empty(0)
    return placeholder.is_meta or type(placeholder) is not Tensor


def mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Scalar, in float32 whatever the model's precision."""
    return torch.nn.functional.mse_loss(prediction.float(), target.float())


def _precomputed(clip: VideoClip, path: Path, shape: tuple[int, ...]) -> Tensor:
    from safetensors import SafetensorError, safe_open

    if planning():
        return torch.empty(shape)
    try:
        with safe_open(path, framework="pt") as file:
            stored: Tensor = file.get_tensor("latents").float()
    except (SafetensorError, OSError) as error:
        raise user_error(
            f"the latents `{path}` of clip `{clip.name}` cannot be read: {str(error).splitlines()[0]}",
            help="a .safetensors file of latents has one tensor named `latents`",
        ) from None
    return stored if stored.ndim == 5 else stored[None]
