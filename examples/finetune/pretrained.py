"""Write a tiny Wan2.1 pipeline with `save_pretrained`: it stands for the hub's, so that nothing is downloaded.

python examples/finetune/pretrained.py FOLDER
"""

import sys

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

# Of this VAE's latents over the demo's clips, one value a channel, as a pretrained VAE's config has them.
LATENTS_MEAN = (-0.2163, -0.2060, -0.2443, -0.1861)
LATENTS_STD = (0.1050, 0.1178, 0.1750, 0.1065)


def main(folder: str) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=LATENTS_MEAN, latents_std=LATENTS_STD)
    text = UMT5EncoderModel(
        UMT5Config(vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
    )
    transformer = WanTransformer3DModel(
        num_layers=2, num_attention_heads=4, attention_head_dim=24, ffn_dim=192, in_channels=4, out_channels=4,
        text_dim=64, freq_dim=32,
    )  # fmt: skip
    WanPipeline(ByT5Tokenizer(), text, vae, FlowMatchEulerDiscreteScheduler(), transformer).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
