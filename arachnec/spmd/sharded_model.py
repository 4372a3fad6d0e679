"""A model whose blocks run on one rank's tokens, while everything around them runs as it was written.

Each block's ``forward`` is replaced on the instance; parameters, names, ``state_dict`` and storages stay. A block
returns its own tokens as ``ShardedTokens``. The next block takes them as they are. Anything else that reads them (a
skip connection, a head, a print) gets the complete tensor, gathered. So the first block of a chain slices its inputs,
the outputs of the last are gathered, and what lies between needs no knowledge of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from arachnec.kernels.attention.exchange import shard_tokens
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.kernels.sparse.predictor import RANK
from arachnec.spmd.block_forward import BlockForward, Execution, FusedForms, InputsAway
from arachnec.spmd.rewrite import ShardedBlock, gather_warnings, shard_block
from arachnec.spmd.sharded_tokens import ShardedTokens
from arachnec.spmd.sparse_block import sparsify_block
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade, add_predictors
from arachnec.tracing.blocks import CapturedModel
from arachnec.tracing.captured import chained_inputs


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
        before = execution.shard, execution.recompute, execution.recomputing, execution._lengths, execution.away
        dense = execution.sparse
        execution.shard = None if shard is None or shard.degree == 1 else shard
        execution.recompute, execution.recomputing, execution._lengths = recompute, recomputing, {}
        execution.away, execution.sparse = away, sparse
        try:
            yield self.model
        finally:
            execution.shard, execution.recompute, execution.recomputing, execution._lengths, execution.away = before
            execution.sparse = dense

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
