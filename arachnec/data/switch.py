"""Switch rules: at which step a request goes from its first model to its second. On plain numbers, no torch.

``adaptive`` looks at how far the guided prediction moves from step to step: the relative L1 distance, smoothed over
three steps. It is ours; SRDiffusion (arXiv 2505.19151) describes its own in other words. In small models this curve
can rise towards the end, so the rule has a least and a most step.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.ir.diagnostic import UserError, user_error

KINDS = ("fixed", "boundary", "adaptive")
WINDOW = 3  # steps that the adaptive curve is smoothed over
EXAMPLES = "fixed=10, boundary=0.875, or adaptive=0.1 with least=4 and most=20 behind commas"


@dataclass(frozen=True)
class Switch:
    """A rule. K is how many of a request's steps the first model takes; the second takes the others.

    ``fixed``: ``value`` is K, cut off at the request's steps. ``boundary``: the first model takes the timesteps from
    ``value`` of the training range on, as Wan2.2 does. ``adaptive``: K is the first step at which the smoothed curve
    is under ``value``, within ``least`` and ``most``.
    """

    kind: str
    value: float
    least: int = 1
    most: int | None = None

    def __str__(self) -> str:
        limits = f",least={self.least}" + ("" if self.most is None else f",most={self.most}")
        return f"{self.kind}={self.value:.12g}" + (limits if self.kind == "adaptive" else "")

    @property
    def adaptive(self) -> bool:
        return self.kind == "adaptive"

    def bounds(self, timesteps: Sequence[float], training_steps: float = 1000) -> tuple[int, int]:
        """The least and the most K that a request with these timesteps can have; equal unless adaptive."""
        steps = len(timesteps)
        if self.kind == "fixed":
            return min(int(self.value), steps), min(int(self.value), steps)
        if self.kind == "boundary":
            first = sum(timestep >= self.value * training_steps for timestep in timesteps)
            return first, first
        least = min(self.least, steps)
        return least, max(least, min(steps if self.most is None else self.most, steps))

    def switches(self, distances: Sequence[float | None], step: int, steps: int) -> bool:
        """Whether an adaptive request goes to its second model after ``step`` of its ``steps`` steps.

        ``distances`` are those of its predictions so far, as ``recorded`` has them.
        """
        least, most = self.bounds([0.0] * steps)
        return step >= most or (step >= least and smoothed(distances[:step]) < self.value)


ONE_MODEL = Switch("fixed", 2**20)


def switched_at(switch: Switch, distances: Sequence[float | None], steps: int) -> int:
    """K of an adaptive request, from the distances that were recorded for it: one for each step of the first model."""
    return next((step for step in range(steps) if switch.switches(distances, step, steps)), steps)


def smoothed(distances: Sequence[float | None]) -> float:
    """The mean of the last three distances; infinite while there is none. A step without a predecessor has none: NaN,
    or None as a saved trace says it."""
    known = [distance for distance in distances[-WINDOW:] if distance is not None and not math.isnan(distance)]
    return sum(known) / len(known) if known else math.inf


def parse_switch(text: str) -> Switch:
    """``fixed=K``, ``boundary=r`` or ``adaptive=x[,least=n][,most=n]``. Raises ``UserError`` for anything else."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    kind, equals, _ = parts[0]
    if kind not in KINDS or not equals:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        raise _refused(text, "it names no kind", f"did you mean `{near[0]}=...`?" if near else f"write {EXAMPLES}")
    known = {kind, "least", "most"} if kind == "adaptive" else {kind}
    numbers: dict[str, float] = {}
    for name, _, number in parts:
        if name not in known or name in numbers:
            raise _refused(text, f"`{name}` has no place in it", f"write {EXAMPLES}")
        whole = name != kind or kind == "fixed"
        if not re.fullmatch(r"\d{1,7}" if whole else r"(\d+\.?\d*|\.\d+)(e-?\d{1,2})?", number):
            expected = "a whole number" if whole else "a number of at least 0"
            raise _refused(text, f"`{name}` is {number!r}", f"give {expected}: {EXAMPLES}")
        numbers[name] = float(number)
    value = numbers.pop(kind)
    if kind == "boundary" and value > 1:
        raise _refused(text, "a boundary lies in [0, 1]", "give the share of the noise levels below the switch")
    least, most = (int(numbers[name]) if name in numbers else None for name in ("least", "most"))
    switch = Switch(kind, value, 1 if least is None else least, most)
    if most is not None and most < switch.least:
        raise _refused(text, f"`most` is under `least`, {switch.least}", "let the switch have a step to take place at")
    return switch


def _refused(text: str, reason: str, remedy: str) -> UserError:
    return user_error(f"`{text}` is no switch rule: {reason}", help=remedy)
