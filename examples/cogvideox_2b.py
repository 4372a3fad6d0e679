"""CogVideoX 2B (sine and cosine positions): the configuration of THUDM/CogVideoX-2b."""

import torch

from arachnec.models.diffusers import cogvideox

model = cogvideox.text_to_video("CogVideoX-2B", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss
