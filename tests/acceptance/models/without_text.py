"""An unconditional model: no captions, the output in a dictionary."""

from parts import Block, VideoModel, latent_shape, loss, noised, reset  # noqa: F401


class Unconditional(Block):
    def forward(self, x, time):
        x = x + self.attention(self.norm1(x) + time)
        return x + self.mlp(self.norm3(self.norm2(x)))


class Model(VideoModel):
    def forward(self, latents, t):
        return {"sample": super().forward(latents, latents.new_zeros(1, 1, 12), t)}

    def run(self, x, text, time, grid):
        for block in self.blocks:
            x = block(x, time[:, None])
        return x


def build():
    return reset(Model(Unconditional))


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {"latents": x, "t": t}, target
