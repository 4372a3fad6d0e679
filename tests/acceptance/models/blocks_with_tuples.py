"""Blocks that return tuples and dictionaries, one element of which the next block does not take."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Tuples(Block):
    def forward(self, x, text, time):
        x = super().forward(x, text, time)
        return {"x": x}, (text + time[:, None], x.detach().abs().amax(-1))


class Model(VideoModel):
    def run(self, x, text, time, grid):
        for block in self.blocks:
            out, (text, _) = block(x, text, time)
            x = out["x"]
        return x


def build():
    return reset(Model(Tuples))
