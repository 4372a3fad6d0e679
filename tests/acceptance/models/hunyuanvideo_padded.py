"""HunyuanVideo with captions padded to one length and masked."""

from arachnec.models.diffusers import hunyuan_video

model = hunyuan_video.text_to_video(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=2,
    num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6), text_length=32,
)  # fmt: skip
build, sample, loss = model.build, model.sample, model.loss
