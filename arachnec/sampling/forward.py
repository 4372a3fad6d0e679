"""A model's prediction for a request on one rank: one forward, or with guidance two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.data.requests import Request
from arachnec.models.batch import prediction_of
from arachnec.models.file import own_errors
from arachnec.models.sampler_file import SamplerFile
from arachnec.sampling.loop import Predict, guided

Branch = Callable[[str, Tensor, Tensor, Request, bool], Tensor]
"""The prediction of one branch: of (name, latents, timestep, request, conditional)."""


def branch_of(sampler: SamplerFile, model: Callable[[str], nn.Module]) -> Branch:
    """One forward on this rank; ``model`` gives the module by its name."""

    def predict(name: str, latents: Tensor, timestep: Tensor, request: Request, conditional: bool) -> Tensor:
        arguments = sampler.call(name, latents, timestep, request, conditional)
        with own_errors(sampler.path, f"the forward of `{name}`", "sampler file"):
            return prediction_of(model(name)(**on_device(arguments, latents.device)))

    return predict


def both_branches(sampler: SamplerFile, branch: Branch) -> Predict:
    """The guided prediction, one branch after the other."""

    def predict(name: str, latents: Tensor, timestep: Tensor, request: Request) -> Tensor:
        conditional = branch(name, latents, timestep, request, True)
        scale = sampler.scale(name, request)
        return guided(conditional, branch(name, latents, timestep, request, False) if scale > 1 else None, scale)

    return predict


def on_device(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors, also those in tuples, on the device."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(moved, value))
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}
