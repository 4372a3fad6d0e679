"""Training options, stored in ``executable.json``: learning rate, clipping, precision, EMA, seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from arachnec.ir.diagnostic import Diagnostic, UserError


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the optimizer and of the random generators.

    ``dtype`` is the precision of parameters, activations and gradients; with ``bf16`` the optimizer keeps fp32 master
    copies. ``clip_norm`` 0 switches clipping off, ``ema`` 0 the moving average.
    """

    lr: float = 1e-4
    clip_norm: float = 1.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    ema: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class BadTraining(Diagnostic):
    title: ClassVar[str] = "{option} = {value} cannot be trained with"
    help: ClassVar[str] = "{remedy}"
    option: str
    value: float
    remedy: str


def verified(training: Training) -> Training:
    """The options themselves, or a ``UserError`` that names the one out of range."""
    rules = (
        ("lr", training.lr, 0 <= training.lr < math.inf, "a learning rate is zero or more"),
        ("clip-norm", training.clip_norm, training.clip_norm >= 0, "give a norm, or 0 for no clipping"),
        ("ema", training.ema, 0 <= training.ema < 1, "a decay lies below 1, such as 0.999; 0 keeps no average"),
        ("seed", training.seed, 0 <= training.seed < 2**63, "a seed is zero or more, and below 2**63"),
    )
    bad = tuple(BadTraining(None, option, value, remedy) for option, value, holds, remedy in rules if not holds)
    if bad:
        raise UserError(*bad)
    return training
