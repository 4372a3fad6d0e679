"""What lets the clips of a batch change each other is told from numbers, and the argument that does it by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.tracing.batch_trial import ClipsMixed, demand_clips_apart
from arachnec.tracing.errors import RandomOperation
from arachnec.tracing.record import ExampleCall
from arachnec.tracing.sample import arguments_of

CLIP = VideoClip(7, 9, 32, 32, 5)
Read = Callable[..., Tensor]


def per_clip(x: Tensor, levels: Tensor) -> Tensor:
    return x + levels[:, None, None]


def by_table(x: Tensor, levels: Tensor) -> Tensor:
    """Every row names the first of a table of levels: a batch makes the table longer, and nobody reads the rest."""
    return x + levels[torch.zeros(x.shape[1], dtype=torch.int64)][None, :, None]


def centred(x: Tensor, levels: Tensor) -> Tensor:
    return per_clip(x, levels) - x.mean(0)


def by_chance(x: Tensor, levels: Tensor) -> Tensor:
    return per_clip(x, levels) + torch.rand(1)


def chance_unused(x: Tensor, levels: Tensor) -> Tensor:
    torch.rand(1)
    return per_clip(x, levels)


def one_only(x: Tensor, levels: Tensor) -> Tensor:
    return x + float(levels.view(()))


def branching(x: Tensor, levels: Tensor) -> Tensor:
    return per_clip(x, levels) * (2 if levels[0] > 0.5 else 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.linear(x)


class Model(nn.Module):
    """What it reads goes through a gate that begins at zero: with the weights of its own, nothing would be seen."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read, self.blocks = read, nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Parameter(torch.zeros(4))

    def forward(self, video: Tensor, levels: Tensor, scale: float) -> Tensor:
        x = self.read(video, levels) * scale
        for block in self.blocks:
            x = block(x)
        return x * self.head


def sample(clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
    video = torch.randn(1, clip.frames * 2, 4, generator=generator)
    return {"video": video, "levels": torch.rand(1, generator=generator), "scale": 0.5}, video


def of_files(clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
    if type(torch.empty(0)) is Tensor:
        raise FileNotFoundError(f"{clip.id}.safetensors")
    return sample(clip, generator)


def mean(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean()


def summed(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().sum()


def apart(read: Read, loss: Callable[..., Tensor] | None = mean, sample: Callable[..., object] = sample) -> str | None:
    with torch.device("meta"):
        model = Model(read)
    source = SimpleNamespace(build=None, sample=sample, encoders=None, loss=loss)
    arguments = arguments_of(source, CLIP, {}, device="meta")
    call = ExampleCall(arguments, (CLIP.frames, CLIP.height, CLIP.width), 1, CLIP.text_tokens)
    return demand_clips_apart(model, source, call, CLIP, {})


def one_clips(prediction: Tensor, target: Tensor) -> Tensor:
    if len(prediction) > 1:
        raise ValueError("one clip at a time")
    return mean(prediction, target)


@pytest.mark.parametrize("loss", [mean, None])
@pytest.mark.parametrize("read", [per_clip, chance_unused])
def test_a_model_that_keeps_clips_apart_passes(read: Read, loss: Callable[..., Tensor] | None) -> None:
    assert apart(read, loss) is None


@pytest.mark.parametrize(
    ("read", "loss", "says"),
    [
        (by_table, mean, "(`levels` has a first dimension of 1 and is no value of its clip)"),
        (centred, mean, "the prediction differs by"),
        (branching, mean, "`levels` has a first dimension of 1"),
        (one_only, mean, "together they raise RuntimeError"),
        (per_clip, summed, "their loss is"),
        (per_clip, one_clips, "their loss raises ValueError: one clip at a time, that of each alone does not"),
    ],
)
def test_clips_that_change_each_other_are_told(read: Read, loss: Callable[..., Tensor], says: str) -> None:
    with pytest.raises(UserError) as refused:
        apart(read, loss)
    assert [type(diagnostic) for diagnostic in refused.value.diagnostics] == [ClipsMixed]
    assert says in str(refused.value)


def test_a_sample_that_reads_files_is_drawn_in_its_shapes() -> None:
    assert apart(per_clip, sample=of_files) is None
    with pytest.raises(UserError, match="levels"):
        apart(by_table, sample=of_files)


def test_a_prediction_drawn_at_random_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        apart(by_chance)
    assert [type(diagnostic) for diagnostic in refused.value.diagnostics] == [RandomOperation]


def test_what_cannot_be_run_is_said() -> None:
    def fails(prediction: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss today")

    assert apart(per_clip, fails) == "loss() raises ValueError: no loss today"
    assert "not finite" in str(apart(lambda x, levels: per_clip(x, levels) / 0))
