"""torch.nn.MultiheadAttention for self- and cross-attention, with and without attention weights."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Multihead(Block):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x, text, time):
        y = self.norm1(x) + self.modulation(time)[:, None, :WIDTH]
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.cross(self.norm2(x), text, text, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


def build():
    return reset(VideoModel(Multihead))
