"""Wan2.1 14B with adapters of low rank (Hu et al., "LoRA", arXiv 2106.09685) on its attentions; all else is frozen.

The pretrained weights are given when it runs: `arachnec run build/ --init /data/Wan2.1-T2V-14B-Diffusers`.
"""

import torch
from peft import LoraConfig
from torch import nn

from arachnec.models.diffusers import wan

model = wan.text_to_video("Wan2.1-T2V-14B", dtype=torch.bfloat16)
sample, loss = model.sample, model.loss


def build() -> nn.Module:
    transformer = model.build().requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=32, lora_alpha=32, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return transformer
