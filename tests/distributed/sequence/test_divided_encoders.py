"""Ranks of a process group that encode one clip together."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.spmd.spatial.division import encode_divided
from arachnec.spmd.spatial.peers import Group
from tests.distributed.encoder_cases import largest_differences
from tests.distributed.harness import run_ranks


class Frames(nn.Module):
    """What VAEs are made of: convolutions, a norm over everything, attention in a frame, a cache in time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Conv3d(3, 8, 3, padding=(0, 1, 1))
        self.norm = nn.GroupNorm(2, 8)
        self.less = nn.Conv2d(8, 8, 3, stride=2)

    def forward(self, loaded: Tensor) -> Tensor:
        pixels = loaded.float() / 255
        cache, chunks = pixels[:, :, :1].repeat(1, 1, 2, 1, 1), []
        for chunk in pixels.split(2, dim=2):
            chunks.append(self.norm(self.enter(torch.cat([cache, chunk], 2))))
            cache = torch.cat([cache, chunk], 2)[:, :, -2:]
        x = torch.cat(chunks, 2).transpose(1, 2).flatten(0, 1)
        x = self.less(nn.functional.pad(x, (0, 1, 0, 1)))
        tokens = x.flatten(2).transpose(1, 2)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return (x + mixed[:, 0].transpose(1, 2).reshape(x.shape)).unflatten(0, (1, -1))


def _apart(ranks: tuple[int, ...], height: int) -> float:
    """The largest difference on this rank, of what the ranks make in this order."""
    encoder, loaded = Frames().eval(), torch.arange(3 * 4 * height * 10).reshape(1, 3, 4, height, 10) * 37 % 256
    alone = encoder(loaded)
    group = dist.group.WORLD
    assert group is not None
    shared = encode_divided(encoder, loaded, Group(ranks, ranks.index(dist.get_rank()), group), len(ranks))
    return float((shared - alone).abs().max())


def test_ranks_of_a_group_encode_as_one_in_any_order() -> None:
    assert max(*run_ranks(2, _apart, (0, 1), 12), *run_ranks(2, _apart, (1, 0), 7)) < 1e-5


def test_vaes_by_their_frames_and_text_encoders_by_their_width_are_the_encoder_on_one_rank() -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    vaes, texts = ("wan", "cogvideox", "hunyuan"), ("umt5", "t5", "clip", "llama")
    differences = largest_differences(vaes, texts)
    assert differences.keys() == {
        *((name, degree) for name in vaes for degree in (3, 4)),
        *((name, degree) for name in texts for degree in (1, 2, 3, 4)),
    }
    assert max(differences.values()) <= 1e-5, differences
