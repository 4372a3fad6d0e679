"""HunyuanVideo (20 dual and 40 single blocks): the configuration of hunyuanvideo-community/HunyuanVideo."""

import torch

from arachnec.models.diffusers import hunyuan_video

model = hunyuan_video.text_to_video("HunyuanVideo", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss
