"""Small video transformers of many kinds, and calls of them, for the tests of sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arachnec.tracing.record import ExampleCall

WIDTH, HEADS = 12, 3


@dataclass(frozen=True)
class Size:
    """Latent frames, height and width, text tokens, clips."""

    frames: int = 2
    height: int = 6
    width: int = 8
    text: int = 7
    batch: int = 2


@dataclass(frozen=True)
class ModelCase:
    """``text`` says whether the caption's length may vary; ``tokens`` are those of one clip. ``only`` is the one clip
    shape that the graphs are for, where they are not for all."""

    build: Callable[[], nn.Module]
    arguments: Callable[[Size], dict[str, Any]]
    tokens: Callable[[Size], int]
    text: bool = True
    only: Size | None = None

    @property
    def at(self) -> list[ExampleCall]:
        if self.only is None:
            return []
        s = self.only
        clip = s.frames, s.height, s.width
        return [ExampleCall(self.arguments(replace(s, batch=b)), clip, b, s.text) for b in (2, 3)]

    def examples(self) -> list[ExampleCall]:
        sizes = [Size(), Size(3, 4, 10), Size(text=9), Size(batch=3), Size(3, 6, 10, 11, 5)]
        if not self.text:
            sizes = [Size(s.frames, s.height, s.width, 7, s.batch) for s in sizes]
        return [ExampleCall(self.arguments(s), (s.frames, s.height, s.width), s.batch, s.text) for s in sizes]


def randomised(model: nn.Module) -> nn.Module:
    """Gates and modulations often start at zero: what is dropped or computed wrongly there would go unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def patched(size: Size) -> int:
    return size.frames * (size.height // 2) * (size.width // 2)


def unpatched(size: Size) -> int:
    return size.frames * size.height * size.width


def seeded(size: Size) -> torch.Generator:
    return torch.Generator().manual_seed(hash((size.frames, size.height, size.width, size.text, size.batch)) % 1000)


# Diffusers


def wan(heads: int) -> ModelCase:
    def build() -> nn.Module:
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8,
            ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
        )  # fmt: skip

    def arguments(s: Size) -> dict[str, Any]:
        g = seeded(s)
        return {
            "hidden_states": torch.randn(s.batch, 4, s.frames, s.height, s.width, generator=g),
            "timestep": torch.randint(0, 1000, (s.batch,), generator=g),
            "encoder_hidden_states": torch.randn(s.batch, s.text, 8, generator=g),
            "return_dict": False,
        }

    return ModelCase(build, arguments, patched)


def cogvideox(rotary: bool) -> ModelCase:
    def build() -> nn.Module:
        from diffusers import CogVideoXTransformer3DModel

        return CogVideoXTransformer3DModel(
            num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=8, num_layers=2, sample_width=8, sample_height=6, sample_frames=5, max_text_seq_length=7,
            use_rotary_positional_embeddings=rotary,
        )  # fmt: skip

    def arguments(s: Size) -> dict[str, Any]:
        g = seeded(s)
        given: dict[str, Any] = {
            "hidden_states": torch.randn(s.batch, s.frames, 4, s.height, s.width, generator=g),
            "timestep": torch.randint(0, 1000, (s.batch,), generator=g),
            "encoder_hidden_states": torch.randn(s.batch, s.text, 8, generator=g),
            "return_dict": False,
        }
        if rotary:
            angles = torch.randn(patched(s), 16, generator=g)
            given["image_rotary_emb"] = (angles.cos(), angles.sin())
        return given

    return ModelCase(build, arguments, patched, text=rotary)


def hunyuan_video() -> ModelCase:
    def build() -> nn.Module:
        from diffusers import HunyuanVideoTransformer3DModel

        return HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=8, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, mlp_ratio=2, text_embed_dim=8, pooled_projection_dim=8,
            rope_axes_dim=(2, 2, 4),
        )  # fmt: skip

    def arguments(s: Size) -> dict[str, Any]:
        g = seeded(s)
        mask = torch.ones(s.batch, s.text, dtype=torch.long)
        mask[-1, s.text - 2 :] = 0  # one caption is shorter than the other
        return {
            "hidden_states": torch.randn(s.batch, 4, s.frames, s.height, s.width, generator=g),
            "timestep": torch.randint(0, 1000, (s.batch,), generator=g),
            "encoder_hidden_states": torch.randn(s.batch, s.text, 8, generator=g),
            "encoder_attention_mask": mask,
            "pooled_projections": torch.randn(s.batch, 8, generator=g),
            "guidance": torch.full((s.batch,), 6.0),
            "return_dict": False,
        }

    return ModelCase(build, arguments, patched)


