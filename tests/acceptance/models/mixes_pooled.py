"""Every block conditions its MLP on the mean, the largest and the attention-weighted sum of its tokens."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Pooled(Block):
    def __init__(self):
        super().__init__()
        self.squeeze = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x, text, time):
        x = super().forward(x, text, time)
        pooled = x.mean(dim=1, keepdim=True) + x.amax(dim=1, keepdim=True)
        pooled = pooled + (self.score(x).softmax(dim=1) * x).sum(dim=1, keepdim=True)
        return x * self.squeeze(pooled).sigmoid()


def build():
    return reset(VideoModel(Pooled))
