"""What a torch optimizer keeps for a parameter, found by asking it.

State must be a scalar, or of the parameter's shape: then a part of a parameter has the same part of its state, which is
what sharding and checkpoints stand on (ZeRO, arXiv 1910.02054, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from arachnec.ir.diagnostic import Diagnostic, UserError

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]
SHAPE = (4, 6)
PROVED = 2  # tensors of a parameter's size, as AdamW has


@dataclass(frozen=True)
class NotAnOptimizer(Diagnostic):
    title: ClassVar[str] = "`optimizer` {found}"
    help: ClassVar[str] = (
        "give a function of the parameters: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
    )
    found: str


@dataclass(frozen=True)
class UnexpectedState(Diagnostic):
    title: ClassVar[str] = "the optimizer {name} keeps {found}"
    help: ClassVar[str] = (
        "memory is proved for two tensors of each parameter's size, and state is dealt out over ranks by elements: "
        "take an elementwise optimizer such as AdamW, Adam, SGD or Lion"
    )
    name: str
    found: str


@dataclass(frozen=True)
class Kept:
    """The names of what is kept for a parameter: of its shape, and scalars."""

    like: tuple[str, ...]
    scalars: tuple[str, ...]


ADAMW = Kept(("exp_avg", "exp_avg_sq"), ("step",))


def kept_by(factory: OptimizerFactory) -> Kept:
    """What the factory's optimizer keeps after a step of a small parameter.

    Raises ``UserError`` where it makes no optimizer, or one with state that is neither a scalar nor elementwise.
    """
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    if isinstance(factory, torch.optim.Optimizer) or not callable(factory):
        raise UserError(NotAnOptimizer(None, f"is a {type(factory).__name__}, not a function of the parameters"))
    optimizer = factory([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(NotAnOptimizer(None, f"returned a {type(optimizer).__name__}"))
    parameter.grad = torch.ones(SHAPE)
    with torch.enable_grad():
        optimizer.step()
    state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
    scalars = tuple(key for key, value in state.items() if value.numel() == 1)
    like = tuple(key for key in state if key not in scalars)
    name = type(optimizer).__name__
    for key in like:
        if tuple(state[key].shape) != SHAPE:
            found = f"`{key}` of shape {list(state[key].shape)} for a parameter of {list(SHAPE)}"
            raise UserError(UnexpectedState(None, name, found))
    if len(like) > PROVED:
        raise UserError(UnexpectedState(None, name, f"{len(like)} tensors of a parameter's size"))
    return Kept(like, scalars)
