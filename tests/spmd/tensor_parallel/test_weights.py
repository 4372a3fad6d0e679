"""An encoder by several ranks, each with a part of its weights, gives what it gives on one."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage, quantity
from arachnec.ir.tensor_parallel import divided_by_width
from arachnec.ir.values import Attributes, Quantity
from arachnec.spmd.spatial.split_tensor import NotDivisible
from arachnec.spmd.tensor_parallel.division import WeightCuts, cuts_of, encode_with_parts, with_width
from tests.spmd.spatial_ranks import ThreadPeers, on_threads

WIDTH, HEAD, TOKENS, WORDS = 24, 4, 7, 200


class Attention(nn.Module):
    """Six heads over grouped keys, with what encoders do to them: a bias for each head, rotation, a mask."""

    def __init__(self, heads: int, groups: int, *, fused: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.fused = heads, groups, fused
        self.q = nn.Linear(WIDTH, heads * HEAD, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, groups * HEAD, bias=bias) for _ in range(2))
        self.o = nn.Linear(heads * HEAD, WIDTH, bias=bias)
        self.near = nn.Embedding(8, heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, HEAD).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = torch.cat([-q[..., HEAD // 2 :], q[..., : HEAD // 2]], -1) + q * torch.linspace(0, 1, t)[:, None].to(q)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.groups != self.heads)
        else:
            k, v = (
                y[:, :, None].expand(b, self.groups, self.heads // self.groups, t, HEAD).reshape(b, self.heads, t, HEAD)
                for y in (k, v)
            )
            steps = torch.arange(t, device=x.device)
            scores = torch.matmul(q, k.transpose(3, 2))
            scores += self.near((steps[:, None] - steps).abs().clamp(max=7)).permute(2, 0, 1)[None] + mask
            y = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class Text(nn.Module):
    """Two blocks; the MLP's width is no multiple of the heads, and is gated where ``gated``."""

    def __init__(self, heads: int = 6, groups: int = 6, *, gated: bool = True, fused: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) if gated else nn.LayerNorm(WIDTH) for _ in range(4)])
        self.attentions = nn.ModuleList([Attention(heads, groups, fused=fused, bias=not gated) for _ in range(2)])
        self.ups = nn.ModuleList([nn.Linear(WIDTH, 40, bias=not gated) for _ in range(2)])
        self.gates = nn.ModuleList([nn.Linear(WIDTH, 40, bias=False) for _ in range(2)]) if gated else None
        self.downs = nn.ModuleList([nn.Linear(40, WIDTH, bias=not gated) for _ in range(2)])

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.empty((1, clip.text_tokens), dtype=torch.int64, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        mask = torch.zeros(t, t, device=ids.device).masked_fill(torch.ones(t, t, device=ids.device).tril() == 0, -1e9)
        x = self.words(ids) + self.places(torch.arange(t, device=ids.device))
        for number in range(2):
            x = x + self.attentions[number](self.norms[2 * number](x), mask)
            y = self.norms[2 * number + 1](x)
            up = (
                F.gelu(self.ups[number](y))
                if self.gates is None
                else F.silu(self.gates[number](y)) * self.ups[number](y)
            )
            x = x + self.downs[number](up)
        return x


CLIPS = [VideoClip(0, 1, 8, 8, TOKENS), VideoClip(1, 1, 8, 8, 3)]
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "heads with a bias each, gated": Text,
    "grouped keys": lambda: Text(8, 4),
    "grouped keys in one operator": lambda: Text(8, 4, fused=True),
    "biases, layer norm, not gated": lambda: Text(gated=False, fused=True),
}


def cuts(make: Callable[[], nn.Module]) -> WeightCuts:
    with torch.device("meta"):
        encoder = make()
        return cuts_of(encoder, torch.empty((1, TOKENS), dtype=torch.int64))


