"""An encoder by several ranks gives what it gives on one, whatever its code does with frames."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from arachnec.models.encoders import VideoEncoder
from arachnec.spmd.spatial.division import encode_divided, grid_of
from arachnec.spmd.spatial.peers import Counted
from arachnec.spmd.spatial.split_tensor import NotDivisible
from tests.slow import slow
from tests.spmd.spatial_ranks import encoded_by
from tests.spmd.spatial_vaes import (
    cogvideox,
    hunyuan,
    hunyuan_1_5,
    ltx,
    magvit,
    mochi,
    spread,
    wan,
    wan_residual,
)

# Frames, height, width, with latents of 5 x 7 and 9 x 3; and by how many ranks.
CASES = (((9, 40, 56), (2, 4)), ((17, 72, 24), (1, 3)))


@pytest.mark.parametrize(
    "make", [wan, slow(wan_residual), cogvideox, hunyuan, slow(hunyuan_1_5), slow(ltx), slow(magvit), slow(mochi)]
)
def test_a_vae_by_several_ranks_is_the_vae_on_one(make: object) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    encoder = VideoEncoder(spread(make()))  # type: ignore[operator]
    for size, degrees in CASES:
        loaded = torch.randint(0, 255, (1, 3, *size), dtype=torch.uint8)
        alone = encoder(loaded)
        for ranks in degrees:
            for shared in encoded_by(ranks, encoder, loaded):
                torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


def test_a_frame_of_one_latent_by_several_ranks_is_that_of_one() -> None:
    """Deep in the encoder one rank has the only entry, and the others have none."""
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    encoder = VideoEncoder(spread(wan()))
    loaded = torch.randint(0, 255, (1, 3, 1, 8, 8), dtype=torch.uint8)
    alone = encoder(loaded)
    for ranks in (2, 4):
        for shared in encoded_by(ranks, encoder, loaded):
            torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


class Steps(nn.Module):
    """A chain of operators, each by a number; padding comes before its convolution."""

    def __init__(self, steps: list[tuple[int, int, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4, 3, 3, dtype=torch.float64)) for _ in steps)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 4, 1, 1)
        for (kind, stride, padding, dilation), weight in zip(self.steps, self.weights, strict=True):
            match kind:
                case 0:
                    x = F.conv2d(F.pad(x, (1, 2, 2, 1)), weight, None, stride, padding, dilation) / 3
                case 1:
                    x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight, None, stride) / 3
                case 2:
                    x = F.silu(F.group_norm(x, 2, weight[0, :, 0, 0], weight[1, :, 0, 0]))
                case 3:
                    tokens = x.flatten(2).mT
                    x = x + F.scaled_dot_product_attention(tokens, tokens, tokens).mT.reshape(x.shape)
                case 4:
                    x = F.interpolate(x, scale_factor=2.0, mode="nearest")[..., 1:]
                case 5:
                    x = x + x.mean((2, 3), keepdim=True) + x.amax(3, keepdim=True)
                case 6:
                    x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 2)
                case 7:
                    x = torch.cat([x, x[..., :stride]], 3) if dilation == 1 else torch.cat([x[:, :, stride:], x], 2)
                case 8:
                    x = F.pixel_unshuffle(F.pad(x, (0, -x.shape[3] % 2, 0, -x.shape[2] % 2)), 2)[:, :4]
                case 9:
                    x = F.pixel_shuffle(x.repeat_interleave(4, 1), 2)[..., 1:, :]
                case _:
                    even = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
                    x = even.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5)) if min(even.shape) else x
        return F.linear(x.movedim(1, -1), self.weights[0][:, :, 0, 0])


STEP = st.tuples(st.integers(0, 10), st.integers(1, 2), st.integers(0, 1), st.integers(1, 2))


@given(st.lists(STEP, min_size=1, max_size=4), st.integers(1, 6), st.integers(9, 14), st.integers(9, 14))
@settings(max_examples=40, deadline=None)
def test_any_chain_of_operators_by_any_ranks_is_the_chain_on_one(
    steps: list[tuple[int, int, int, int]], ranks: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    chain, x = Steps(steps), torch.randn(1, 1, height, width, dtype=torch.float64)
    try:
        alone = chain(x)
    except RuntimeError:
        return  # smaller than the window by now
    for shared in encoded_by(ranks, chain, x):
        torch.testing.assert_close(shared, alone)


class Joined(nn.Module):
    """Tiles put together by the user's own code: along width, then along height."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [torch.cat([row[..., :5], row[..., 5:]], 3) for row in (x[:, :, :4], x[:, :, 4:])]
        return torch.cat(rows, 2)


def test_what_is_joined_along_all_dimensions_that_are_cut_is_a_plain_tensor() -> None:
    x = torch.randn(1, 1, 9, 14)
    for shared in encoded_by(4, Joined(), x):
        assert type(shared) is Tensor
        assert torch.equal(shared, x)


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=-1).values


class WritesToACopy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.permute(0, 1, 3, 2).reshape(1, 1, -1).mul_(2)
        return x


@pytest.mark.parametrize(("encoder", "reason"), [(Sorts(), "aten.sort"), (WritesToACopy(), "a view of what its ranks")])
def test_what_ranks_cannot_share_is_refused_by_name(encoder: nn.Module, reason: str) -> None:
    with pytest.raises(NotDivisible, match=reason):
        encode_divided(encoder, torch.empty(1, 1, 8, 8, device="meta"), Counted(0), 2)


def test_text_has_no_height_and_width() -> None:
    with pytest.raises(NotDivisible, match="no height and width"):
        grid_of(torch.empty(1, 2, 7), 2)


def test_grids_have_short_borders() -> None:
    frames = torch.empty(1, 1, 720, 1280, device="meta")
    assert [grid_of(frames, ranks) for ranks in (1, 2, 3, 4, 16)] == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 8)]
