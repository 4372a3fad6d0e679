"""A modulation of its own for every token, [B, S, D], and one for every frame, repeated inside the block."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401


class PerToken(Block):
    def forward(self, x, text, time, frames):
        shift, scale, gate = self.modulation(time).chunk(3, dim=-1)
        x = x + gate * self.attention(self.norm1(x) * (1 + scale) + shift)
        x = x + frames.repeat_interleave(x.shape[1] // frames.shape[1], dim=1)
        x = x + self.cross(self.norm2(x), text)
        return x + self.mlp(self.norm3(x))


class Model(VideoModel):
    def run(self, x, text, time, grid):
        frames = time[:, None] + self.blocks[0].norm2(x.unflatten(1, (grid[0], -1)).mean(2))
        waves = time[:, None] * x.cos()
        for block in self.blocks:
            x = block(x, text, waves, frames)
        return x


def build():
    return reset(Model(PerToken))
