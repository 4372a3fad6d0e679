"""What a rank of a pipeline does, in the short words of ``torch.distributed.pipelining``: ``2F0``, ``1B3``.

An action is one kind of work of one stage for one micro-batch. A schedule is one sequence of actions per rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORWARD: Kind = "F"
BACKWARD: Kind = "B"  # activation and weight gradients together
ACTIVATION_GRADIENT: Kind = "I"
WEIGHT_GRADIENT: Kind = "W"
PHASES: dict[Kind, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    ACTIVATION_GRADIENT: "activation gradient",
    WEIGHT_GRADIENT: "weight gradient",
}

_WORD = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """``stage`` and ``micro_batch`` count from 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Action, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """What every rank does, in this order.

    ``overlapped`` are forwards whose next action, a backward, may run beside them (DualPipe); whoever cannot do that
    runs the two in turn.
    """

    orders: tuple[Order, ...]
    overlapped: frozenset[Action] = frozenset()

    def __str__(self) -> str:
        """One line a rank."""
        return "\n".join(" ".join(map(str, order)) for order in self.orders)

    @property
    def stages(self) -> int:
        """One more than the highest stage."""
        return 1 + max((action.stage for order in self.orders for action in order), default=-1)

    @property
    def micro_batches(self) -> int:
        """One more than the highest micro-batch."""
        return 1 + max((action.micro_batch for order in self.orders for action in order), default=-1)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage. KeyError if a stage has no action."""
        rank_of = {action.stage: rank for rank, order in enumerate(self.orders) for action in order}
        return tuple(rank_of[stage] for stage in range(self.stages))

    @property
    def splits_backward(self) -> bool:
        return any(action.kind == WEIGHT_GRADIENT for order in self.orders for action in order)


def parse_action(word: str) -> Action | None:
    """``2F0`` as an action; None if the word is none."""
    match = _WORD.fullmatch(word)
    if match is None:
        return None
    kind: Kind = next(kind for kind in KINDS if kind == match[2])
    return Action(int(match[1]), kind, int(match[3]))
