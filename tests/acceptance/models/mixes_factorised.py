"""Space and time attended to apart: the block folds its tokens into frames by a number it is given."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Factorised(Block):
    def forward(self, x, text, time, frames):
        x = super().forward(x, text, time)
        batch, tokens, width = x.shape
        y = x.reshape(batch, frames, tokens // frames, width)
        y = self.attention(y.transpose(1, 2).flatten(0, 1)).reshape(batch, tokens // frames, frames, width)
        return x + y.transpose(1, 2).reshape(batch, tokens, width)


class Model(VideoModel):
    def run(self, x, text, time, grid):
        for block in self.blocks:
            x = block(x, text, time, grid[0])
        return x


def build():
    return reset(Model(Factorised))
