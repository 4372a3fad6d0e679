"""Joint attention of video and padded text with a key mask; padding is a quarter of the caption."""

import torch
import torch.nn.functional as F
from parts import Block, VideoModel, join_heads, loss, reset, split_heads  # noqa: F401
from parts import sample as plain


class Joint(Block):
    def forward(self, x, text, time, mask):
        y = torch.cat([self.norm1(x), self.norm2(text)], dim=1)
        q = split_heads(self.attention.q(y))
        k, v = (split_heads(z) for z in self.attention.kv(y).chunk(2, dim=-1))
        keep = F.pad(mask, (x.shape[1], 0), value=True)
        y = join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None]))
        y, z = self.attention.out(y).split([x.shape[1], text.shape[1]], dim=1)
        x = x + y * (1 + self.modulation(time)[:, None, : x.shape[-1]])
        return x + self.mlp(self.norm3(x)), text + z


class Model(VideoModel):
    def forward(self, latents, text, t, mask):
        self.mask = mask
        return super().forward(latents, text, t)

    def run(self, x, text, time, grid):
        for block in self.blocks:
            x, text = block(x, text, time, self.mask)
        return x


def build():
    return reset(Model(Joint))


def sample(clip, generator):
    kwargs, target = plain(clip, generator)
    real = max(1, clip.text_tokens * 3 // 4)
    return {**kwargs, "mask": torch.arange(clip.text_tokens)[None] < real}, target