def ltx_video() -> ModelCase:
    def build() -> nn.Module:
        from diffusers import LTXVideoTransformer3DModel

        return LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=8, cross_attention_dim=24,
            num_layers=2, caption_channels=8,
        )  # fmt: skip

    def arguments(s: Size) -> dict[str, Any]:
        g = seeded(s)
        mask = torch.ones(s.batch, s.text)
        mask[-1, s.text - 2 :] = 0
        return {
            "hidden_states": torch.randn(s.batch, unpatched(s), 8, generator=g),
            "timestep": torch.randint(0, 1000, (s.batch,), generator=g),
            "encoder_hidden_states": torch.randn(s.batch, s.text, 8, generator=g),
            "encoder_attention_mask": mask,
            "num_frames": s.frames,
            "height": s.height,
            "width": s.width,
            "return_dict": False,
        }

    return ModelCase(build, arguments, unpatched)


# Written by a user who knows nothing of Diffusers


def split_heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, HEADS, x.shape[-1] // HEADS).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class FusedBlock(nn.Module):
    """One projection for query, key and value, torch's own attention, a learned table of positions beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        return join_heads(F.scaled_dot_product_attention(q, k, v))

    def forward(self, x: Tensor, time: Tensor, text: Tensor, places: Tensor) -> Tensor:
        scale, shift, gate = time[:, None].chunk(3, dim=-1)
        x = x + gate * self.out(self.attend(self.norm1(x + places) * (1 + scale) + shift))
        x = x + self.cross(x, text, text, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class WrittenOutBlock(FusedBlock):
    """Attention as two matrix products, over a batch that is merged with the heads."""

    def attend(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = (t.reshape(b * HEADS, s, c // HEADS) for t in (q, k, v))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * (c // HEADS) ** -0.5, dim=-1)
        return join_heads(torch.bmm(weights, v).view(b, HEADS, s, c // HEADS))


class SelfMultiheadBlock(FusedBlock):
    """``nn.MultiheadAttention`` over the tokens, and rows of all clips in one matrix for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        y = self.attention(x, x, x, need_weights=False)[0]
        rows = self.qkv(y.reshape(b * s, c))
        return rows.view(b, s, 3, c).mean(2)