@pytest.mark.parametrize("name", ENCODERS)
def test_it_is_the_encoder_on_one_rank_with_one_gather_and_a_sum_for_every_attention_and_mlp(name: str) -> None:
    torch.manual_seed(0)
    encoder, cut = ENCODERS[name]().double(), cuts(ENCODERS[name])
    ids = torch.randint(0, WORDS, (2, TOKENS))
    alone, weights = encoder(ids), dict(encoder.named_parameters())
    for ranks in (1, 2, 3, 4):

        def one(peers: ThreadPeers, ranks: int = ranks) -> Tensor:
            parts = {
                part: held.__class__(held.local.clone(), held.layout)
                for part, held in cut.parts(weights, ranks, peers.index).items()
            }
            without = copy.deepcopy(encoder)
            for part in parts:  # what a rank does not hold, it does not read
                without.get_parameter(part).data.fill_(torch.nan)
            result = encode_with_parts(without, parts, ids, peers, ranks)
            assert peers.calls == (1 + 4 * 2 if ranks > 1 else 0)  # a sum is two exchanges
            return result

        for shared in on_threads(ranks, one):
            torch.testing.assert_close(shared, alone)


def test_columns_then_rows_whole_heads_and_the_table_of_words_are_cut_and_nothing_else() -> None:
    cut = cuts(ENCODERS["grouped keys"])
    assert cut.units == 4
    named = {name.rsplit(".", 2)[-2] if "." in name else name for name in cut.dims}
    assert {name for name, dim in cut.dims.items() if dim == 1} == {
        "words.weight", *(f"attentions.{n}.o.weight" for n in (0, 1)), *(f"downs.{n}.weight" for n in (0, 1)),
    }  # fmt: skip
    assert not named & {"places", "near", "norms"}
    assert cut.layout("attentions.0.q.weight", (32, 24), 3).local_shape(2) == (2 * 2 * HEAD, 24)
    assert cut.layout("attentions.0.k.weight", (16, 24), 3).local_shape(2) == (2 * HEAD, 24)


def stage(encoder: nn.Module) -> Stage:
    size = sum(p.numel() * p.itemsize for p in encoder.parameters())
    whole = Stage("text", False, Attributes.of(state=Quantity(size / 2**30, "GiB")))
    return with_width(whole, encoder, CLIPS, lambda clip: clip.frames)


def test_a_rank_holds_no_more_than_its_stage_says() -> None:
    with torch.device("meta"):
        encoder = Text(8, 4)
    whole, cut = stage(encoder), cuts(ENCODERS["grouped keys"])
    for ranks in (2, 3, 4):
        said = quantity(divided_by_width(whole, ranks).attrs["state"]) * 2**30
        weights = dict(encoder.named_parameters())
        held = [sum(part.local.numel() for part in cut.parts(weights, ranks, place).values()) for place in range(ranks)]
        rest = sum(weight.numel() for name, weight in weights.items() if name not in cut.dims)
        assert max(held) + rest == pytest.approx(said / 4)


def test_what_is_counted_of_it_falls_on_every_rank_alike() -> None:
    with torch.device("meta"):
        attrs = stage(Text(8, 4)).attrs
    assert (attrs["tensor_units"], attrs["exchanges"], attrs["undivided"]) == (4, 9, 0.0)
    halo = attrs["halo"](B=1, S=0, T=TOKENS) * 2**30  # type: ignore[operator]
    x = TOKENS * WIDTH * 4
    assert halo == pytest.approx(4 * 2 * x * 3 / 4 + x * 3 / 4, rel=0.05)


class Sorts(Text):
    def forward(self, ids: Tensor) -> Tensor:
        return self.ups[0](self.words(ids)).sort(dim=-1).values


class SixHeadsThenFive(Text):
    def __init__(self) -> None:
        super().__init__()
        self.attentions[1] = Attention(5, 5, fused=False, bias=False)


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.load = Text.load.__get__(self)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


@pytest.mark.parametrize(
    ("make", "reason"), [(NoLayers, "no linear layers"), (Sorts, "aten.sort"), (SixHeadsThenFive, "no common divisor")]
)
def test_what_cannot_be_divided_stays_whole_and_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    with torch.device("meta"):
        attrs = stage(make()).attrs
    assert reason in str(attrs["tensor_whole"])
    assert "tensor_split" not in attrs


def test_it_is_refused_where_it_gives_no_tensor() -> None:
    class Gives(Text):
        def forward(self, ids: Tensor) -> Tensor:
            return {"text": super().forward(ids)}  # type: ignore[return-value]

    with pytest.raises(NotDivisible, match="no tensor but dict"):
        parts = cuts(Text).parts(dict(Text().named_parameters()), 1, 0)
        on_threads(
            1, lambda peers: encode_with_parts(Gives(), parts, torch.zeros(1, TOKENS, dtype=torch.int64), peers, 1)
        )
