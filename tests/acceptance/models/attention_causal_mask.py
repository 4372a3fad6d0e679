"""Frame-causal attention: a mask [S, S] made in the shell from the frame of each token."""

import torch
from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Masked(Block):
    def forward(self, x, text, time, mask):
        x = x + self.attention(self.norm1(x) + self.modulation(time)[:, None, : x.shape[-1]], mask=mask)
        x = x + self.cross(self.norm2(x), text)
        return x + self.mlp(self.norm3(x))


class Model(VideoModel):
    def run(self, x, text, time, grid):
        frame = torch.arange(grid[0], device=x.device).repeat_interleave(grid[1] * grid[2])
        mask = frame[:, None] >= frame[None, :]
        for block in self.blocks:
            x = block(x, text, time, mask)
        return x


def build():
    return reset(Model(Masked))
