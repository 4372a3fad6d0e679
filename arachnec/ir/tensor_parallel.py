"""An encoder whose weights lie on several ranks, each with a part of the width of its blocks.

In: a stage with `tensor_split`, the GiB that ranks can divide, and `tensor_units`, the most ranks that can. Out: the
same stage with `tensor_parallel`, the ranks of a cell that divide them, and the `state` of the rank that has most.
"""

from __future__ import annotations

from dataclasses import replace

from arachnec.ir.nodes import Module, Stage
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import count_in, gib, uneven
from arachnec.ir.values import Quantity


def tensor_parallel(stage: Stage) -> int:
    """How many ranks divide the weights of an encoder; 1 where it is whole on every rank."""
    return count_in(stage, "tensor_parallel") or 1


def ranks_together(stage: Stage) -> int:
    """The cascades of a stage take so many ranks, or several times as many: whole cells."""
    return max(cell_of(stage) or 1, tensor_parallel(stage))


def can_divide(stage: Stage, ranks: int) -> bool:
    """Whether so many ranks can divide an encoder's weights, of which nobody has said anything yet."""
    return "tensor_parallel" not in stage.attrs and 1 < ranks <= count_in(stage, "tensor_units")


def divided_by_width(stage: Stage, ranks: int) -> Stage:
    """The encoder with its weights divided over cells of so many ranks, which can."""
    state, split = gib(stage.attrs.get("state")), gib(stage.attrs.get("tensor_split"))
    share = uneven(count_in(stage, "tensor_units"), ranks)
    attrs = stage.attrs.updated(tensor_parallel=ranks, state=Quantity(state - split * (1 - share), "GiB"))
    return replace(stage, attrs=attrs)


def divided_encoders(module: Module) -> dict[str, int]:
    """The ranks that divide each encoder's weights, of those that are not whole on every rank."""
    return {stage.name: ranks for stage in module.stages if (ranks := tensor_parallel(stage)) > 1}
