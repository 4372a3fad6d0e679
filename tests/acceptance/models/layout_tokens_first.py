"""Tokens before the batch, [S, B, D], as Megatron keeps them."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class TokensFirst(Block):
    def forward(self, x, text, time):
        x = x.transpose(0, 1)
        return super().forward(x, text, time).transpose(0, 1)


class Model(VideoModel):
    def run(self, x, text, time, grid):
        return super().run(x.transpose(0, 1), text, time, grid).transpose(0, 1)


def build():
    return reset(Model(TokensFirst))
