"""One training step of a model on a shard of its tokens, compared on every rank with the step of one process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.sequence_blocks import SequenceModel, install
from arachnec.kernels.process_groups import ProcessGroups, subgroups
from arachnec.passes.trace_blocks import capture_blocks
from tests.models.sequence_models import MODELS, Size


@dataclass(frozen=True)
class Step:
    """``tokens`` per rank, sum the clip's; where empty, at random cuts."""

    ranks: tuple[int, ...]
    ulysses: int
    ring: int
    size: Size
    tokens: tuple[int, ...] = ()
    recompute: bool = False


@dataclass(frozen=True)
class Difference:
    """The loss's relative error, and the worst parameter's: ||g - g0|| / max(||g0||, 1e-3 ||all of g0||)."""

    step: Step
    loss: float
    gradient: float
    parameter: str


_MODELS: dict[str, SequenceModel] = {}
_GROUPS: list[ProcessGroups] = []


def compare(name: str, steps: tuple[Step, ...]) -> list[Difference]:
    """Run by every rank of the world; the steps it takes part in."""
    if not _GROUPS:
        _GROUPS.append(ProcessGroups())
    groups = _GROUPS[0]
    groups.ensure([group for step in steps for group in subgroups(step.ranks, step.ulysses, step.ring)])
    sequence = _model(name)
    return [_compare(name, sequence, groups, step) for step in steps if dist.get_rank() in step.ranks]


def _model(name: str) -> SequenceModel:
    if name not in _MODELS:
        torch.manual_seed(0)
        model = MODELS[name].build()
        for parameter in model.parameters():  # gates that start at zero would hide what is wrong behind them
            nn.init.normal_(parameter, std=0.3)
        _MODELS[name] = install(model, capture_blocks(model, MODELS[name].examples(), verify=False))
    return _MODELS[name]


def _compare(name: str, sequence: SequenceModel, groups: ProcessGroups, step: Step) -> Difference:
    case, degree = MODELS[name], len(step.ranks)
    tokens = step.tokens or uneven(case.tokens(step.size), degree)
    arguments = case.arguments(step.size)
    shard = groups.shard(step.ranks, tokens, step.ulysses, step.ring)
    with sequence.use(None):
        true_loss, truth = _step(sequence.model, arguments, 1.0)
    with sequence.use(shard, recompute=step.recompute):
        loss, partial = _step(sequence.model, arguments, 1 / degree)
    assert partial.keys() == truth.keys()
    for gradient in partial.values():
        dist.all_reduce(gradient, group=groups.get(step.ranks))
    whole = torch.stack([g.norm() for g in truth.values()]).norm()
    worst = max((((partial[n] - g).norm() / torch.maximum(g.norm(), 1e-3 * whole)).item(), n) for n, g in truth.items())
    return Difference(step, abs(loss * degree - true_loss) / abs(true_loss), *worst)


def _step(model: nn.Module, arguments: dict[str, Any], weight: float) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    prediction = model(**arguments)
    prediction = prediction[0] if isinstance(prediction, tuple) else prediction
    target = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(1))
    loss = weight * ((prediction - target) ** 2).mean()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def uneven(total: int, degree: int) -> tuple[int, ...]:
    """Shares that are not equal, the same on every rank."""
    cuts = sorted(random.Random(total * degree).sample(range(1, total), degree - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
