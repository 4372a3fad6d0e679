"""Encoders of a model file: pixels to latents, captions to embeddings.

``load`` reads an encoder's input for one clip, on the CPU; on the meta device it only makes the shape. ``forward`` runs
the network on a micro-batch of loaded clips, concatenated along dim 0. Neither draws random numbers, so an encoder's
output does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.data.header_check import disagreement
from arachnec.data.video import TooFewFrames, UnreadableVideo, read_frames, read_header
from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.models.caption_tokens import Tokenization
from arachnec.models.file import ModelFile

STATS = ("latents_mean", "latents_std")


def unknown_scale_error(vae: str, reason: str) -> UserError:
    return user_error(
        f"how latents of {vae} are scaled is not known here: {reason}",
        help=(
            "write an encoder of your own: a module with load(clip, device) and forward(loaded), which "
            "scales latents as the model's pipeline does: docs/your_model.md"
        ),
    )


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Latents ``[B, channels, frames, height, width]`` as the transformer takes them: the posterior's mode, scaled.

    A VAE of images encodes frame by frame. Raises ``UserError`` for a VAE that is unlike all of Diffusers'.
    """
    frames = pixels.shape[2]
    videos = _takes_videos(vae)
    given = vae.encode(pixels if videos else pixels.transpose(1, 2).flatten(0, 1))
    if hasattr(given, "latent_dist"):
        latents: Tensor = given.latent_dist.mode()
    elif hasattr(given, "latent"):
        latents = given.latent
    else:
        raise user_error(
            f"{type(vae).__name__}.encode() gives {type(given).__name__}, which has no `latent_dist` and no `latent`",
            help=(
                "write an encoder of your own: a module with load(clip, device) and forward(loaded): docs/your_model.md"
            ),
        )
    if not videos:
        latents = _videos(latents, frames)
    mean, std, factor = _scale(vae, latents)
    return (latents - mean) / std * factor


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pixels ``[B, 3, frames, height, width]`` of latents as the transformer gives them."""
    mean, std, factor = _scale(vae, latents)
    latents = latents * (std / factor) + mean
    if not _takes_videos(vae):
        return _videos(vae.decode(latents.transpose(1, 2).flatten(0, 1)).sample, latents.shape[2])
    if _config(vae, "timestep_conditioning"):
        # LTX's pipeline decodes at time zero, without noise, where nothing else is asked for.
        timed: Tensor = vae.decode(latents, latents.new_zeros(len(latents))).sample
        return timed
    pixels: Tensor = vae.decode(latents).sample
    return pixels


def _takes_videos(vae: nn.Module) -> bool:
    """Whether its encoder has a third dimension: a VAE of images takes frames as its batch."""
    encoder = getattr(vae, "encoder", None)
    layers = list(encoder.modules()) if isinstance(encoder, nn.Module) else []
    return any(isinstance(m, nn.Conv3d) for m in layers) or not any(isinstance(m, nn.Conv2d) for m in layers)


def _videos(images: Tensor, frames: int) -> Tensor:
    return images.reshape(-1, frames, *images.shape[1:]).transpose(1, 2)


def _scale(vae: nn.Module, latents: Tensor) -> tuple[Tensor | float, Tensor | float, float]:
    """Mean, standard deviation and factor. Raises ``UserError``.

    Every pipeline's way is ``(latents - mean) / std * factor``; VAEs differ in where these numbers lie.
    """
    if _config(vae, "batch_norm_eps") is not None:
        raise unknown_scale_error(type(vae).__name__, "it has a batch norm over patches")
    factor = float(_config(vae, "scaling_factor") or 1.0)
    # LTX's are weights, other VAEs' are settings.
    weights = dict(vae.named_buffers(recurse=False))
    mean, std = (weights[name] if name in weights else _config(vae, name) for name in STATS)
    if mean is None and std is None:
        return float(_config(vae, "shift_factor") or 0.0), 1.0, factor
    if mean is None or std is None:
        missing = STATS[0] if mean is None else STATS[1]
        raise unknown_scale_error(type(vae).__name__, f"it has no {missing}")
    return _per_channel(vae, mean, latents), _per_channel(vae, std, latents), factor


def _config(vae: nn.Module, name: str) -> Any:
    return getattr(getattr(vae, "config", None), name, None)


def _per_channel(vae: nn.Module, values: Any, latents: Tensor) -> Tensor:
    """``[1, channels, 1 or frames, 1, 1]``: Cosmos has a value for every channel and frame."""
    flat = torch.as_tensor(values).flatten()
    channels, frames = latents.shape[1:3]
    known = flat.numel() // channels
    if flat.numel() % channels or known not in (1, *range(frames, known + 1)):
        reason = f"{flat.numel()} values of {STATS[0]} and {STATS[1]} for {channels} channels and {frames} frames"
        raise unknown_scale_error(type(vae).__name__, reason)
    spread = flat.view(1, channels, known, 1, 1)[:, :, :frames]
    return spread.to(latents.device, latents.dtype)


Size = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True)
class FixedTiles:
    """Tiles of a VAE that has no other way to encode.

    Their ``tiled_encode`` takes one clip, and leaves zeros, without a word, where no whole tile lies. So a clip whose
    sizes are no tiles is refused before anything runs.
    """

    vae: str
    tile: Size
    stride: Size

    @classmethod
    def of(cls, vae: Any) -> FixedTiles | None:
        """Of a VAE, which is set to tiles; None where it encodes clips of any size."""
        tile, stride = getattr(vae, "kernel", None), getattr(vae, "stride", None)
        if not (_is_size(tile) and _is_size(stride) and hasattr(vae, "use_tiling")):
            return None
        vae.use_tiling = True  # it cannot encode otherwise
        return cls(type(vae).__name__, tile, stride)

    def demand(self, clip: VideoClip, size: Size) -> None:
        """Raises ``UserError`` for a clip that whole tiles do not cover."""
        fitting = tuple(_fitting(n, tile, step) for n, tile, step in zip(size, self.tile, self.stride, strict=True))
        if fitting != size:
            raise user_error(
                f"clip `{clip.name}`: {self.vae} encodes in tiles of {_told(self.tile)} (frames x height x width), a "
                f"new one every {_told(self.stride)}, and {_told(size)} is not covered by whole tiles",
                help=f"give the clip {_told(fitting)} in the manifest; what no tile covers would be latents of zeros",
            )


def _fitting(size: int, tile: int, stride: int) -> int:
    """The largest size, of at most this where there is one, that tiles cover."""
    return tile + max(0, size - tile) // stride * stride


def _is_size(value: Any) -> TypeGuard[Size]:
    return isinstance(value, tuple) and len(value) == 3 and all(isinstance(length, int) for length in value)


def _told(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def no_caption_error(clip: str | int) -> UserError:
    return user_error(
        f"clip `{clip}` has no caption, and the model file has a text encoder",
        help="give the clip a `caption`, or leave the encoder out of encoders() to use synthetic embeddings",
    )


@dataclass(frozen=True)
class WrongClip(Diagnostic):
    title = "clip `{clip}`: {reason}"
    help = "{remedy}"
    clip: str | int
    reason: str
    remedy: str


@dataclass(frozen=True)
class UnreadableClip(WrongClip):
    """Its file cannot be read, or ends early: nothing that the manifest says is wrong."""


def hold_against_header(clip: VideoClip, multiple: int = 16) -> None:
    """Raises ``UserError`` where a clip wants more of its video than there is (``disagreement``)."""
    if clip.path is None or clip.path.suffix == ".safetensors":
        return
    with _named(clip):
        wrong = disagreement(clip, read_header(clip.path), multiple)
    if wrong is not None:
        raise UserError(WrongClip(None, clip.name, *wrong))


@contextmanager
def _named(clip: VideoClip) -> Iterator[None]:
    """Has what goes wrong with a clip's file say which clip it is."""
    try:
        yield
    except UserError as error:
        file = all(isinstance(d, UnreadableVideo | TooFewFrames) for d in error.diagnostics)
        kind = UnreadableClip if file else WrongClip
        raise UserError(*(kind(None, clip.name, d.message, d.text(d.help)) for d in error.diagnostics)) from None


