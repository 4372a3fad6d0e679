"""Wan2.2 A14B: its two experts, the one of high noise down to its boundary."""

import torch

from arachnec.models.diffusers.sampler import wan_sampler

# With weights: high="FOLDER/transformer", low="FOLDER/transformer_2", pipeline="FOLDER"
sampler = wan_sampler(high="Wan2.2-T2V-A14B", low="Wan2.2-T2V-A14B", boundary=0.875, dtype=torch.bfloat16)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
switch = sampler.switch