class ConvolvedBlock(FusedBlock):
    """Neighbouring tokens are mixed by a convolution, and all of them by a mean: what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def attend(self, x: Tensor) -> Tensor:
        mixed = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        positions = torch.arange(x.shape[1], device=x.device) / x.shape[1]
        return super().attend(mixed) + x.mean(dim=1, keepdim=True) + positions[:, None]


class JoinedBlock(FusedBlock):
    """Text and video come as one sequence, whose video part only is rotated."""

    def forward(self, x: Tensor, time: Tensor, text: Tensor, places: Tensor) -> Tensor:
        scale, shift, gate = time[:, None].chunk(3, dim=-1)
        x = x + gate * self.out(self.attend(self.norm1(x) * (1 + scale) + shift))
        return x + self.mlp(self.norm2(x))


class PlainModel(nn.Module):
    def __init__(self, block: type[nn.Module], joined: bool = False) -> None:
        super().__init__()
        self.joined = joined
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.time, self.text = nn.Linear(1, 3 * WIDTH), nn.Linear(8, WIDTH)
        self.place = nn.Parameter(torch.randn(1, 400, WIDTH))
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, video: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.embed(video.flatten(2).transpose(1, 2))
        t, text = self.time(time[:, None]), self.text(text)
        places = self.place[:, : x.shape[1]]
        count = x.shape[1]
        if self.joined:
            x = torch.cat([text, x], dim=1)
        for layer in self.layers:
            x = layer(x, t, text=text, places=places)
        return self.head(x[:, -count:]).transpose(1, 2).reshape(video.shape)


class LongSkipBlock(FusedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if skip is not None:
            x = self.merge(torch.cat([x, skip], dim=-1))
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class LongSkipModel(nn.Module):
    """U-ViT (arXiv 2209.12152): the way down is joined to the way up; ``outside`` joins it between the blocks."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside = outside
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.merge = nn.Linear(2 * WIDTH, WIDTH)
        self.down = nn.ModuleList(LongSkipBlock() for _ in range(2))
        self.middle = nn.ModuleList([LongSkipBlock()])
        self.up = nn.ModuleList(LongSkipBlock() for _ in range(2))

    def forward(self, video: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.embed(video.flatten(2).transpose(1, 2)) * time[:, None, None]
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        x = self.middle[0](x)
        for layer in self.up:
            x = self._up(layer, x, skips.pop())
        return self.head(x).transpose(1, 2).reshape(video.shape)

    def _up(self, layer: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
        if self.outside:
            return layer(self.merge(torch.cat([x, skip], dim=-1)))
        return layer(x, skip)


class PlainBlock(FusedBlock):
    """Attends along the last dimension but one, whatever lies before it."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class FoldingBlock(PlainBlock):
    """Over the places of a frame, then over the frames of a place, by a number of frames that it is given."""

    def forward(self, x: Tensor, frames: int) -> Tensor:  # type: ignore[override]
        b, s, c = x.shape
        x = x.reshape(b * frames, s // frames, c)
        x = super().forward(x).reshape(b, frames, s // frames, c).transpose(1, 2).flatten(0, 1)
        x = x + self.out(self.attend(self.norm1(x)))
        return x.unflatten(0, (b, s // frames)).transpose(1, 2).reshape(b, s, c)


class GridBlock(PlainBlock):
    """[B, F, H, W, C] all the way; attention over all of it."""

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x.flatten(1, 3)).unflatten(1, x.shape[1:4])


class FactorisedModel(nn.Module):
    """Frames and places as two dimensions: folded by the blocks, by the shell around them (Latte, arXiv 2401.03048),
    or not at all."""

    def __init__(self, fold: str) -> None:
        super().__init__()
        self.fold = fold
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.time = nn.Linear(1, WIDTH)
        block = {"blocks": FoldingBlock, "shell": PlainBlock, "grid": GridBlock}[fold]
        self.layers = nn.ModuleList(block() for _ in range(4 if fold == "shell" else 2))

    def forward(self, video: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.embed(video.movedim(1, -1)) + self.time(time[:, None])[:, None, None, None]
        b, f, h, w, c = x.shape
        if self.fold == "grid":
            for layer in self.layers:
                x = layer(x)
        elif self.fold == "blocks":
            x = x.flatten(1, 3)
            for layer in self.layers:
                x = layer(x, f)
        else:
            for over_places, over_frames in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = over_places(x.reshape(b * f, h * w, c)).reshape(b, f, h * w, c).permute(0, 2, 1, 3)
                x = over_frames(x.reshape(b * h * w, f, c)).reshape(b, h * w, f, c).permute(0, 2, 1, 3)
        return self.head(x.reshape(b, f, h, w, c)).movedim(-1, 1)


def factorised(fold: str) -> ModelCase:
    case = user_written(lambda: FactorisedModel(fold), text=False)
    return replace(case, only=Size(3, 4, 6)) if fold == "blocks" else case


def user_written(build: Callable[[], nn.Module], text: bool = True) -> ModelCase:
    def arguments(s: Size) -> dict[str, Any]:
        g = seeded(s)
        return {
            "video": torch.randn(s.batch, s.frames, s.height, s.width, 4, generator=g).movedim(-1, 1),
            "time": torch.rand(s.batch, generator=g),
            "text": torch.randn(s.batch, s.text, 8, generator=g),
        }

    return ModelCase(build, arguments, unpatched, text)


MODELS = {
    "wan-3-heads": wan(3),
    "wan-12-heads": wan(12),
    "cogvideox-sincos": cogvideox(rotary=False),
    "cogvideox-rotary": cogvideox(rotary=True),
    "hunyuan-video": hunyuan_video(),
    "ltx-video": ltx_video(),
    "plain": user_written(lambda: PlainModel(FusedBlock)),
    "written-out": user_written(lambda: PlainModel(WrittenOutBlock)),
    "multihead": user_written(lambda: PlainModel(SelfMultiheadBlock)),
    "convolved": user_written(lambda: PlainModel(ConvolvedBlock)),
    "joined": user_written(lambda: PlainModel(JoinedBlock, joined=True)),
    "factorised-by-blocks": factorised("blocks"),
    "factorised-by-shell": factorised("shell"),
    "grid": factorised("grid"),
    "long-skip": user_written(lambda: LongSkipModel(outside=False), text=False),
    "long-skip-outside": user_written(lambda: LongSkipModel(outside=True), text=False),
}
