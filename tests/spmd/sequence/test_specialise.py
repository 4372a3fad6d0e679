"""Which step down a model takes, what it is told about its cost, and what no step gets round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.passes.trace import Trace, trace_model

CLIPS = (VideoClip(0, 17, 64, 96, 8), VideoClip(1, 33, 128, 96, 12))


class Block(nn.Module):
    def __init__(self, twist: Callable[..., Tensor]) -> None:
        super().__init__()
        self.twist, self.linear = twist, nn.Linear(8, 8)

    def forward(self, x: Tensor, frames: int) -> Tensor:
        q = self.linear(x)[:, None]
        x = x + nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]
        return self.twist(x, frames)


class Model(nn.Module):
    def __init__(self, twist: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(twist) for _ in range(2))

    def forward(self, video: Tensor) -> Tensor:
        x = self.embed(video.flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x, video.shape[2])
        return x


class Source:
    encoders = loss = None

    def __init__(self, twist: Callable[..., Tensor]) -> None:
        self.twist = twist

    def build(self) -> nn.Module:
        return Model(self.twist)

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
        video = torch.randn(1, 4, (clip.frames - 1) // 4 + 1, clip.height // 8, clip.width // 8, generator=generator)
        return {"video": video}, video


def one_by_one(x: Tensor, frames: int) -> Tensor:
    return torch.cat([row[None] * 2 for row in x])


def by_frames(x: Tensor, frames: int) -> Tensor:
    return (x.unflatten(1, (frames, -1)) + x.unflatten(1, (frames, -1)).mean(1, keepdim=True)).flatten(1, 2)


def centred(x: Tensor, frames: int) -> Tensor:
    return x - x.mean(0)


def by_values(x: Tensor, frames: int) -> Tensor:
    return x * 2 if bool(x.isfinite().all()) else x * 3


def by_chance(x: Tensor, frames: int) -> Tensor:
    return by_values(x, frames) + torch.rand(1)


class OneClipWithGrid(Model):
    """Takes one clip alone, and its blocks read a grid as numbers, as Wan2.2's own file does."""

    def forward(self, video: Tensor, time: Tensor, grid: Tensor) -> Tensor:
        x = self.embed(video.flatten(2).transpose(1, 2))
        x = x + time.expand(len(time), x.shape[1])[..., None]  # right for one clip only
        for block in self.blocks:
            x = block(x, grid)
        return x


class NoList(Model):
    """Its blocks stand in no list."""

    def __init__(self) -> None:
        super().__init__(lambda x, frames: x)
        self.first, self.second = self.blocks
        del self.blocks

    def forward(self, video: Tensor) -> Tensor:
        x = self.embed(video.flatten(2).transpose(1, 2))
        return self.second(self.first(x, 1), 1)


class RewritesArgument(Model):
    """Its blocks leave what they compute in a list that they are given."""

    def forward(self, video: Tensor) -> Tensor:
        carried = [self.embed(video.flatten(2).transpose(1, 2))]
        for block in self.blocks:
            block(carried)
        return carried[0]


class Writer(Block):
    def forward(self, carried: list[Tensor]) -> None:  # type: ignore[override]
        carried[0] = super().forward(carried[0], 1)


class Whole(Source):
    def __init__(self, model: Callable[[], nn.Module], *more: str) -> None:
        self.model, self.more = model, more

    def build(self) -> nn.Module:
        return self.model()

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
        arguments, target = super().sample(clip, generator)
        more = {"time": torch.rand(1, generator=generator), "grid": torch.tensor([list(target.shape[2:])])}
        return {**arguments, **{name: more[name] for name in self.more}}, target


def one_clip_with_grid() -> nn.Module:
    return OneClipWithGrid(lambda x, grid: x + torch.linspace(0, 1, math.prod(grid.tolist()[0]))[None, :, None])


def writers() -> nn.Module:
    model = RewritesArgument(lambda x, frames: x)
    model.blocks = nn.ModuleList(Writer(lambda x, frames: x) for _ in range(2))
    return model


@pytest.mark.parametrize(
    ("source", "most", "layers"),
    [
        pytest.param(Whole(one_clip_with_grid, "time", "grid"), 1, 2, id="one clip alone, a grid as numbers"),
        pytest.param(Whole(NoList), None, 0, id="no list of blocks"),
        pytest.param(Whole(writers), None, 2, id="blocks that write into their argument"),
    ],
)
def test_what_no_graph_serves_runs_whole_on_one_rank(source: Whole, most: int | None, layers: int) -> None:
    trace = trace_model(source, CLIPS)
    attrs = trace.stages[-1].attrs
    assert (attrs["graphs"], attrs["degrees"], attrs.get("most_clips")) == ("none", (1,), most)
    assert len(attrs["layers"]) == layers  # type: ignore[arg-type]
    assert "degree 1 only, so a clip must fit one device" in trace.limits[0]
    assert [trace.tokens(clip) for clip in CLIPS] == [5 * 8 * 12, 9 * 16 * 12]


def traced(twist: Callable[..., Tensor]) -> Trace:
    return trace_model(Source(twist), CLIPS)


@pytest.mark.parametrize(
    ("twist", "says", "cost"),
    [
        (one_by_one, {"most_clips": 1}, "a forward takes one clip (torch.export cannot capture Block"),
        (centred, {"most_clips": 1}, "a forward takes one clip (two clips in a batch are not what they are alone"),
        (by_frames, {"graphs": "shapes"}, "every rank captures them again for each shape that it shares"),
        (by_values, {"graphs": "none", "degrees": (1,)}, "the blocks run whole on one rank"),
    ],
)
def test_a_model_takes_the_first_step_that_serves_it_and_is_told_its_cost(
    twist: Callable[..., Tensor], says: dict[str, object], cost: str
) -> None:
    trace = traced(twist)
    attrs = trace.stages[-1].attrs
    assert {name: attrs.get(name) for name in ("graphs", "most_clips", "degrees") if name in attrs} == says
    assert cost in trace.limits[0]
    assert [trace.tokens(clip) for clip in CLIPS] == [5 * 8 * 12, 9 * 16 * 12]


def test_a_stage_without_graphs_has_the_figures_of_the_model_run_as_a_whole() -> None:
    attrs = traced(by_values).stages[-1].attrs
    flops = attrs["flops"](B=1, S=480, T=8) * 1e12  # type: ignore[operator]
    linear, attention = 2 * 480 * (4 * 8 + 2 * 8 * 8), 2 * 4 * 480**2 * 8
    assert flops == pytest.approx(linear + attention, rel=1e-3)
    assert attrs["attentions"] == 2
    assert attrs["saved"](B=2, S=480, T=8) > attrs["saved_recompute"](B=2, S=480, T=8)  # type: ignore[operator]


def test_random_numbers_in_a_block_are_refused_at_every_step() -> None:
    with pytest.raises(UserError, match="draws random numbers of its own"):
        traced(by_chance)
