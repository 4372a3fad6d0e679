"""CogVideoX: the 5B model first, then the 2B model of the same latents."""

import torch

from arachnec.models.diffusers.sampler import cogvideox_sampler

sampler = cogvideox_sampler(large="CogVideoX-5B", small="CogVideoX-2B", dtype=torch.bfloat16)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
