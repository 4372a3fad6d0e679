"""A tensor of one rank's tokens that is gathered when anything but a block reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.kernels.attention.exchange import gather_tokens
from arachnec.kernels.attention.sequence_shard import SequenceShard

# Answered without gathering: the complete tensor would answer the same.
METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


class ShardedTokens(Tensor):
    """This rank's tokens of a tensor along one dimension; its shape is that of the complete tensor."""

    local: Tensor
    token_dim: int
    shard: SequenceShard
    _gathered: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, shard: SequenceShard) -> ShardedTokens:
        sizes = (*local.shape[:dim], shard.total, *local.shape[dim + 1 :])
        needs_grad = local.requires_grad
        tokens: ShardedTokens = Tensor._make_wrapper_subclass(
            cls, sizes, dtype=local.dtype, device=local.device, requires_grad=needs_grad
        )
        tokens.local, tokens.token_dim, tokens.shard, tokens._gathered = local, dim, shard, None
        if needs_grad:
            with torch._C.DisableTorchFunctionSubclass():
                tokens.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return tokens

    def gathered(self) -> Tensor:
        """All tokens, on every rank. Collective over the ranks of the shard; gathered once, and once for gradients."""
        tracked = self.local.requires_grad and torch.is_grad_enabled()
        if self._gathered is None or (tracked and not self._gathered.requires_grad):
            self._gathered = gather_tokens(self.local, self.token_dim, self.shard)
        return self._gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(ShardedTokens, ShardedTokens.gathered, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} got a shard of a sequence past torch's function overrides")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTokens({list(self.shape)}, tokens {self.shard.tokens} along {self.token_dim})"


def _refuse_gradient(gradient: Tensor) -> None:
    """A gradient only comes here from a custom autograd function, which read the values without their history."""
    raise RuntimeError("a custom autograd function outside the blocks took tokens that are sharded: pass it `x + 0`")
