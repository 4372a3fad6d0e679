"""What an encoder costs grows with what it reads, also where captions are the longer the larger their videos are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Formula
from arachnec.tracing.cost import encoder_stage

WIDTH = 8


class Words(nn.Module):
    """A text encoder with a tokenizer of its own: a token for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.empty(1, len((clip.caption or "").split()), WIDTH, device=device)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.linear(words)
        return output


class Frames(Words):
    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.empty(1, clip.frames, WIDTH, device=device)


def clip(frames: int, words: int) -> VideoClip:
    return VideoClip(frames, frames, 32, 32, words, caption=" ".join(["word"] * words))


def stage(encoder: type[nn.Module], *clips: VideoClip) -> Stage:
    with torch.device("meta"):
        return encoder_stage("encoder", encoder(), clips, lambda one: 4 * one.frames)


@pytest.mark.parametrize(("encoder", "symbol"), [(Words, "T"), (Frames, "S")])
@pytest.mark.parametrize("clips", [(clip(1, 10), clip(5, 27)), (clip(1, 10), clip(5, 27), clip(9, 64))])
def test_captions_and_videos_are_told_apart(
    encoder: type[nn.Module], symbol: str, clips: tuple[VideoClip, ...]
) -> None:
    flops = stage(encoder, *clips).attrs["flops"]
    assert isinstance(flops, Formula)
    assert {name for term in flops.terms for name, _ in term.powers} == {"B", symbol}
    of_a_token = 2 * WIDTH**2 / (1 if symbol == "T" else 4)
    assert [term.coefficient * 1e12 for term in flops.terms] == pytest.approx([of_a_token])
