"""Wan2.1 14B text to video: the configuration of Wan-AI/Wan2.1-T2V-14B-Diffusers."""

import torch

from arachnec.models.diffusers import wan

model = wan.text_to_video("Wan2.1-T2V-14B", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss
