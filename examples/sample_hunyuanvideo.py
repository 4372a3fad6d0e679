"""HunyuanVideo: one model, which is told the guidance; so a step is one forward."""

import torch

from arachnec.models.diffusers.sampler import hunyuan_sampler

sampler = hunyuan_sampler(model="HunyuanVideo", dtype=torch.bfloat16)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
guidance = sampler.guidance