def running_encoders(model_file: ModelFile, names: Collection[str]) -> ModelFile:
    """The model file with the encoders ``names`` alone: the others ran beforehand, and take no memory."""
    build = model_file.encoders
    if build is None or not names:
        return replace(model_file, encoders=None)
    return replace(model_file, encoders=lambda: {name: e for name, e in build().items() if name in names})


def tiling_vae(encoder: nn.Module) -> nn.Module | None:
    """The module that is switched to tiles, by the names that all of Diffusers' VAEs use; None where there is none."""
    return next(
        (
            module
            for module in encoder.modules()
            if getattr(module, "use_tiling", False) is True and isinstance(getattr(module, "encoder", None), nn.Module)
        ),
        None,
    )


@contextmanager
def tiles_called(vae: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Whoever calls the VAE's ``encoder``, once a tile, calls this, with what it would have called."""
    module = vae.get_submodule("encoder")
    run = module.forward
    module.__dict__["forward"] = lambda *args, **kwargs: call(run, *args, **kwargs)
    try:
        yield
    finally:
        del module.__dict__["forward"]


class VideoEncoder(nn.Module):
    """A frozen Diffusers video VAE.

    ``multiple`` is what heights and widths are rounded up to before decoding: the VAE's spatial stride times the
    transformer's patch (an adapter's ``geometry.multiple``). A VAE that encodes in tiles of one size alone takes clips
    that whole tiles cover. ``factor`` multiplies scaled latents once more: Cosmos' scheduler has one, ``sigma_data``.
    """

    _tiles: FixedTiles | None = None

    def __init__(self, vae: nn.Module, multiple: int = 16, *, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.vae = vae.requires_grad_(False).eval()
        self.multiple = multiple
        self._tiles = FixedTiles.of(vae)

    def load(self, clip: VideoClip, device: torch.device | str) -> Tensor:
        """uint8 ``[1, 3, frames, height, width]``, sizes rounded up. Raises ``UserError`` for an unreadable video."""
        height, width = self._sizes(clip)
        if torch.device(device).type == "meta":
            return torch.empty((1, 3, clip.frames, height, width), dtype=torch.uint8, device=device)
        if clip.path is None:
            raise user_error(
                f"clip `{clip.name}` has no video, and the model file has a video encoder",
                help="give the clip a `path`, or leave the encoder out of encoders() to use synthetic latents",
            )
        self.check(clip)
        with _named(clip):
            sizes = clip.frames, height, width
            pixels = read_frames(clip.path, clip.start, *sizes, target_fps=clip.target_fps, stride=clip.stride)
        return pixels[None].to(device)

    def check(self, clip: VideoClip) -> None:
        """Hold a clip against the VAE's tiles and its video's header, without decoding. Raises ``UserError`` where they
        disagree."""
        if self._tiles is not None:
            self._tiles.demand(clip, (clip.frames, *self._sizes(clip)))
        hold_against_header(clip, self.multiple)

    def _sizes(self, clip: VideoClip) -> tuple[int, int]:
        """Height and width, rounded up."""
        return -(-clip.height // self.multiple) * self.multiple, -(-clip.width // self.multiple) * self.multiple

    @torch.no_grad()
    def forward(self, loaded: Tensor) -> Tensor:
        """Latents ``[B, channels, frames, height, width]``: the posterior's mode, scaled as the VAE's pipeline does."""
        pixels = loaded.to(next(self.vae.parameters()).dtype) / 127.5 - 1
        parts = [pixels] if self._tiles is None else torch.split(pixels, 1)
        return self.factor * torch.cat([encode(self.vae, part) for part in parts])


class TextEncoder(nn.Module):
    """A frozen transformers text encoder and its tokenizer.

    A caption becomes exactly the clip's ``text_tokens`` tokens: cut or padded where the tokenizer counts otherwise, so
    that what was planned is what runs. In a manifest without ``text_tokens`` captions are counted by the tokenizer, up
    to ``most``. Without ``masked`` padding is a token like others: then every caption has ``most``, where it is given.
    ``tidy`` is what the model's pipeline does to captions before.
    """

    def __init__(
        self,
        tokenizer: Any,
        model: nn.Module,
        *,
        masked: bool = True,
        tidy: Callable[[str], str] = str,
        most: int | None = None,
    ) -> None:
        super().__init__()
        self.tidy = tidy
        self.tokenizer = tokenizer
        self.masked = masked
        self.most = most
        self.model = model.requires_grad_(False).eval()

    @property
    def tokenization(self) -> Tokenization:
        return Tokenization(self.tokenizer, self.tidy, self.most, padded=not self.masked)

    def length(self, clip: VideoClip) -> int:
        """Tokens that the model is given."""
        return clip.text_tokens

    def load(self, clip: VideoClip, device: torch.device | str) -> Tensor:
        """int64 ``[1, 2, length]``: token ids and their attention mask. Raises ``UserError`` without a caption."""
        if torch.device(device).type == "meta":
            return torch.empty((1, 2, self.length(clip)), dtype=torch.int64, device=device)
        if clip.caption is None:
            raise no_caption_error(clip.name)
        tokens = self.tokenizer(
            self.tidy(clip.caption),
            padding="max_length", max_length=self.length(clip), truncation=True, return_tensors="pt",
        )  # fmt: skip
        return torch.stack([tokens["input_ids"], tokens["attention_mask"]], dim=1).to(device)

    @torch.no_grad()
    def forward(self, loaded: Tensor) -> Tensor:
        """The last hidden state ``[B, text_tokens, width]``; where ``masked``, zero at padding."""
        ids, mask = loaded.unbind(1)
        if not self.masked:
            plain: Tensor = self.model(input_ids=ids).last_hidden_state
            return plain
        # transformers looks at a mask's values, and on the meta device it has none.
        hidden: Tensor = self.model(input_ids=ids, attention_mask=None if mask.is_meta else mask).last_hidden_state
        return hidden * mask[..., None].to(hidden.dtype)
