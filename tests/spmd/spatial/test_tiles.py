"""A VAE that tiles gives on several ranks exactly what it gives on one."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from arachnec.models.encoders import VideoEncoder
from arachnec.spmd.spatial.division import calls_of, encode_tiles, owners_of
from tests.spmd.spatial_ranks import on_threads
from tests.spmd.spatial_vaes import cogvideox, hunyuan, ltx, magvit, mochi, spread, wan

# The VAE, the frames of a clip, how many calls and tiles that makes: 3 x 2 tiles of 32 pixels at steps of 24. The last
# three blend in what their encoders give, and have steps of 16; magvit's modules keep its cache.
CASES = [
    (wan, 9, 18, 6), (cogvideox, 9, 6, 6), (hunyuan, 18, 12, 12),
    (ltx, 9, 12, 12), (magvit, 9, 36, 12), (mochi, 9, 12, 12),
]  # fmt: skip


def tiling(make: Callable[[], nn.Module]) -> VideoEncoder:
    vae = spread(make())
    if make is cogvideox:
        vae.enable_tiling(32, 32, 0.25, 0.25)  # type: ignore[operator]
    else:
        sizes = {"tile_sample_min_height": 32, "tile_sample_min_width": 32}
        step = 16 if make in (ltx, magvit, mochi) else 24
        vae.enable_tiling(**sizes, tile_sample_stride_height=step, tile_sample_stride_width=step)  # type: ignore[operator]
    return VideoEncoder(vae)


@pytest.mark.parametrize(("make", "frames", "count", "tiles"), CASES)
def test_tiles_dealt_out_are_the_tiles_of_one_rank(
    make: Callable[[], nn.Module], frames: int, count: int, tiles: int
) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    encoder = tiling(make)
    loaded = torch.randint(0, 255, (1, 3, frames, 56, 40), dtype=torch.uint8)
    calls = calls_of(copy.deepcopy(encoder).to("meta"), loaded.to("meta"))
    assert (len(calls), calls[-1].tile + 1) == (count, tiles)
    alone = encoder(loaded)
    ranks = 4 if make is cogvideox else 2
    shared = on_threads(ranks, lambda peers: encode_tiles(copy.deepcopy(encoder), loaded, peers, ranks, calls))
    assert all(torch.equal(one, alone) for one in shared)


def test_a_frame_of_one_tile_has_nothing_to_deal_out() -> None:
    pytest.importorskip("diffusers")
    encoder = tiling(wan).to("meta")
    assert calls_of(encoder, torch.empty(1, 3, 5, 32, 32, dtype=torch.uint8, device="meta")) == ()


def test_ranks_have_alike_many_pixels() -> None:
    pytest.importorskip("diffusers")
    encoder = tiling(wan).to("meta")
    calls = calls_of(encoder, torch.empty(1, 3, 5, 56, 40, dtype=torch.uint8, device="meta"))
    owners = owners_of(calls, 3)
    loads = [sum(call.pixels for call, owner in zip(calls, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) < 1.5 * sum(loads) / 3
    assert len({(call.tile, owner) for call, owner in zip(calls, owners, strict=True)}) == 6
