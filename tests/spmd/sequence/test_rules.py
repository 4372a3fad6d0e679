"""Which ops run on a rank's tokens as they are, which are gathered around, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError, render
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.spmd.rewrite import ShardedBlock, shard_block
from arachnec.spmd.sharded_model import install
from arachnec.tracing.blocks import CapturedModel, capture_blocks
from arachnec.tracing.record import ExampleCall

C = 6
Function = Callable[[Tensor, Tensor, Tensor], object]


class Block(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, text: Tensor, table: Tensor) -> object:
        return self.function(x, text, table)


class OneBlock(nn.Module):
    """x [B, S, C] video, text [B, T, C], table [S, C] of places."""

    _repeated_blocks = ("Block",)

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(function)])

    def forward(self, x: Tensor, text: Tensor, table: Tensor) -> object:
        return self.layers[0](x, text, table)


def inputs(batch: int, tokens: int, text: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    shapes = {"x": (batch, tokens, C), "text": (batch, text, C), "table": (tokens, C)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def examples() -> list[ExampleCall]:
    sizes = [(2, 10, 7), (2, 16, 7), (2, 10, 9), (3, 10, 7), (5, 12, 11)]
    return [ExampleCall(inputs(b, s, t), (s,), b, t) for b, s, t in sizes]


def captured(function: Function) -> CapturedModel:
    return capture_blocks(OneBlock(function), examples(), verify=False)


def sharded(function: Function) -> ShardedBlock:
    return shard_block(captured(function).blocks[0])


def on_ranks(block: ShardedBlock, tokens: Sequence[int], batch: int, text: int) -> list[Tensor]:
    """The outputs, joined over ranks that need nothing of each other."""
    given = inputs(batch, sum(tokens), text)
    pieces = []
    for index, count in enumerate(tokens):
        shard = SequenceShard(tuple(range(len(tokens))), index, tuple(tokens), len(tokens), 1)
        local = [
            tensor if dim is None else tensor.narrow(dim, shard.offset, count)
            for tensor, dim in zip(given.values(), block.inputs, strict=True)
        ]
        pieces.append(block.module(shard, *local))
    return [
        piece[0] if dim is None else torch.cat(piece, dim)
        for piece, dim in zip(zip(*pieces, strict=True), block.outputs, strict=True)
    ]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], -1).flatten(-2) * table.sin() + x * table.cos()


def overwrite(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    joined = torch.cat([text, x], dim=1).clone()
    joined[:, text.shape[1] :] = rotate(joined[:, text.shape[1] :], table)
    return joined[:, text.shape[1] :]


def interleaved(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 1::2]
    out[..., 1::2] = x[..., 0::2] * 2
    return out


def joined_parts(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    both = F.layer_norm(torch.cat([x, text], dim=1), [C])
    video, words = both.split([x.shape[1], text.shape[1]], dim=1)
    return video * words.mean(1, keepdim=True)


def rows_of_all_clips(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    rows = x.reshape(-1, C)
    return (rows @ torch.ones(C, C)).view(x.shape) + table


def cross(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    q, k = x.unflatten(-1, (2, 3)).transpose(1, 2), text.unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


def cross_masked(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    mask = table[None, :, :1] > text[:, None, :, 0]
    return F.scaled_dot_product_attention(x, text, text, attn_mask=mask | (mask.long() == 0))


def per_token(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
    """Attention over the features of each token: the tokens are its batch."""
    q = x.unflatten(-1, (3, 2)).flatten(0, 1)
    return F.scaled_dot_product_attention(q, q, q).view(x.shape)


LOCAL: dict[str, Function] = {
    "pointwise": lambda x, text, table: F.gelu(x * 2 + table) - text.mean(1, keepdim=True),
    "broadcast table": lambda x, text, table: torch.where(table > 0, x, x.new_zeros(())),
    "cast": lambda x, text, table: x.double().type_as(x).to(torch.float64).float(),
    "rotation": lambda x, text, table: rotate(x, table),
    "interleaved write": interleaved,
    "write to the video part": overwrite,
    "split at the border": joined_parts,
    "negative bounds": lambda x, text, table: torch.cat([x, text], 1)[:, : -text.shape[1]] + table,
    "chunk of features": lambda x, text, table: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].sum(-1, keepdim=True),
    "tokens merged with clips": rows_of_all_clips,
    "tokens merged with features": lambda x, text, table: x.flatten(1).exp().unflatten(1, (-1, C)),
    "norm and softmax": lambda x, text, table: F.rms_norm(x, [C]).softmax(-1).cumsum(-1),
    "running extremum": lambda x, text, table: x.cummax(-1)[0] + F.pad(x.diff(dim=-1), (0, 1)),
    "order of features": lambda x, text, table: x.argsort(-1) + x.logcumsumexp(-1),
    "joined features": lambda x, text, table: torch.concat([x, torch.concatenate([x, table.expand_as(x)], -1)], -1),
    "several results": lambda x, text, table: sum(
        tensor
        for tensors in (
            torch.var_mean(x, -1),
            x.median(-1),
            x.kthvalue(2, -1),
            x.aminmax(dim=-1),
            [x.count_nonzero(-1)],
        )
        for tensor in tensors
    ),
    "permutations": lambda x, text, table: x.permute(2, 1, 0).transpose(0, 2).unsqueeze(0).squeeze(0),
    "stack and select": lambda x, text, table: torch.stack([x, table.expand_as(x)], 0)[1] * x,
    "expand and repeat": lambda x, text, table: x[:, :, None].expand(-1, -1, 4, -1).repeat(1, 1, 2, 1).sum(2),
    "padding of features": lambda x, text, table: F.pad(x, (1, 2)).flip(-1),
    "complex numbers": lambda x, text, table: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous()) * 1j
    ).flatten(-2),
    "positions": lambda x, text, table: x + torch.arange(x.shape[1])[:, None] / x.shape[1],
    "number of tokens": lambda x, text, table: x / x.shape[1] + x.shape[1],
    "look-up": lambda x, text, table: F.embedding((x[..., 0] > 0).long(), table[:2]) + 0 * x,
    "outer product": lambda x, text, table: x @ text.transpose(1, 2) @ text,
    "sum of products": lambda x, text, table: torch.einsum("bsc,btc->bst", x, text) @ text * table.sum(-1)[:, None],
    "repetition of features": lambda x, text, table: x.repeat_interleave(2, dim=-1) + text.sum() * 0,
    "cross-attention": cross,
    "cross-attention with a mask": cross_masked,
    "attention in each token": per_token,
    "maximum": lambda x, text, table: x.max(-1, keepdim=True).values + x.amin(-1, keepdim=True) + x * 0,
}


@pytest.fixture(scope="module")
def all_local() -> ShardedBlock:
    return sharded(lambda *given: tuple(function(*given) for function in LOCAL.values()))


def test_none_of_these_needs_a_word_from_another_rank(all_local: ShardedBlock) -> None:
    assert (all_local.gathers, all_local.attentions) == ((), ())


SHARES = (((5, 5), 2, 5), ((1, 6, 2), 4, 6), ((3, 1, 4, 3), 1, 3), ((4, 0), 2, 4))


@pytest.fixture(scope="module")
def by_share(all_local: ShardedBlock) -> list[list[Tensor]]:
    return [on_ranks(all_local, tokens, batch, text) for tokens, batch, text in SHARES]


@pytest.mark.parametrize(("name", "position"), [(name, i) for i, name in enumerate(LOCAL)])
def test_runs_on_any_share_of_the_tokens_as_it_is(name: str, position: int, by_share: list[list[Tensor]]) -> None:
    for (tokens, batch, text), outputs in zip(SHARES, by_share, strict=True):
        whole = LOCAL[name](**inputs(batch, sum(tokens), text))
        torch.testing.assert_close(outputs[position], whole)


GATHERED: dict[str, tuple[Function, str]] = {
    "mean": (lambda x, text, table: x * x.mean(1, keepdim=True), "reduces over the tokens"),
    "softmax": (lambda x, text, table: x.softmax(1), "combines the tokens"),
    "norm": (
        lambda x, text, table: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
        "is not known to treat tokens one by one",
    ),
    "convolution": (
        lambda x, text, table: F.conv1d(x.transpose(1, 2), torch.ones(C, C, 3), padding=1).transpose(1, 2),
        "is not known to treat tokens one by one",
    ),
    "shift": (lambda x, text, table: x.roll(1, 1), "moves tokens to other places"),
    "stride": (lambda x, text, table: x + x[:, ::2].mean(1, keepdim=True), "takes tokens with a stride"),
    "first token": (lambda x, text, table: x - x[:, 0:1], "cuts the tokens at 0 and 1"),
    "grid": (lambda x, text, table: x.unflatten(1, (2, -1)).sum(1).repeat(1, 2, 1), "splits the token dimension"),
    "padding": (lambda x, text, table: F.pad(x, (0, 0, 1, 0))[:, :-1], "pads the tokens"),
    "linear attention": (lambda x, text, table: x @ (x.transpose(1, 2) @ x), "multiplies tokens with tokens"),
    "tokens by tokens": (
        lambda x, text, table: torch.einsum("bqk,bkc->bqc", torch.einsum("bqc,bkc->bqk", x, x).softmax(-1), x),
        "multiplies tokens with tokens",
    ),
    "order of the parts": (
        lambda x, text, table: (torch.cat([x, text], 1) + torch.cat([text, x], 1))[:, : x.shape[1]],
        "joins tensors whose tokens lie differently over the ranks",
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_mixes_tokens_is_gathered_around_and_reported(name: str) -> None:
    function, reason = GATHERED[name]
    notes = sharded(function).gathers
    assert notes
    assert reason in str(notes[0])
    assert notes[0].bytes.free_symbols
    assert notes[0].place is not None
    assert notes[0].place.file == __file__


def test_attention_over_the_tokens_is_distributed_and_its_mask_stays_whole() -> None:
    def function(x: Tensor, text: Tensor, table: Tensor) -> Tensor:
        both = torch.cat([text, x], 1).unflatten(-1, (2, 3)).transpose(1, 2)
        mask = torch.cat([text, table.expand_as(x)], 1)[:, None, None, :, 0] > -9
        return (
            F.scaled_dot_product_attention(both, both, both, attn_mask=mask)[:, :, text.shape[1] :]
            .transpose(1, 2)
            .flatten(2)
        )

    block = sharded(function)
    assert (len(block.attentions), block.gathers) == (1, ())
    call = next(n for n in block.module.graph.nodes if "attention_over_tokens" in n.name)
    assert call.args[5][1] is None  # the video's tokens come after the text's
    assert call.args[5] == call.args[6]


def test_a_caption_as_long_as_a_shard_is_not_taken_for_tokens() -> None:
    block = sharded(cross)
    assert (block.attentions, block.gathers) == ((), ())
    given = inputs(1, 10, 5)
    torch.testing.assert_close(on_ranks(block, (5, 5), 1, 5)[0], cross(**given))


def test_a_block_that_returns_joined_tokens_gathers_them() -> None:
    block = sharded(lambda x, text, table: (torch.cat([x, text], 1), x + 1))
    assert block.outputs == (None, 1)
    assert "joined" in block.gathers[0].reason


def test_random_numbers_over_tokens_are_refused_with_the_line() -> None:
    model = captured(lambda x, text, table: x + 1)
    graph = model.blocks[0].exported.graph
    add = next(node for node in graph.nodes if node.op == "call_function" and "add" in node.name)
    with graph.inserting_after(add):
        drop = graph.call_function(torch.ops.aten.dropout.default, (add, 0.1, True))
    drop.meta = dict(add.meta)
    graph.output_node().args = ((drop,),)
    with pytest.raises(UserError) as raised:
        shard_block(model.blocks[0])
    diagnostic = raised.value.diagnostics[0]
    text = render(diagnostic)
    assert text.splitlines()[0] == (
        "error: Block cannot run on a part of its tokens: `aten.dropout.default`: it draws random numbers"
    )
    assert "help: draw them in sample(clip, generator) and pass them in" in text
    assert "this operation" in text


def test_dropped_attention_weights_are_refused() -> None:
    model = captured(lambda x, text, table: F.scaled_dot_product_attention(x, x, x))
    node = next(n for n in model.blocks[0].exported.graph.nodes if "attention" in n.name)
    node.args = (*node.args[:3], None, 0.1)
    with pytest.raises(UserError, match="it drops attention weights at random"):
        shard_block(model.blocks[0])


class Rows(OneBlock):
    """The second block gets the rows of all clips, with (``with_table``) or without the table of places."""

    def __init__(self, with_table: bool) -> None:
        super().__init__(lambda x, text, table: x * 2 + text.mean())
        self.layers.append(Block(lambda x, rows, table: x * 2 + rows + table.mean()))
        self.with_table = with_table

    def forward(self, x: Tensor, text: Tensor, table: Tensor) -> object:
        rows = self.layers[0](x, text, table).flatten(0, 1)
        return self.layers[1](rows, rows + 1, table if self.with_table else rows).view(x.shape)


def test_rows_of_all_clips_are_tokens_where_the_block_knows_no_others() -> None:
    block = shard_block(capture_blocks(Rows(with_table=False), examples(), verify=False).blocks[1])
    assert (block.inputs, block.outputs, str(block.tokens)) == ((0, 0, 0), (0,), "B*S")


def test_rows_of_all_clips_beside_tokens_are_refused() -> None:
    model = Rows(with_table=True)
    with pytest.raises(UserError, match="no input of Block_2 has the video's tokens as a dimension of their own"):
        install(model, capture_blocks(model, examples(), verify=False))
