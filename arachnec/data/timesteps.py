"""How the noise level of a training point is drawn: options that a clip carries to ``sample``."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class Timesteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """t on (0, 1), 1 all noise: ``uniform``, or ``logit-normal``, the sigmoid of a normal one with ``mean``, ``std``.

    t is then shifted to s t / (1 + (s - 1) t). s is ``shift``, times sqrt(tokens / ``base_tokens``) where that is
    given, so that larger clips see more noise. Only those from ``min`` to ``max`` are drawn, each as often beside the
    others as without; where both are None the model's own bounds hold. Esser et al.,
    arXiv 2403.03206, section 3.1 and equation 23.
    """

    sampling: Literal["uniform", "logit-normal"] = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    base_tokens: int | None = None
    min: float | None = None
    max: float | None = None

    @property
    def levels(self) -> tuple[float, float] | None:
        """From which noise level to which, where that is said."""
        if self.min is None and self.max is None:
            return None
        return self.min or 0.0, 1.0 if self.max is None else self.max

    def factor(self, tokens: int) -> float:
        """s, of a clip of so many tokens."""
        return self.shift * (math.sqrt(tokens / self.base_tokens) if self.base_tokens else 1.0)


UNIFORM = Timesteps()
