"""Wan2.1 14B with adapters of low rank (Hu et al., "LoRA", arXiv 2106.09685) on its attentions; all else is frozen."""

import torch
from torch import Tensor, nn

from arachnec.models.diffusers import wan

RANK = 32
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")
model = wan.text_to_video("Wan2.1-T2V-14B", dtype=torch.bfloat16)
sample, loss = model.sample, model.loss


class LowRank(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it, which begins at zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(rank, linear.out_features, bias=False, dtype=linear.weight.dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def build() -> nn.Module:
    transformer = model.build().requires_grad_(False)
    for block in transformer.blocks:
        for attention in (block.attn1, block.attn2):
            for path in ADAPTED:
                attention.set_submodule(path, LowRank(attention.get_submodule(path), RANK))
    return transformer
