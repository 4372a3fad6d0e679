"""Models' predictions on one rank: forwards of requests' branches, together where their arguments allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.models.batch import prediction_of
from arachnec.models.file import own_errors
from arachnec.models.sampler_file import SamplerFile
from arachnec.sampling.loop import Point, Predict, guided


@dataclass(frozen=True)
class BranchPoint:
    """One branch of a step: what is predicted from, and whether it reads the caption or the negative prompt."""

    point: Point
    conditional: bool


Branches = Callable[[str, Sequence[BranchPoint]], list[Tensor]]
"""The predictions of some branches by the model of a name, each ``[1, ...]``."""


def branches_of(sampler: SamplerFile, model: Callable[[str], Callable[..., Any]], most: int | None = None) -> Branches:
    """Forwards on this rank: one, where all arguments can be joined, of at most ``most`` branches; else one each."""

    def forward(name: str, arguments: Mapping[str, Any]) -> Tensor:
        with own_errors(sampler.path, f"the forward of `{name}`", "sampler file"):
            return prediction_of(model(name)(**arguments))

    def predict(name: str, branches: Sequence[BranchPoint]) -> list[Tensor]:
        arguments = [_arguments(sampler, name, branch.point, branch.conditional) for branch in branches]
        together = joined(arguments) if len(branches) > 1 and (most is None or len(branches) <= most) else None
        if together is None:
            return [forward(name, one) for one in arguments]
        return list(forward(name, together).chunk(len(branches)))

    return predict


def all_branches(sampler: SamplerFile, branches: Branches) -> Predict:
    """The guided predictions of requests, from both branches where there are two."""

    def predict(name: str, points: Sequence[Point]) -> list[Tensor]:
        scales = [sampler.scale(name, point.request) for point in points]
        asked = [
            BranchPoint(point, conditional)
            for point, scale in zip(points, scales, strict=True)
            for conditional in ((True, False) if scale > 1 else (True,))
        ]
        predictions = iter(branches(name, asked))
        return [guided(next(predictions), next(predictions) if scale > 1 else None, scale) for scale in scales]

    return predict


def joined(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The arguments of one forward for several: joined along dim 0 where that is 1, passed once where all are equal.

    None where they are neither: captions of other lengths, requests of other sizes.
    """
    if any(call.keys() != calls[0].keys() for call in calls):
        return None
    together: dict[str, Any] = {}
    for name, first in calls[0].items():
        values = [call[name] for call in calls]
        if isinstance(first, Tensor) and first.ndim and first.shape[0] == 1:
            if any(not isinstance(v, Tensor) or v.shape != first.shape or v.dtype != first.dtype for v in values):
                return None
            together[name] = torch.cat(values)
        elif all(_equal(first, value) for value in values[1:]):
            together[name] = first
        else:
            return None
    return together


def _equal(first: Any, second: Any) -> bool:
    (ours, spec), (theirs, other) = pytree.tree_flatten(first), pytree.tree_flatten(second)
    if spec != other:
        return False
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or not torch.equal(a, b):
                return False
        elif a is not b and a != b:
            return False
    return True


def _arguments(sampler: SamplerFile, name: str, point: Point, conditional: bool) -> dict[str, Any]:
    """On the latents' device, tensors in tuples too."""
    arguments = sampler.call(name, point.latents, point.timestep, point.request, conditional)
    moved: dict[str, Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(point.latents.device), arguments)
    return moved
