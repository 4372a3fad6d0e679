"""A model whose blocks run on one rank's tokens, while everything around them runs as it was written.

Each block's ``forward`` is replaced on the instance; parameters, names, ``state_dict`` and storages stay. A block
returns its own tokens as ``ShardedTokens``. The next block takes them as they are. Anything else that reads them (a
skip connection, a head, a print) gets the complete tensor, gathered. So the first block of a chain slices its inputs,
the outputs of the last are gathered, and what lies between needs no knowledge of the model.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from arachnec.kernels.attention.exchange import shard_tokens
from arachnec.kernels.attention.sequence_shard import SequenceShard, rescaled_tokens
from arachnec.kernels.sparse.predictor import RANK
from arachnec.spmd.rewrite import ShardedBlock, gather_warnings, shard_block
from arachnec.spmd.sharded_tokens import ShardedTokens
from arachnec.spmd.sparse_block import SparseBlock, sparsify_block
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade, add_predictors
from arachnec.tracing.blocks import CapturedBlock, CapturedModel
from arachnec.tracing.captured import chained_inputs
from arachnec.tracing.errors import unequal_call_error


class InputsAway(Protocol):
    """Keeps inputs out of the device's memory until their block runs again."""

    def put(self, value: Tensor) -> object: ...

    def get(self, kept: object) -> Tensor: ...


@dataclass
class Execution:
    """How the blocks of one model run at the moment."""

    shard: SequenceShard | None = None
    recompute: bool | Set[str] = False  # of all blocks, or the paths of some
    recomputing: AbstractContextManager[object] | None = None  # a block that is run again runs inside it
    away: InputsAway | None = None  # where the inputs of blocks that run again are kept; None: where they are
    sparse: SparseCascade | None = None  # attention over video tokens; None: as the model has it
    _lengths: dict[int, SequenceShard] = field(default_factory=dict)

    def recomputes(self, path: str) -> bool:
        """Whether the block keeps its inputs alone and runs again in the backward."""
        some = self.recompute
        return torch.is_grad_enabled() and (some if isinstance(some, bool) else path in some)

    def shard_of(self, length: int) -> SequenceShard:
        """The shard of ``length`` tokens: the cascade's own, or one with the same shares where text was joined."""
        assert self.shard is not None
        if length == self.shard.total:
            return self.shard
        if length not in self._lengths:
            self._lengths[length] = replace(self.shard, tokens=rescaled_tokens(self.shard.tokens, length))
        return self._lengths[length]


@dataclass(frozen=True)
class FusedForms:
    """A block's graphs with fused regions: of the ``whole`` block, and of one rank's ``share`` of it."""

    whole: fx.GraphModule
    share: fx.GraphModule


