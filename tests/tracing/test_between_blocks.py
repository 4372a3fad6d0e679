"""Layers between the blocks, as a U-Net's middle: what they cost and keep counts with the stage that computes them."""

from __future__ import annotations

import math
import weakref
from functools import cache
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from arachnec.backends.staged_model import StageForward
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Stage, formula
from arachnec.passes.trace import trace_model
from arachnec.planning.stage_cuts import demand_cuttable, layer_work, parts_of
from arachnec.tracing.dataflow import Cut, record_dataflow
from tests.tracing.test_trace import CLIPS, WIDTH, Block, latent

BLOCKS, TEXT = 5, 8


class Hourglass(nn.Module):
    """``middle`` says behind which blocks there is a layer in no block, and how wide; ``skips`` who reads whom;
    behind ``bent`` blocks stands a function without parameters."""

    def __init__(self, middle: dict[int, int], skips: dict[int, int], bent: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.skips, self.bent = skips, bent
        self.embed, self.text = nn.Conv3d(3, WIDTH, (1, 2, 2), (1, 2, 2)), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.middle = nn.ModuleDict(
            {
                str(at): nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.GELU(), nn.Linear(wide * WIDTH, WIDTH))
                for at, wide in middle.items()
            }
        )
        self.merge = nn.ModuleDict({str(at): nn.Linear(2 * WIDTH, WIDTH) for at in skips})
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        tokens: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, text)
            tokens.append(x)
            x = torch.tanh(x) if number in self.bent else x
            if str(number) in self.middle:
                x = self.middle[str(number)](x)
            if number in self.skips:
                x = self.merge[str(number)](torch.cat([x, tokens[self.skips[number]]], -1))
        return self.head(x)


def sample(clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    noise = torch.randn(1, 3, *latent(clip), generator=generator)
    return {"video": noise, "text": torch.randn(1, clip.text_tokens, 16, generator=generator)}, noise


@cache
def plain() -> Stage:
    return traced({}, {})


def traced(*drawn: Any) -> Stage:
    source = SimpleNamespace(build=lambda: Hourglass(*drawn), sample=sample, encoders=None, loss=None)
    return trace_model(source, CLIPS).stages[-1]


def really(model: nn.Module, cut: Cut, arguments: dict[str, Tensor]) -> list[tuple[float, float]]:
    """FLOPs and bytes kept for the backward of every stage's forward, one after the other."""
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    handed: dict[Any, Tensor] = {}
    figures = []
    for stage in range(len(cut.parts)):
        kept: list[weakref.ref[Tensor]] = []

        def pack(tensor: Tensor, kept: list[weakref.ref[Tensor]] = kept) -> Tensor:
            held = tensor.detach()  # an operation that keeps its own output would keep itself
            kept.append(weakref.ref(held))
            return held

        given = {name: value.detach().requires_grad_() for name, value in handed.items()}
        counter = FlopCounterMode(display=False)
        with counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            run = StageForward(model, cut, stage)(arguments, given)
        alive = (tensor for reference in kept if (tensor := reference()) is not None)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
        size = sum(count for pointer, count in storages.items() if pointer not in own)
        figures.append((counter.get_total_flops(), size))
        handed = dict(run.outputs)
    return figures


def cut_at(model: nn.Module, cuts: tuple[int, ...], arguments: dict[str, Tensor]) -> Cut:
    paths = [f"blocks.{number}" for number in range(BLOCKS)]
    flow = record_dataflow(model, paths, arguments, lambda output: output)
    return Cut(flow, tuple(tuple(paths[a:b]) for a, b in pairwise((0, *cuts, BLOCKS))))


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, int], frozenset[int]]:
    middle = draw(st.dictionaries(st.integers(0, BLOCKS - 1), st.integers(1, 12), max_size=3))
    skips = {at: draw(st.integers(0, at - 1)) for at in draw(st.sets(st.integers(1, BLOCKS - 1), max_size=2))}
    return middle, skips, frozenset(draw(st.sets(st.integers(0, BLOCKS - 1), max_size=2)))


