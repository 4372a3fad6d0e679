"""Layers that attend to chosen keys, step by step of a run: their predictors, and plans that follow what they learn.

In: the first plan, and each step's. Out: a rank context with predictors, where a stage has densities; plans that are
asked for anew. All ranks call these together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans.kept_plan import have_moved
from arachnec.backends.torch_distributed.plans.step_plans import Plans
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.rank.sharded_blocks import Sequences
from arachnec.checkpoint.trained_predictors import LAYER
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import counted
from arachnec.ir.head_density import ByLength, sparse_stages
from arachnec.ir.nodes import Module
from arachnec.model_state.key_list_files import ListFiles
from arachnec.model_state.sparse_predictors import SparsePredictors


def with_predictors(
    context: RankContext, first: Module, sequences: Sequences, training: Training, options: RunOptions
) -> RankContext:
    """The context with predictors of the layers that the ``first`` plan may make sparse, if there are some."""
    if not sparse_stages(first):
        return context
    sequence = sequences.for_program(first)
    assert sequence is not None, "a sparse stage needs its blocks traced"
    predictors = SparsePredictors.of(first, sequence, training.seed, context.rank)
    predictors.files = ListFiles(options.save_lists, options.replay_lists)
    cluster = first.cluster
    apart = cluster is not None and cluster.nodes > 1 and context.pipeline is None
    if cluster is not None and apart and training.accumulate == 1:  # a batch alone cannot be done again
        predictors.node = cluster.gpus
    return replace(context, predictors=predictors)


def note_of_left(stored: Iterable[str], kept: Iterable[str]) -> str | None:
    """What a checkpoint has learned of layers that a run knows nothing of, by the names of their tensors."""
    left = {name for name in stored if name.startswith(LAYER)} - set(kept)
    if not left:
        return None
    layers = counted(len(left), "layer")
    return f"the checkpoint has predictors of {layers} that this program keeps dense: the next ones are without them"


@dataclass
class FollowedDensities:
    """What plans were last made for, and asking for others. The step after the next one follows what a step measured:
    all ranks know it then."""

    plans: Plans
    batches: int  # of an optimizer step
    _last: Mapping[int, ByLength] | None = None

    def follow(self, context: RankContext, number: int) -> None:
        """Behind optimizer step ``number``, which is not the last."""
        predictors = context.predictors
        if predictors is None or not self.plans.follows_densities:
            return
        step, now = (number + 1) * self.batches + 1, predictors.running
        if have_moved(self._last, now):
            self._last = now
            self.plans.follow(step, densities=now)
        self.plans.prepare(step)
