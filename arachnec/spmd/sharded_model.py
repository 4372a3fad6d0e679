"""A model whose blocks run on one rank's tokens, while everything around them runs as it was written.

Each block's ``forward`` is replaced on the instance; parameters, names, ``state_dict`` and storages stay as they are.
A block hands on its own tokens as ``ShardedTokens``. The next block takes them as they are; anything else that touches
them, a skip connection, a head, a print, gets the whole tensor, gathered. So the first block of a chain slices its
inputs, the last is gathered from, and what lies between needs no knowledge of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from arachnec.ir.diagnostic import UserError
from arachnec.kernels.attention.exchange import gather_tokens, shard_tokens
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.spmd.rewrite import ShardedBlock, gather_warnings, shard_block
from arachnec.tracing.blocks import CapturedBlock, CapturedModel
from arachnec.tracing.errors import UnequalCall

# Answered without gathering: what a whole tensor would answer as well.
METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


class ShardedTokens(Tensor):
    """A tensor of which this rank holds some tokens along one dimension; its shape is that of the whole."""

    local: Tensor
    token_dim: int
    shard: SequenceShard
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, shard: SequenceShard) -> ShardedTokens:
        sizes = (*local.shape[:dim], shard.total, *local.shape[dim + 1 :])
        needs_grad = local.requires_grad
        made: ShardedTokens = Tensor._make_wrapper_subclass(
            cls, sizes, dtype=local.dtype, device=local.device, requires_grad=needs_grad
        )
        made.local, made.token_dim, made.shard, made._whole = local, dim, shard, None
        if needs_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    def whole(self) -> Tensor:
        """All tokens, on every rank. Collective over the ranks of the shard; gathered once, and once for gradients."""
        tracked = self.local.requires_grad and torch.is_grad_enabled()
        if self._whole is None or (tracked and not self._whole.requires_grad):
            self._whole = gather_tokens(self.local, self.token_dim, self.shard)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(ShardedTokens, ShardedTokens.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} got a shard of a sequence past torch's function overrides")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTokens({list(self.shape)}, tokens {self.shard.tokens} along {self.token_dim})"


def _refuse_gradient(gradient: Tensor) -> None:
    """A gradient only comes here from a custom autograd function, which read the values without their history."""
    raise RuntimeError("a custom autograd function outside the blocks took tokens that are sharded: pass it `x + 0`")


@dataclass
class _Running:
    """How the blocks of one model run at the moment."""

    shard: SequenceShard | None = None
    recompute: bool = False
    _lengths: dict[int, SequenceShard] = field(default_factory=dict)

    def shard_of(self, length: int) -> SequenceShard:
        """The shard of ``length`` tokens: the cascade's own, or one with the same shares where text was joined."""
        assert self.shard is not None
        if length == self.shard.total:
            return self.shard
        if length not in self._lengths:
            self._lengths[length] = _rescaled(self.shard, length)
        return self._lengths[length]


