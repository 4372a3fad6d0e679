"""Which micro-batches a profile measures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.models.encoders import TextEncoder, VideoEncoder
from arachnec.profiling.in_turns import ENCODED_SHAPES, choose_points, deciding_sizes, more_points, sizes_of


class Padded(nn.Module):
    """A text encoder that is always given as many tokens."""

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.zeros((1, 226), dtype=torch.int64, device=device)


class Still(nn.Module):
    """An encoder of a clip's first frame, scaled to one height."""

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.zeros((1, 3, 224, 224 * clip.width // 64), device=device)


def clip(number: int, frames: int, width: int = 64, text: int = 20) -> VideoClip:
    return VideoClip(number, frames, 48, width, text)


CLIPS = [clip(0, 17), clip(1, 17, 80, 30), clip(2, 81, 64, 40), clip(3, 81, 64, 50)]


@pytest.mark.parametrize(
    ("encoder", "sizes"),
    [
        (VideoEncoder(nn.Identity()), ("frames", "width")),
        (TextEncoder(None, nn.Identity()), ("text",)),
        (Padded(), ()),
        (Still(), ("width",)),
    ],
    ids=["video", "text", "padded text", "first frame"],
)
def test_an_encoders_time_is_decided_by_the_sizes_that_change_what_it_is_given(
    encoder: nn.Module, sizes: tuple[str, ...]
) -> None:
    assert deciding_sizes(encoder, CLIPS) == sizes


def test_further_points_have_every_deciding_size_that_is_not_measured_yet_once() -> None:
    clips = [clip(10 * frames + text, frames, text=text) for frames in range(1, 20) for text in (20, 30)]
    tokens = [item.frames for item in clips]
    chosen = choose_points(clips, tokens)
    for deciding in (("frames",), ("text",), ()):
        points = more_points(clips, tokens, deciding, chosen)
        sizes = [tuple(sizes_of(point.clips[0], deciding).values()) for point in [*chosen[:7], *points]]
        assert len(set(sizes[7:])) == len(sizes[7:])
        assert set(sizes) == {tuple(sizes_of(item, deciding).values()) for item in clips}
        assert not set(sizes[:7]) & set(sizes[7:])


def test_of_too_many_sizes_some_are_measured_from_the_least_to_the_greatest() -> None:
    clips = [clip(frames, frames) for frames in range(1, 300)]
    tokens = [item.frames for item in clips]
    chosen = choose_points(clips, tokens)
    points = more_points(clips, tokens, ("frames",), chosen)
    assert len({point.clips[0].frames for point in [*chosen, *points]}) == ENCODED_SHAPES
    assert (points[0].tokens, points[-1].tokens) == (2, 298)
