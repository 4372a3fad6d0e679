"""HunyuanVideo and its video encoder, both at full size, for plans; weights are never made.

The encoder encodes tiles, as pipelines do at this resolution: its attention over whole frames needs a mask of
(frames x height x width / 64)^2 entries.
"""

import torch
from diffusers import AutoencoderKLHunyuanVideo

from arachnec.models.diffusers import hunyuan_video
from arachnec.models.encoders import VideoEncoder

model = hunyuan_video.text_to_video("HunyuanVideo", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss


def encoders():
    vae = AutoencoderKLHunyuanVideo().to(torch.bfloat16)
    vae.enable_tiling()
    return {"vae": VideoEncoder(vae, multiple=16)}
