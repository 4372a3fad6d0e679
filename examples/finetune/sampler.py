"""How the tuned model is sampled, in training and behind it: with the pipeline's scheduler, text encoder and VAE."""

from arachnec.models.diffusers import wan
from arachnec.models.diffusers.sampler import wan_sampler

FOLDER = "finetune-output/pretrained"
sampler = wan_sampler(tuned=wan.text_to_video(FOLDER), pipeline=FOLDER)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
encoders, decoder = sampler.encoders, sampler.decoder
