"""CogVideoX 1.5: patches over time too."""

from arachnec.models.diffusers import cogvideox

model = cogvideox.text_to_video(
    num_layers=2, num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_embed_dim=16,
    time_embed_dim=32, sample_width=16, sample_height=12, sample_frames=17, max_text_seq_length=30, patch_size_t=2,
    use_rotary_positional_embeddings=True, patch_bias=False,
)  # fmt: skip
build, sample, loss = model.build, model.sample, model.loss
