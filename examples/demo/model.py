"""The demo's model: Wan2.1's architecture and its encoders, small, with random weights."""

import torch
from diffusers import AutoencoderKLWan
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from arachnec.models.diffusers import wan
from arachnec.models.encoders import TextEncoder, VideoEncoder

model = wan.text_to_video(
    num_layers=2, num_attention_heads=6, attention_head_dim=64, ffn_dim=1536, in_channels=4, out_channels=4, text_dim=64
)
build, sample, loss = model.build, model.sample, model.loss

# Mean and standard deviation of this VAE's latents over clips of these videos, one value a channel: scaled by them,
# latents have the variance of the noise that they are mixed with, as a pretrained VAE's do.
LATENTS_MEAN = (-0.2163, -0.2060, -0.2443, -0.1861)
LATENTS_STD = (0.1050, 0.1178, 0.1750, 0.1065)


def encoders():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the two tables above belong to these weights
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=LATENTS_MEAN, latents_std=LATENTS_STD
        )
        text = UMT5EncoderModel(
            UMT5Config(vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
        )
    return {
        "vae": VideoEncoder(vae, model.geometry.multiple),
        "text": TextEncoder(ByT5Tokenizer(), text),
    }
