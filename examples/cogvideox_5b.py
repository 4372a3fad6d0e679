"""CogVideoX 5B (rotary positions): the configuration of THUDM/CogVideoX-5b."""

import torch

from arachnec.models.diffusers import cogvideox

model = cogvideox.text_to_video("CogVideoX-5B", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss
