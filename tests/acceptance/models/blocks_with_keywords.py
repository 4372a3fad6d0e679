"""Blocks called with keywords, in an order of their own, with a dictionary of conditions and a number."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Keywords(Block):
    def forward(self, *, conditions, strength=1.0, tokens):
        return super().forward(tokens, conditions["text"], strength * conditions["time"])


class Model(VideoModel):
    def run(self, x, text, time, grid):
        for block in self.blocks:
            x = block(tokens=x, strength=0.5, conditions={"time": time, "text": text})
        return x


def build():
    return reset(Model(Keywords))
