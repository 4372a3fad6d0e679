"""What lets the clips of a batch change each other is told from numbers, and the argument that does it by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.tracing.clip_trials import ClipsMixed, demand_clips_apart
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


def by_coin(x: Tensor, levels: Tensor) -> Tensor:
    return per_clip(x, levels) * (random.random() < 0.5)


def by_numpy(x: Tensor, levels: Tensor) -> Tensor:
    return per_clip(x, levels) + float(np.random.rand())


def coin_unused(x: Tensor, levels: Tensor) -> Tensor:
    random.random()
    return per_clip(x, levels)


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


def either(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs().mean() if np.random.rand() < 0.5 else mean(prediction, target)


def apart(
    read: Read, loss: Callable[..., Tensor] | None = mean, sample: Callable[..., object] = sample,
    dtype: torch.dtype = torch.float32,
) -> str | None:  # fmt: skip
    with torch.device("meta"):
        model = Model(read).to(dtype)
    source = SimpleNamespace(build=None, sample=sample, encoders=None, loss=loss)
    arguments = arguments_of(source, CLIP, {}, device="meta")
    call = ExampleCall(arguments, (CLIP.frames, CLIP.height, CLIP.width), 1, CLIP.text_tokens)
    return demand_clips_apart(model, source, call, CLIP, {})


def one_clips(prediction: Tensor, target: Tensor) -> Tensor:
    if len(prediction) > 1:
        raise ValueError("one clip at a time")
    return mean(prediction, target)


@pytest.mark.parametrize("loss", [mean, None])
@pytest.mark.parametrize("read", [per_clip, chance_unused, coin_unused])
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


@pytest.mark.parametrize(
    ("read", "loss", "says"),
    [
        (by_chance, mean, "Model draws random numbers of its own (`aten.rand.default`)"),
        (by_coin, mean, "Model draws random numbers of its own (`random`)"),
        (by_numpy, mean, "Model draws random numbers of its own (`numpy.random`)"),
        (per_clip, either, "`loss` draws random numbers of its own (`numpy.random`)"),
    ],
)
def test_what_is_drawn_at_random_is_refused(read: Read, loss: Callable[..., Tensor], says: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()
    with pytest.raises(UserError) as refused:
        apart(read, loss)
    assert says in str(refused.value)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())


def fails(prediction: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no loss today")


def outside(x: Tensor, levels: Tensor) -> Tensor:
    """The last of a table's levels is one too far, which nobody sees in a shape."""
    return per_clip(x, levels) + torch.zeros(4)[torch.full((1,), 4)]


def refusing(kind: type[Exception], text: str) -> Read:
    def read(x: Tensor, levels: Tensor) -> Tensor:
        raise kind(text)

    return read


@pytest.mark.parametrize(
    ("read", "loss", "says"),
    [
        (per_clip, fails, "loss() raises ValueError: no loss today"),
        (outside, mean, "IndexError: index 4 is out of bounds"),
        (refusing(KeyError, "rope"), mean, "KeyError: 'rope'"),
        (refusing(RuntimeError, "expected scalar type Double"), mean, "RuntimeError: expected scalar type Double"),
    ],
)
def test_a_model_that_fails_with_its_own_values_is_told_with_the_clips_shape(
    read: Read, loss: Callable[..., Tensor], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        apart(read, loss)
    (told,) = refused.value.diagnostics
    assert told.message.startswith("the model fails on a clip of 9 x 32 x 32 with 5 text tokens: ")
    assert says in told.message


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (refusing(NotImplementedError, "no kernel for it"), "NotImplementedError: no kernel for it"),
        (refusing(ImportError, "no module named flash_attn"), "flash_attn"),
        (refusing(MemoryError, ""), "MemoryError"),
        (refusing(RuntimeError, "No CUDA GPUs are available"), "CUDA"),
        (lambda x, levels: per_clip(x, levels) / 0, "not finite"),
    ],
)
def test_what_only_this_machine_lacks_is_no_error_of_the_model(read: Read, says: str) -> None:
    assert says in str(apart(read))


def test_what_is_written_for_another_precision_is_not_held_to_float32() -> None:
    read = refusing(RuntimeError, "mat1 and mat2 must have the same dtype")
    assert "the same dtype" in str(apart(read, dtype=torch.bfloat16))
    with pytest.raises(UserError, match="fails on a clip of 9 x 32 x 32"):
        apart(refusing(KeyError, "rope"), dtype=torch.bfloat16)


def test_values_that_sample_did_not_give_are_no_error_of_the_model() -> None:
    assert "drawn at random" in str(apart(outside, sample=of_files))