@settings(max_examples=4, deadline=None)
@given(models(), st.sets(st.integers(1, BLOCKS - 1), min_size=1, max_size=3), st.sampled_from(CLIPS))
def test_every_stage_is_planned_to_keep_and_compute_what_it_does(
    drawn: tuple[dict[int, int], dict[int, int], frozenset[int]], cuts: set[int], clip: VideoClip
) -> None:
    """Bytes are exact, but that what a function without parameters makes counts for it and for the block that reads it.
    Of FLOPs what layers between blocks add is: torch does not count attention on processors."""
    at, model, straight = tuple(sorted(cuts)), Hourglass(*drawn), Hourglass({}, {})
    arguments, _ = sample(clip, torch.Generator().manual_seed(0))
    sizes = {"B": 1, "S": math.prod(latent(clip)) // 4, "T": clip.text_tokens}
    parts, bare = parts_of(traced(*drawn), at), parts_of(plain(), at)
    real, without = (really(m, cut_at(m, at, arguments), arguments) for m in (model, straight))
    for part, other, (flops, kept), (fewer, _) in zip(parts, bare, real, without, strict=True):
        spare = formula(part.attrs["saved"])(**sizes) * 2**30 - kept
        assert -1e-6 * kept <= spare <= len(model.bent) * 4 * WIDTH * sizes["S"] + 1e-6 * kept
        more = formula(part.attrs["flops"])(**sizes) - formula(other.attrs["flops"])(**sizes)
        assert more * 1e12 == pytest.approx(flops - fewer, rel=1e-6, abs=1e-3)


def test_the_parts_of_any_cut_add_up_to_the_stage() -> None:
    whole = traced({1: 4, 2: 9}, {3: 0})
    sizes = {"B": 2, "S": 640, "T": TEXT}
    work = layer_work(whole, [])
    for cuts in (chosen for count in range(BLOCKS) for chosen in combinations(range(1, BLOCKS), count)):
        parts = parts_of(whole, cuts)
        total = math.fsum(formula(part.attrs["flops"])(**sizes) for part in parts)
        assert total == pytest.approx(formula(whole.attrs["flops"])(**sizes))
        for part, (first, last) in zip(parts, pairwise((0, *cuts, BLOCKS)), strict=True):
            own = formula(part.attrs["flops"])(B=1, S=32760, T=512)
            assert own == pytest.approx(math.fsum(work[first:last]))


def test_a_head_is_what_stands_behind_the_last_block() -> None:
    """What layers between blocks keep is still there when the backward of the last block runs."""
    sizes = {"B": 1, "S": 640, "T": TEXT}
    (kept, _), (least, _) = (stage.attrs["head"] for stage in (traced({1: 12}, {}), plain()))
    assert formula(kept)(**sizes) == formula(least)(**sizes)


class Twice(Hourglass):
    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x, text)
        return self.head(x)


def test_a_model_that_calls_a_block_twice_is_refused_by_the_name_of_the_block() -> None:
    source = SimpleNamespace(build=lambda: Twice({}, {}), sample=sample, encoders=None, loss=None)
    stage = trace_model(source, CLIPS).stages[-1]
    with pytest.raises(UserError, match=r"stage @dit cannot be cut: block `blocks.1` is called 2 times in a forward"):
        demand_cuttable(stage)


class Middle(Hourglass):
    """A block stands alone between the others, as in a U-ViT."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.alone = Block()

    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        for number, block in enumerate(self.blocks):
            x = block(x, text)
            x = self.alone(x, text) if number == 2 else x
        return self.head(x)


def test_a_block_that_stands_alone_between_the_others_costs_what_each_of_them_does() -> None:
    """Its attention keeps no scores, and its work grows with the square of the tokens."""
    source = SimpleNamespace(build=Middle, sample=sample, encoders=None, loss=None)
    attrs = trace_model(source, CLIPS).stages[-1].attrs
    for alone, of_block in (("between_flops", "block_flops"), ("between_saved", "block_saved")):
        ((layer, own),) = attrs[alone]
        assert layer == 2
        for tokens, text in ((64, 8), (32760, 512)):
            assert own(B=2, S=tokens, T=text) == pytest.approx(attrs[of_block][0](B=2, S=tokens, T=text), rel=0.03)
