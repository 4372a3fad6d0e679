"""A side output of every block is read by the shell: deep supervision of the tokens, an auxiliary number."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Telling(Block):
    def forward(self, x, text, time):
        x = super().forward(x, text, time)
        return x, self.norm3(x), x.square().mean()


class Model(VideoModel):
    def run(self, x, text, time, grid):
        extra = 0
        for block in self.blocks:
            x, side, number = block(x, text, time)
            extra = extra + side + 0.01 * number
        return x + extra


def build():
    return reset(Model(Telling))
