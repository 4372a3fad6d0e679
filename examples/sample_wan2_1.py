"""Wan2.1: the 14B model takes the steps of high noise, the 1.3B model the others (SRDiffusion, arXiv 2505.19151)."""

import torch

from arachnec.models.diffusers.sampler import wan_sampler

# A configuration's name gives random weights; a folder that `save_pretrained` wrote gives its own.
sampler = wan_sampler(large="Wan2.1-T2V-14B", small="Wan2.1-T2V-1.3B", dtype=torch.bfloat16)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
