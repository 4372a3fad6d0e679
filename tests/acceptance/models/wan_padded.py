"""Wan2.1 with captions padded to one length, as it was pretrained, and cross-attention norm."""

from arachnec.models.diffusers import wan

model = wan.text_to_video(
    num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=48, in_channels=4, out_channels=4,
    text_dim=16, freq_dim=32, cross_attn_norm=True, text_length=32,
)  # fmt: skip
build, sample, loss = model.build, model.sample, model.loss
