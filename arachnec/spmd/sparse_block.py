"""Attention over video tokens in a block: the rewrite, for one rank's share, and the functions that its graph calls.

Which attentions these are follows from the sequence rewrite: those that it had to distribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from arachnec.ir.nodes import Span
from arachnec.kernels.attention.distributed_attention import KeyFetch, distributed_attention
from arachnec.kernels.attention.divided_heads import Division, HeadShare
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.spmd import runtime
from arachnec.spmd.rewrite import ShardedBlock
from arachnec.spmd.runtime import Parts
from arachnec.tracing.dims import S
from arachnec.tracing.errors import stack_span

Shares = tuple[HeadShare, ...]


class BlockAttention(Protocol):
    """What the attentions of one block are given."""

    def attend(
        self, site: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, heads: Shares
    ) -> Tensor: ...

    def division(self, site: int, tokens: int, places: int) -> Division | None: ...

    def fetch(self, site: int, tokens: int, ranks: Sequence[int]) -> KeyFetch | None: ...


def attention_of_all(
    layers: BlockAttention,
    site: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the place of ``scaled_dot_product_attention`` of heads [B, H, S, D]; dropout and causality never happen."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return layers.attend(site, query, key, value, attn_mask, scale, tuple(map(HeadShare, range(query.shape[1]))))


def attention_of_share(
    layers: BlockAttention,
    site: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shard: SequenceShard,
    query_parts: Parts,
    key_parts: Parts,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """In the place of ``attention_over_tokens``: a rank has all keys of some heads when it attends."""

    def of_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, heads: Shares) -> Tensor:
        return layers.attend(site, query, key, value, mask, scale, heads)

    mask = mask if mask is None else mask[(None,) * (4 - mask.ndim)]
    tokens = sum(shard.total if part is None else part for part in key_parts)
    return distributed_attention(
        query,
        key,
        value,
        shard,
        query_parts=query_parts,
        key_parts=key_parts,
        mask=mask,
        scale=scale,
        local=of_heads,
        division=layers.division(site, tokens, shard.degree),
        fetch=layers.fetch(site, tokens, shard.ranks),
    )


SDPA = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Site:
    """One attention that can be sparse: its number in the block, and its heads."""

    number: int
    heads: int
    head_size: int
    captions: str | None  # where they stand in the sequence: "first" or "last"


@dataclass(frozen=True)
class StaysDense:
    """An attention that cannot be sparse, where it stands and why."""

    place: Span | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.place.file}:{self.place.line}: " if self.place else ""
        return f"{where}stays dense: {self.reason}"


@dataclass(frozen=True, eq=False)
class SparseBlock:
    """``whole(layers, *slots)`` runs the block on all tokens, ``share(layers, shard, *slots)`` on those of a rank."""

    whole: fx.GraphModule
    share: fx.GraphModule
    sites: tuple[Site, ...]
    dense: tuple[StaysDense, ...]


def sparsify_block(block: ShardedBlock) -> SparseBlock:
    """With no sites where nothing can be sparse; then its graphs are as they were, but for the first argument."""
    sites: dict[fx.Node, Site] = {}
    dense = []
    for node in block.captured.exported.graph.nodes:
        if node.op != "call_function" or node.target is not SDPA:
            continue
        reason = _reason(block, node)
        if reason is None:
            _, heads, _, size = node.args[0].meta["val"].shape
            sites[node] = Site(len(sites), int(heads), int(size), _captions(block, node))
        else:
            dense.append(StaysDense(stack_span(node.meta.get("stack_trace")), reason))
    share = {block.counterparts[node]: site for node, site in sites.items()}
    return SparseBlock(
        _replaced(block.captured.graph_module, sites, attention_of_all),
        _replaced(block.module, share, attention_of_share),
        tuple(sites.values()),
        tuple(dense),
    )


def _captions(block: ShardedBlock, node: fx.Node) -> str | None:
    parts = block.counterparts[node].args[6]
    assert isinstance(parts, (tuple, list))
    return None if len(parts) == 1 else "last" if parts[0] is None else "first"


def _reason(block: ShardedBlock, node: fx.Node) -> str | None:
    """Why an attention cannot be sparse; None where it can."""
    counterpart = block.counterparts.get(node)
    if counterpart is None or counterpart.target is not runtime.attention_over_tokens:
        return "its keys are not the tokens of the clip"
    query_parts, key_parts, is_causal, _, grouped = (counterpart.args[i] for i in (5, 6, 7, 8, 9))
    if sympy.expand(block.tokens - S) != 0:
        return "the model joins captions to the tokens outside its blocks"
    if is_causal:
        return "it is causal"
    assert isinstance(key_parts, (tuple, list))
    query, key = (node.args[i].meta["val"].shape for i in (0, 1))  # type: ignore[union-attr]
    if len(query) != 4 or (grouped and query[1] != key[1]):
        return "its query heads share keys"
    if query_parts != key_parts or len(key_parts) > 2 or sum(part is None for part in key_parts) != 1:
        return "its queries are not the tokens and captions that its keys are"
    return None


def _replaced(module: fx.GraphModule, sites: dict[fx.Node, Site], call: Callable[..., Any]) -> fx.GraphModule:
    """The module with another first argument, which the calls in place of the attentions are given."""
    graph = fx.Graph()
    layers = graph.placeholder("layers")
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node, site in sites.items():
        copy = copies[node]
        with graph.inserting_before(copy):
            replacement = graph.call_function(call, (layers, site.number, *copy.args), dict(copy.kwargs))
        copy.replace_all_uses_with(replacement)
        graph.erase_node(copy)
    graph.lint()
    return fx.GraphModule(module, graph, f"Sparse{module.__class__.__name__}")
