"""The shape of what an encoder hands off is known without running it, and a mistake in it is no reason to run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from arachnec.backends.torch_distributed.executor.encoding import Specs
from arachnec.data.clip import VideoClip
from arachnec.models.file import ModelFile
from arachnec.runtime.handoffs import TensorSpec

CLIP = VideoClip(0, 3, 16, 16, 0)


class Encoder(nn.Module):
    """Counts its forwards on real numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(2, 4)
        self.real = 0

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.zeros(1, clip.frames, 2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.real += not x.is_meta
        if self.kind == "item" and x.sum().item() > 1:
            return x
        if self.kind == "list" and x.flatten().tolist() == [1]:
            return x
        if self.kind == "select":
            assert len(x[x > 1]) == 0
        if self.kind == "broken":
            raise RuntimeError("no such codebook")
        if self.kind == "shapes":
            return cast(Tensor, self.project(x[..., :1]))
        return cast(Tensor, self.project(x))


def spec(kind: str) -> tuple[TensorSpec, Encoder]:
    encoder = Encoder(kind)
    model_file = cast(ModelFile, SimpleNamespace(encoders=lambda: {"vae": Encoder(kind)}))
    specs = Specs(model_file, {"vae": encoder}, torch.device("cpu"))
    try:
        return specs._of("vae", [CLIP, CLIP]), encoder
    except Exception:
        assert encoder.real == 0
        raise


@pytest.mark.parametrize(("kind", "runs"), [("plain", 0), ("item", 1), ("list", 1), ("select", 1)])
def test_only_an_encoder_that_looks_at_values_is_run(kind: str, runs: int) -> None:
    specs, encoder = spec(kind)
    assert specs == TensorSpec((2, 3, 4), torch.float32)
    assert encoder.real == runs


@pytest.mark.parametrize(("kind", "says"), [("broken", "codebook"), ("shapes", "same reduction dim")])
def test_a_mistake_in_an_encoder_is_raised_and_not_tried_again_with_numbers(kind: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        spec(kind)
