"""What is counted of one rank is what one rank does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Attributes, Formula, Term
from arachnec.models.encoders import VideoEncoder
from arachnec.spmd.spatial.division import divided_stage, encode_divided, part_of, per_token
from tests.spmd.spatial_ranks import ThreadPeers, on_threads
from tests.spmd.spatial_vaes import wan

CLIP = VideoClip(0, 9, 64, 96, 4)


def test_work_is_divided_memory_falls_and_exchanges_are_those_of_a_run() -> None:
    pytest.importorskip("diffusers")
    encoder = VideoEncoder(wan())
    part = part_of(copy.deepcopy(encoder).to("meta"), CLIP, 72)
    assert part is not None
    assert (part.most, part.ranks) == (12, 4)
    assert part.flops == part.flops_alone / 4
    assert part.undivided == 0
    assert part.peak < 0.4 * part.peak_alone
    peers_of_threads: list[ThreadPeers] = []

    def run(peers: ThreadPeers) -> Tensor:
        peers_of_threads.append(peers)
        loaded = torch.zeros(1, 3, 9, 64, 96, dtype=torch.uint8)
        return encode_divided(copy.deepcopy(encoder), loaded, peers, 4)

    on_threads(4, run)
    assert {peers.calls for peers in peers_of_threads} == {part.exchanges}


class Sorted(nn.Module):
    """Loads frames, or text, and sorts them."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.zeros([8] * self.dims, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=-1).values


def test_an_encoder_of_frames_that_cannot_be_divided_says_why_and_one_of_text_is_silent() -> None:
    stage = Stage("vae", False, Attributes.of(workspace=per_token([(1, 1.0)])))
    same, reason = divided_stage(stage, Sorted(4), [CLIP], lambda clip: 72)
    assert same == stage
    assert reason is not None and "aten.sort" in reason
    assert divided_stage(stage, Sorted(3), [CLIP], lambda clip: 72) == (stage, None)


def test_sizes_of_two_clips_are_a_line_that_is_nowhere_below_them() -> None:
    gib = 2**30
    line = per_token([(10, 30 * gib), (20, 50 * gib)])
    assert line == Formula((Term(2.0, (("B", 1), ("S", 1))), Term(10.0, (("B", 1),))), "GiB")
    assert per_token([(10, 5 * gib), (20, 50 * gib)])(B=1, S=20, T=0) == pytest.approx(50)
    assert per_token([(10, 5 * gib), (20, 50 * gib)])(B=1, S=10, T=0) >= 5
