"""Five blocks of one class and shape that keep what tells them apart in a mapping, a function, a private number and a
hook."""

from functools import partial

import torch
from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Told(Block):
    def __init__(self):
        super().__init__()
        self.options = {"scale": {"attention": 1.0}}
        self.activation = partial(torch.mul, other=1.0)
        self._scale = 1.0

    def attend(self, x):
        return self._scale * self.options["scale"]["attention"] * self.activation(self.attention(x))


def doubled(module, inputs, output):
    return 2 * output


class Model(VideoModel):
    def __init__(self):
        super().__init__(Told, layers=5)
        self.blocks[1].options = {"scale": {"attention": 0.5}}
        self.blocks[2].activation = partial(torch.mul, other=-1.0)
        self.blocks[3]._scale = 3.0
        self.blocks[4].mlp.register_forward_hook(doubled)


def build():
    return reset(Model())
