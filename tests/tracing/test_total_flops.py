"""FLOPs are counted of models whose learned tokens are expanded to the batch, with gradients and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.tracing.shell import TotalFlops, measure_encoder


class LearnedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.linear = nn.Parameter(torch.zeros(1, 4, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.tokens.expand(x.shape[0], -1, -1)) + x
        return out


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_may_be_given_a_view_of_a_parameter(gradients: bool, device: str) -> None:
    model = LearnedTokens().to(device)
    with torch.set_grad_enabled(gradients), TotalFlops() as counter:
        model(torch.zeros(2, 4, 8, device=device))
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 8


class Encoder(LearnedTokens):
    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.zeros(1, 4, 8, device=device)


def test_an_encoder_with_learned_tokens_is_measured() -> None:
    assert measure_encoder(Encoder().to("meta"), VideoClip(0, 1, 16, 16, 4)).flops == 2 * 4 * 8 * 8
