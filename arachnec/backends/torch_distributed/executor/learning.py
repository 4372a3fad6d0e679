"""The instruction ``learn``: what sparse layers measured goes to all ranks, and their predictors are updated.

In: a rank whose update is done. Out: predictors and states of layers that are the same on all ranks, or the word that
the step is to be done again.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from arachnec.backends.torch_distributed.executor.iteration import Share
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.model_state.kept_gradients import drop_gradients


def learn(context: RankContext, step: int, share: Share, norm: Tensor | None) -> bool:
    """Add up what this iteration measured; with the update of a step, learn from what all ranks did. Collective.

    A step whose gradient's ``norm`` is not finite teaches nothing. True where the step is to be done again with all
    keys, as some that were chosen had no room: nothing was updated.
    """
    predictors = context.predictors
    if predictors is None:
        return False
    predictors.collect(step)
    if not share.ends:
        return False
    everyone = context.gradient_groups.get(tuple(range(dist.get_world_size())))
    if predictors.fetches(step) and predictors.lacked_keys(everyone):
        drop_gradients(context.parameters)
        context.optimizer.done -= 1  # rates go by updates
        return True
    predictors.finish(step, everyone, context.gradient_groups.get, norm)
    predictors.all_keys = False
    return False
