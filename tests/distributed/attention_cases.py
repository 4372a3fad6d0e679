"""One case of distributed attention, checked on every rank against ``scaled_dot_product_attention`` in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from arachnec.kernels.attention.distributed_attention import distributed_attention
from arachnec.kernels.attention.exchange import gather_tokens, shard_tokens
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.kernels.attention.subgroups import subgroups
from tests.distributed.rank_device import rank_device

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """``mask``: none, key (boolean, per clip), full (boolean, per head), additive, dead (some rows see nothing)."""

    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    ulysses: int
    ring: int
    heads: int = 3
    key_heads: int | None = None
    query_parts: tuple[int | None, ...] = (None,)
    key_parts: tuple[int | None, ...] = (None,)
    mask: str = "none"
    is_causal: bool = False
    dtype: torch.dtype = torch.float64
    head_size: int = 8
    value_size: int = 8
    batch: int = 2
    scale: float | None = None

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def lengths(self) -> tuple[int, int]:
        """All queries, all keys."""
        total = sum(self.tokens)
        query, key = (sum(total if p is None else p for p in parts) for parts in (self.query_parts, self.key_parts))
        return query, key


_groups: list[ProcessGroups] = []


def process_groups() -> ProcessGroups:
    """Those of this rank, kept over the cases."""
    if not _groups:
        _groups.append(ProcessGroups())
    return _groups[0]


def check(cases: tuple[Case, ...]) -> int:
    """Check the cases one after the other; a rank that is not in a case only makes groups. The number checked."""
    groups = process_groups()
    for case in cases:
        groups.ensure(subgroups(case.ranks, case.ulysses, case.ring), device=rank_device())
    checked = 0
    for case in cases:
        if dist.get_rank() in case.ranks:
            try:
                check_one(case, groups.shard(case.ranks, case.tokens, case.ulysses, case.ring))
            except Exception as error:
                error.add_note(str(case))
                raise
            checked += 1
    return checked


def check_one(case: Case, shard: SequenceShard) -> None:
    leaves, mask, weight = tree_map_only(Tensor, lambda value: value.to(rank_device()), inputs(case))
    expected, expected_grads = reference(case, leaves, mask, weight)
    out, grads = distributed(case, leaves, mask, weight, shard)
    close(out, expected, case.dtype, "output")
    again, grads_again = distributed(case, leaves, mask, weight, shard)
    assert torch.equal(out, again), "a second run gives another output"
    for name, grad, grad_again, wanted in zip(
        ("query", "key", "value"), grads, grads_again, expected_grads, strict=True
    ):
        assert torch.equal(grad, grad_again), f"a second run gives another gradient of {name}"
        if shard.group is not None:
            dist.all_reduce(grad, group=shard.group)
        close(grad, wanted, case.dtype, f"gradient of {name}")


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} is not {tuple(wanted.shape)}"
    if wanted.numel() == 0:
        return
    assert bool(torch.isfinite(got).all()), f"{what} is not finite"
    scale = max(1.0, float(wanted.abs().max()))
    worst = float((got.double() - wanted.double()).abs().max()) / scale
    assert worst <= TOLERANCE[dtype], f"{what} is off by {worst:.3g}"


def inputs(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor]:
    """Query, key and value with all tokens, the global mask, and the gradient of the output: equal on every rank."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    rows, columns = case.lengths
    key_heads = case.key_heads or case.heads
    query = draw(case.batch, case.heads, rows, case.head_size)
    key = draw(case.batch, key_heads, columns, case.head_size)
    value = draw(case.batch, key_heads, columns, case.value_size)
    weight = draw(case.batch, case.heads, rows, case.value_size)
    return (query, key, value), draw_mask(case, generator), weight


def draw_mask(case: Case, generator: torch.Generator) -> Tensor | None:
    rows, columns = case.lengths
    if case.mask == "none":
        return None
    if case.mask == "key":
        return torch.rand((case.batch, 1, 1, columns), generator=generator) > 0.4
    if case.mask == "full":
        return torch.rand((case.batch, case.heads, rows, columns), generator=generator) > 0.3
    if case.mask == "additive":
        return torch.randn((1, case.heads, rows, columns), generator=generator, dtype=torch.float64).to(case.dtype)
    assert case.mask == "dead"
    mask = torch.rand((case.batch, 1, rows, columns), generator=generator) > 0.5
    mask[:, :, ::3] = False
    return mask


def reference(
    case: Case, leaves: tuple[Tensor, ...], mask: Tensor | None, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    # bf16 is held to what exact arithmetic gives on the same numbers.
    exact = torch.float64 if case.dtype == torch.bfloat16 else case.dtype
    query, key, value = (x.to(exact).requires_grad_() for x in leaves)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(exact)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=case.is_causal,
        scale=case.scale,
        enable_gqa=case.key_heads is not None,
    )
    grads = torch.autograd.grad((out * weight.to(exact)).sum(), (query, key, value))
    return out.detach(), grads


def distributed(
    case: Case, leaves: tuple[Tensor, ...], mask: Tensor | None, weight: Tensor, shard: SequenceShard
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The whole output, and this rank's partial gradients of the whole query, key and value."""
    query, key, value = (x.clone().requires_grad_() for x in leaves)
    out = distributed_attention(
        take(query, case.query_parts, shard),
        take(key, case.key_parts, shard),
        take(value, case.key_parts, shard),
        shard,
        query_parts=case.query_parts,
        key_parts=case.key_parts,
        mask=mask,
        is_causal=case.is_causal,
        scale=case.scale,
        enable_gqa=case.key_heads is not None,
    )
    pieces = out.split([shard.local if part is None else part for part in case.query_parts], 2)
    whole = torch.cat(
        [
            gather_tokens(piece, 2, shard) if part is None else piece
            for piece, part in zip(pieces, case.query_parts, strict=True)
        ],
        2,
    )
    loss = (whole * weight).sum() / shard.degree
    return whole.detach(), torch.autograd.grad(loss, (query, key, value))


def take(x: Tensor, parts: tuple[int | None, ...], shard: SequenceShard) -> Tensor:
    """What one rank holds of these parts."""
    pieces = x.split([shard.total if part is None else part for part in parts], 2)
    return torch.cat(
        [shard_tokens(piece, 2, shard) if part is None else piece for piece, part in zip(pieces, parts, strict=True)], 2
    )