def _rescaled(shard: SequenceShard, length: int) -> SequenceShard:
    total = max(shard.total, 1)
    ends = [length * sum(shard.tokens[: i + 1]) // total for i in range(shard.degree)]
    ends[-1] = length
    starts = [0, *ends[:-1]]
    return replace(shard, tokens=tuple(end - start for start, end in zip(starts, ends, strict=True)))


@dataclass(frozen=True)
class FusedForms:
    """A block's graphs with fused regions: of the ``whole`` block, and of one rank's ``share`` of it."""

    whole: fx.GraphModule
    share: fx.GraphModule


class SequenceModel:
    """A model whose blocks can run on a part of their tokens. Made by ``install``, undone by ``restore``."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[ShardedBlock],
        captured: CapturedModel,
        fused: Sequence[FusedForms | None] | None = None,
    ) -> None:
        self.model, self.blocks, self.captured = model, tuple(blocks), captured
        self._running = _Running()
        self._replaced: list[tuple[nn.Module, Any]] = []
        for block, forms in zip(self.blocks, fused or [None] * len(self.blocks), strict=True):
            for path in block.captured.instances:
                self._replace(path, block, forms)

    def _replace(self, path: str, block: ShardedBlock, forms: FusedForms | None) -> None:
        module = self.model.get_submodule(path)
        self._replaced.append((module, module.__dict__.get("forward")))
        module.forward = _BlockForward(path, module, block, self._running, forms)

    @contextmanager
    def use(self, shard: SequenceShard | None, recompute: bool = False) -> Iterator[nn.Module]:
        """Run the model's forward and backward inside: on this rank's tokens, or, with None or one rank, untouched.

        ``recompute`` keeps nothing of a block but its inputs, and runs its forward again in backward.
        """
        running = self._running
        before = running.shard, running.recompute, running._lengths
        running.shard = None if shard is None or shard.degree == 1 else shard
        running.recompute, running._lengths = recompute, {}
        try:
            yield self.model
        finally:
            running.shard, running.recompute, running._lengths = before

    def restore(self) -> None:
        """Give every block its own forward back."""
        for module, forward in self._replaced:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.forward = forward
        self._replaced.clear()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is gathered that a reader of the model would not expect, and what it costs."""
        return gather_warnings(self.captured, self.blocks)


def install(
    model: nn.Module, captured: CapturedModel, fuse: Callable[[ShardedBlock], FusedForms] | None = None
) -> SequenceModel:
    """Put wrappers in the place of the captured blocks of ``model``; ``fuse`` gives the graphs that they run.

    Without it a block runs its own forward where it has all tokens. Raises ``UserError`` for a block that cannot run
    on a part of its tokens.
    """
    blocks = [shard_block(block) for block in captured.blocks]
    return SequenceModel(model, blocks, captured, None if fuse is None else [fuse(block) for block in blocks])


class _BlockForward:
    """Stands for ``forward`` on one block instance."""

    def __init__(
        self, path: str, module: nn.Module, block: ShardedBlock, running: _Running, forms: FusedForms | None
    ) -> None:
        self.path, self.block, self.running = path, block, running
        self._whole = None if forms is None else forms.whole
        self._share = block.module if forms is None else forms.share
        self.original: Callable[..., Any] = module.forward
        self.__signature__ = inspect.signature(self.original)
        self._arguments = _Arguments(path, self.__signature__, block.captured)
        self._parameters = _parameter_sources(module, block.captured)
        self._constants: dict[tuple[str, torch.device], Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.running
        if running.shard is None and self._whole is not None:
            inputs = self._arguments.tensors(args, kwargs)
            return self.block.captured.unflatten(self._run(self._whole, self._values(inputs)))
        if running.shard is None:
            if running.recompute and torch.is_grad_enabled():
                return checkpoint(self.original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return self.original(*args, **kwargs)
        return self._sharded(self._arguments.tensors(args, kwargs))

    def _sharded(self, tensors: Sequence[Tensor]) -> Any:
        dims = self.block.inputs
        lengths = (x.shape[dim] for x, dim in zip(tensors, dims, strict=True) if dim is not None)
        shard = self.running.shard_of(next(lengths))
        inputs = [_arriving(x, dim, shard) for x, dim in zip(tensors, dims, strict=True)]
        results = self._run(self._share, [shard, *self._values(inputs)])
        outputs = [
            result if dim is None else ShardedTokens(result, dim, shard)
            for result, dim in zip(results, self.block.outputs, strict=True)
        ]
        return self.block.captured.unflatten(outputs)

    def _run(self, module: nn.Module, values: Sequence[Any]) -> Sequence[Tensor]:
        if self.running.recompute and torch.is_grad_enabled():
            kept: Sequence[Tensor] = checkpoint(module, *values, use_reentrant=False, preserve_rng_state=False)
            return kept
        made: Sequence[Tensor] = module(*values)
        return made

    def _values(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        values: list[Tensor] = []
        for slot, source in zip(self.block.captured.slots, self._parameters, strict=True):
            if source is not None:
                values.append(source[0][source[1]])
            elif slot.kind == "input":
                values.append(inputs[int(slot.target)])
            else:
                values.append(self._constant(str(slot.target), inputs[0].device))
        return values

    def _constant(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._constants:
            constant = self.block.captured.exported.constants[name]
            self._constants[name, device] = constant if constant.ndim == 0 else constant.to(device)
        return self._constants[name, device]


def _arriving(x: Tensor, dim: int | None, shard: SequenceShard) -> Tensor:
    """An input of a block in the form its graph takes it: the rank's own tokens, or everything."""
    if isinstance(x, ShardedTokens):
        if dim == x.token_dim and x.shard == shard:
            return x.local
        x = x.whole()
    return x if dim is None else shard_tokens(x, dim, shard)


def _parameter_sources(module: nn.Module, captured: CapturedBlock) -> list[tuple[dict[str, Any], str] | None]:
    """The dictionary and key where each parameter and buffer of this instance is found at the time of a call."""
    sources: list[tuple[dict[str, Any], str] | None] = []
    for slot in captured.slots:
        if slot.kind not in ("parameter", "buffer"):
            sources.append(None)
            continue
        owner_path, _, name = str(slot.target).rpartition(".")
        owner = module.get_submodule(owner_path)
        sources.append((owner._parameters if slot.kind == "parameter" else owner._buffers, name))
    return sources


class _Arguments:
    """From a call of the forward, however it is written, to the tensor inputs of the captured graph."""

    def __init__(self, path: str, signature: inspect.Signature, captured: CapturedBlock) -> None:
        self.path, self.signature, self.captured = path, signature, captured
        self._forms: dict[tuple[int, tuple[str, ...]], list[tuple[str, int | str]] | None] = {}

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self._bound(args, kwargs))
        captured = self.captured
        if spec != captured.spec:
            raise UserError(UnequalCall(None, self.path, str(spec), str(captured.spec)))
        for position, value, fixed in captured.constants:
            if fixed and leaves[position] is not value and leaves[position] != value:
                raise UserError(UnequalCall(None, self.path, repr(leaves[position]), repr(value)))
        return [leaves[position] for position in captured.input_leaves]

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        form = (len(args), tuple(kwargs))
        if form not in self._forms:
            self._forms[form] = self._order(form)
        order = self._forms[form]
        if order is None:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        return {name: args[source] if isinstance(source, int) else kwargs[source] for name, source in order}

    def _order(self, form: tuple[int, tuple[str, ...]]) -> list[tuple[str, int | str]] | None:
        """Which argument of such a call is which parameter; None where a parameter takes several."""
        bound = self.signature.bind(*range(form[0]), **{name: name for name in form[1]}).arguments
        if not all(isinstance(source, (int, str)) for source in bound.values()):
            return None
        return list(bound.items())
