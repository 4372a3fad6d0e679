"""How the fine-tuned model is sampled, beside its training and behind it: the pipeline's scheduler, text encoder, VAE."""

from arachnec.models.diffusers import wan
from arachnec.models.diffusers.sampler import wan_sampler

FOLDER = "finetune-output/pretrained"
sampler = wan_sampler(tuned=wan.text_to_video(FOLDER), pipeline=FOLDER)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
encoders, decoder = sampler.encoders, sampler.decoder
