"""Encoders that do not fit whole: over how many ranks their weights are divided by width (``ir.tensor_parallel``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from arachnec.ir.nodes import Module, Stage
from arachnec.ir.stage_sizes import gib
from arachnec.ir.tensor_parallel import can_divide, divided_by_width
from arachnec.planning.layouts import cell_sizes


def narrower(module: Module) -> Iterator[Module]:
    """A traced module with encoders divided: over the fewest ranks first, and of these the largest encoders first."""
    for ranks in () if module.cluster is None else cell_sizes(module.cluster):
        able = sorted(dividable(module, ranks), key=lambda stage: -gib(stage.attrs.get("tensor_split")))
        for count in range(1, len(able) + 1):
            yield divided(module, able[:count], ranks)


def narrowest(module: Module) -> Module:
    """The module of which least lies on a rank, however encoders are divided."""
    return min(
        (module, *narrower(module)), key=lambda laid: sum(gib(stage.attrs.get("state")) for stage in laid.stages)
    )


def dividable(module: Module, ranks: int) -> list[Stage]:
    """The encoders whose weights so many ranks can divide."""
    return [stage for stage in module.stages if can_divide(stage, ranks)]


def divided(module: Module, encoders: Collection[Stage], ranks: int) -> Module:
    """The module with these encoders' weights divided over cells of so many ranks."""
    names = {stage.name for stage in encoders}
    stages = (divided_by_width(stage, ranks) if stage.name in names else stage for stage in module.stages)
    return replace(module, stages=tuple(stages))


def reasons_whole(module: Module) -> list[str]:
    """Why encoders are whole on every rank, of those of which something is known."""
    return [
        f"encoder @{stage.name} is whole on every rank: {stage.attrs['tensor_whole']}"
        for stage in module.stages
        if "tensor_whole" in stage.attrs
    ]
