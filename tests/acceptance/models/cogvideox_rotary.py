"""CogVideoX with rotary positions."""

from arachnec.models.diffusers import cogvideox

model = cogvideox.text_to_video(
    num_layers=2, num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, text_embed_dim=16,
    time_embed_dim=32, sample_width=16, sample_height=12, sample_frames=17, max_text_seq_length=30,
    use_rotary_positional_embeddings=True,
)  # fmt: skip
build, sample, loss = model.build, model.sample, model.loss
