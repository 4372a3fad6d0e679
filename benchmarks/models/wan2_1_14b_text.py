"""Wan2.1 14B with its text encoder, UMT5-XXL, whose captions are encoded beside training."""

import torch
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from arachnec.models.diffusers import wan
from arachnec.models.encoders import TextEncoder

model = wan.text_to_video("Wan2.1-T2V-14B", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss

# text_encoder/config.json of Wan-AI/Wan2.1-T2V-14B-Diffusers
UMT5_XXL = UMT5Config(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)


def encoders():
    return {"text": TextEncoder(ByT5Tokenizer(), UMT5EncoderModel(UMT5_XXL).to(torch.bfloat16))}