class BlockGraph:
    """One graph of a block instance: its tensors found, run on all tokens or on a share of them."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        block: ShardedBlock,
        forms: FusedForms | None,
        signature: inspect.Signature,
        chained: Sequence[bool],
    ) -> None:
        self.block = block
        self.whole = None if forms is None else forms.whole
        self.share = block.module if forms is None else forms.share
        self.sparse: SparseBlock | None = None
        self.arguments = _Arguments(path, signature, block.captured)
        self._chained = chained  # which of its inputs another block made
        self._parameters = _parameter_sources(module, block.captured)
        self._constants: dict[tuple[str, torch.device], Tensor] = {}

    def serves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph is for such a call: any, or one of its clip shape."""
        return not self.block.captured.fixed or self.arguments.fit(args, kwargs)

    def from_blocks(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [value for value, chained in zip(inputs, self._chained, strict=False) if chained]

    def values(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the graph's placeholders are given."""
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


class BlockForward:
    """Replaces ``forward`` on one block instance; ``graphs`` are none, one for all calls, or one for each shape."""

    def __init__(self, path: str, module: nn.Module, execution: Execution) -> None:
        self.path, self.module, self.execution = path, module, execution
        self.original: Callable[..., Any] = module.forward
        self.__signature__ = inspect.signature(self.original)
        self.graphs: list[BlockGraph] = []

    def add(self, block: ShardedBlock, forms: FusedForms | None, chained: Sequence[bool]) -> None:
        self.graphs.append(BlockGraph(self.path, self.module, block, forms, self.__signature__, chained))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        execution = self.execution
        graph = self._graph(args, kwargs)
        if execution.sparse is not None and execution.shard is None and graph is not None and graph.sparse is not None:
            inputs = graph.arguments.tensors(args, kwargs)
            values = [execution.sparse.of_block(self.path), *graph.values(inputs)]
            return graph.block.captured.unflatten(self._run(graph, graph.sparse.whole, values, inputs))
        if execution.shard is None and graph is not None and graph.whole is not None:
            inputs = graph.arguments.tensors(args, kwargs)
            return graph.block.captured.unflatten(self._run(graph, graph.whole, graph.values(inputs), inputs))
        if execution.shard is None:
            if execution.recomputes(self.path):
                away = execution.away is not None and graph is not None
                chained = graph.from_blocks(graph.arguments.tensors(args, kwargs)) if away and graph else ()
                return _checkpoint(self.original, execution, args, kwargs, chained)
            return self.original(*args, **kwargs)
        if graph is None:
            raise unequal_call_error(self.path, "a clip of another shape", "those of its graphs")
        return self._sharded(graph, graph.arguments.tensors(args, kwargs))

    def _graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockGraph | None:
        return next((graph for graph in self.graphs if graph.serves(args, kwargs)), None)

    def _sharded(self, graph: BlockGraph, tensors: Sequence[Tensor]) -> Any:
        dims = graph.block.inputs
        lengths = (x.shape[dim] for x, dim in zip(tensors, dims, strict=True) if dim is not None)
        shard = self.execution.shard_of(next(lengths))
        inputs = [_arriving(x, dim, shard) for x, dim in zip(tensors, dims, strict=True)]
        sparse = self.execution.sparse
        if sparse is not None and graph.sparse is not None:
            values = [sparse.of_block(self.path), shard, *graph.values(inputs)]
            results = self._run(graph, graph.sparse.share, values, inputs)
        else:
            results = self._run(graph, graph.share, [shard, *graph.values(inputs)], inputs)
        outputs = [
            result if dim is None else ShardedTokens(result, dim, shard)
            for result, dim in zip(results, graph.block.outputs, strict=True)
        ]
        return graph.block.captured.unflatten(outputs)

    def _run(
        self, graph: BlockGraph, module: nn.Module, values: Sequence[Any], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        if self.execution.recomputes(self.path):
            recomputed: Sequence[Tensor] = _checkpoint(module, self.execution, values, {}, graph.from_blocks(inputs))
            return recomputed
        outputs: Sequence[Tensor] = module(*values)
        return outputs


def _checkpoint(
    function: Callable[..., Any],
    execution: Execution,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chained: Sequence[Tensor],
) -> Any:
    """``chained`` are those of its inputs that may be kept ``away``: what all blocks read stays."""
    again, away = execution.recomputing, execution.away
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))

    def call(*values: Any) -> Any:
        positional, named = pytree.tree_unflatten(values, spec)
        return function(*positional, **named)

    storages = {value.untyped_storage()._cdata for value in chained} if away is not None else set()

    def pack(value: Tensor) -> object:
        leaves_device = away is not None and value.untyped_storage()._cdata in storages
        return away.put(value) if away is not None and leaves_device else value

    def unpack(kept: object) -> Tensor:
        return kept if isinstance(kept, Tensor) or away is None else away.get(kept)  # type: ignore[return-value]

    # the inputs are what the checkpoint itself saves; what the block saves goes by hooks of its own
    with saved_tensors_hooks(pack, unpack) if storages else nullcontext():
        return checkpoint(
            call,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), nullcontext() if again is None else again),
        )


