"""A model whose blocks run on one rank's tokens, while everything around them runs as it was written.

Each block's ``forward`` is replaced on the instance; parameters, names, ``state_dict`` and storages stay. A block
returns its own tokens as ``ShardedTokens``. The next block takes them as they are. Anything else that reads them (a
skip connection, a head, a print) gets the complete tensor, gathered. So the first block of a chain slices its inputs,
the outputs of the last are gathered, and what lies between needs no knowledge of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.spmd.block_forward import BlockForward, Execution, FusedForms, InputsAway
from arachnec.spmd.rewrite import ShardedBlock, gather_warnings, shard_block
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

    @contextmanager
    def use(
        self,
        shard: SequenceShard | None,
        recompute: bool | Set[str] = False,
        recomputing: AbstractContextManager[object] | None = None,
        away: InputsAway | None = None,
    ) -> Iterator[nn.Module]:
        """Inside, the model's forward and backward run on this rank's tokens; unchanged for None and for one rank.

        Blocks that ``recompute``, all or those at some paths, keep only their inputs and run their forward again in the
        backward, inside ``recomputing``: autograd runs it without the modes that were on in the forward. Inputs that
        other blocks made are kept ``away`` until then.
        """
        execution = self._execution
        before = execution.shard, execution.recompute, execution.recomputing, execution._lengths, execution.away
        execution.shard = None if shard is None or shard.degree == 1 else shard
        execution.recompute, execution.recomputing, execution._lengths = recompute, recomputing, {}
        execution.away = away
        try:
            yield self.model
        finally:
            execution.shard, execution.recompute, execution.recomputing, execution._lengths, execution.away = before

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
