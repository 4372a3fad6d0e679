"""HunyuanVideo: dual and single blocks, captions as long as they are."""

from arachnec.models.diffusers import hunyuan_video

model = hunyuan_video.text_to_video(
    in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2, num_single_layers=2,
    num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6), patch_size_t=1,
)  # fmt: skip
build, sample, loss = model.build, model.sample, model.loss
