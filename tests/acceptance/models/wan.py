"""Wan2.1, small: heads that four ranks do not divide."""

from arachnec.models.diffusers import wan

model = wan.text_to_video(
    num_layers=2, num_attention_heads=3, attention_head_dim=12, ffn_dim=48, in_channels=4, out_channels=4,
    text_dim=16, freq_dim=32,
)  # fmt: skip
build, sample, loss = model.build, model.sample, model.loss
