"""Wan2.1 1.3B and its video encoder, both at full size, for plans; weights are never made."""

import torch
from diffusers import AutoencoderKLWan

from arachnec.models.diffusers import wan
from arachnec.models.encoders import VideoEncoder

model = wan.text_to_video("Wan2.1-T2V-1.3B", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss


def encoders():
    return {"vae": VideoEncoder(AutoencoderKLWan())}