def _arriving(x: Tensor, dim: int | None, shard: SequenceShard) -> Tensor:
    """An input as the block's graph takes it: the rank's own tokens, or all of them."""
    if isinstance(x, ShardedTokens):
        if dim is not None:
            return x.local if dim == x.token_dim and x.shard == shard else x.dealt(dim, shard)
        x = x.gathered()
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
    """Maps the arguments of a call, positional or by keyword, to the tensor inputs of the captured graph."""

    def __init__(self, path: str, signature: inspect.Signature, captured: CapturedBlock) -> None:
        self.path, self.signature, self.captured = path, signature, captured
        self._forms: dict[tuple[int, tuple[str, ...]], list[tuple[str, int | str]] | None] = {}
        self._sizes = [node.meta["val"].shape for node in captured.input_nodes]  # numbers and symbols

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self._bound(args, kwargs))
        captured = self.captured
        if spec != captured.spec:
            raise unequal_call_error(self.path, spec, captured.spec)
        for position, value, fixed in captured.constants:
            if fixed and leaves[position] is not value and leaves[position] != value:
                raise unequal_call_error(self.path, repr(leaves[position]), repr(value))
        return [leaves[position] for position in captured.input_leaves]

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call has the form, the numbers and, but for the clips in it, the sizes of the graph."""
        captured = self.captured
        leaves, spec = pytree.tree_flatten(self._bound(args, kwargs))
        if spec != captured.spec or any(f and leaves[i] != value for i, value, f in captured.constants):
            return False
        return all(
            all(not isinstance(size, int) or size == given for size, given in zip(sizes, leaves[i].shape, strict=True))
            for i, sizes in zip(captured.input_leaves, self._sizes, strict=True)
        )

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


class SequenceModel:
    """A model whose blocks can run on a part of their tokens. Made by ``install``, undone by ``restore``."""

    def __init__(self, model: nn.Module, captured: CapturedModel) -> None:
        self.model, self.captured = model, captured
        self.blocks: tuple[ShardedBlock, ...] = ()
        self._execution = Execution()
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._forwards: dict[str, BlockForward] = {}
        for path in dict.fromkeys(call.path for call in captured.calls):
            module = model.get_submodule(path)
            self._replaced.append((module, module.__dict__.get("forward")))
            self._forwards[path] = BlockForward(path, module, self._execution)
            module.forward = self._forwards[path]

    def add(
        self,
        captured: CapturedModel,
        blocks: Sequence[ShardedBlock],
        fused: Sequence[FusedForms | None] | None = None,
    ) -> None:
        """Give the blocks graphs beside those that they have: of another clip shape."""
        self.blocks = (*self.blocks, *blocks)
        for number, (block, forms) in enumerate(zip(blocks, fused or [None] * len(blocks), strict=True)):
            chained = chained_inputs(captured, number)
            for path in block.captured.instances:
                self._forwards[path].add(block, forms, chained)

    def sparsify(self, rank: int = RANK, seed: int = 0, here: Set[str] | None = None) -> dict[Layer, LayerState]:
        """Gives every block whose attention can be sparse a predictor, as parameters of the block, and graphs in which
        it is; these run where ``use`` is given a ``sparse``. A block that is called twice in a forward stays dense. Of
        blocks whose paths are not ``here`` the projections have no elements.

        Raises ValueError for a rank of 0 or above the head size.
        """
        often = Counter(call.path for call in self.captured.calls)
        rewritten = {block.captured: sparsify_block(block) for block in self.blocks}
        sites = {}
        for path, forward in self._forwards.items():
            of_graphs = [(graph, rewritten[graph.block.captured]) for graph in forward.graphs]
            if often[path] == 1 and any(sparse.sites for _, sparse in of_graphs):
                sites[path] = next(sparse.sites for _, sparse in of_graphs if sparse.sites)
                for graph, sparse in of_graphs:
                    graph.sparse = sparse if sparse.sites == sites[path] else None
        return add_predictors(self.model, sites, rank, seed, here)

    @contextmanager
    def use(
        self,
        shard: SequenceShard | None,
        recompute: bool | Set[str] = False,
        recomputing: AbstractContextManager[object] | None = None,
        away: InputsAway | None = None,
        sparse: SparseCascade | None = None,
    ) -> Iterator[nn.Module]:
        """Inside, the model's forward and backward run on this rank's tokens; unchanged for None and for one rank.

        Blocks that ``recompute``, all or those at some paths, keep only their inputs and run their forward again in the
        backward, inside ``recomputing``: autograd runs it without the modes that were on in the forward. Inputs that
        other blocks made are kept ``away`` until then. ``sparse`` is the cascade's sparse attention.
        """
        execution = self._execution
        before = dict(vars(execution))
        execution.shard = None if shard is None or shard.degree == 1 else shard
        execution.recompute, execution.recomputing, execution._lengths = recompute, recomputing, {}
        execution.away, execution.sparse = away, sparse
        try:
            yield self.model
        finally:
            vars(execution).update(before)

    def token_dims(self, path: str) -> dict[int, int]:
        """Of what a block returns, by leaf, the dimension along which every rank has its own tokens."""
        graphs = self._forwards[path].graphs if path in self._forwards else []
        outputs = zip(graphs[0].block.captured.output_leaves, graphs[0].block.outputs, strict=True) if graphs else ()
        return {leaf: dim for leaf, dim in outputs if dim is not None}

    def of_tokens(self, local: Tensor, dim: int, length: int) -> Tensor:
        """This rank's tokens of a tensor that has so many of them on all ranks, as a block returns them. In ``use``."""
        return ShardedTokens(local, dim, self._execution.shard_of(length))

    def own_tokens(self, value: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor, which a block may have returned. In ``use``."""
        if isinstance(value, ShardedTokens):
            if value.token_dim == dim:
                return value.local
            value = value.gathered()
        return shard_tokens(value, dim, self._execution.shard_of(value.shape[dim]))

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
        """What sequence parallelism gathers, with its cost; one line each."""
        return gather_warnings(self.captured, self.blocks[: len(self.captured.blocks)])


def install(
    model: nn.Module, captured: CapturedModel, fuse: Callable[[ShardedBlock], FusedForms] | None = None
) -> SequenceModel:
    """Replace the forward of every captured block of ``model``; ``fuse`` gives the graphs that they run.

    Without it a block runs its own forward where it has all tokens; one without a graph always does. Raises
    ``UserError`` for a block that cannot run on a part of its tokens.
    """
    blocks = [shard_block(block) for block in captured.blocks]
    sequence = SequenceModel(model, captured)
    sequence.add(captured, blocks, None if fuse is None else [fuse(block) for block in blocks])
    return sequence
