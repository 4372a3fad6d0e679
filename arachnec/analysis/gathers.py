"""Layers that are whole on a rank where parameters are dealt out over cells: which, and the GiB they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Stage, integer, integers
from arachnec.ir.parameter_cells import GIB, HELD, LayerSize, cell_of, layer_sizes
from arachnec.ir.stage_sizes import element_bytes, gradient_element_bytes


def layers_listed(instruction: Instruction, name: str) -> tuple[int, ...]:
    """The layers in one of an instruction's lists."""
    return integers(instruction.attrs.get(name, ()))


@dataclass
class Gathers:
    """Follows one rank's program; ``at`` is to be asked for every instruction in order."""

    values: Values
    _whole: dict[str, set[int]] = field(default_factory=dict)  # by stage, what stays from one instruction to the next

    @cached_property
    def _stages(self) -> Mapping[str, tuple[Stage, tuple[LayerSize, ...]]]:
        stages = (stage for stage in self.values.module.stages if cell_of(stage))
        return {stage.name: (stage, layer_sizes(stage)) for stage in stages}

    def at(self, instruction: Instruction) -> float:
        """GiB while the instruction runs: what stays whole throughout, and ``held`` of the layers that come and go.

        What reduce-scatters has the gradients of two such layers besides, one in the making and one on its way.
        """
        if not self._stages:
            return 0.0
        here = 0.0
        cascade = self.values.cascades.get(instruction.target)
        runs = instruction.op in ("forward", "backward", "weight")
        if runs and cascade is not None and cascade.stage in self._stages:
            here = self._run(instruction, cascade.stage)
        return here + sum(self._stay(name, layers) for name, layers in self._whole.items())

    def _run(self, instruction: Instruction, name: str) -> float:
        """GiB that come and go inside the instruction; what it leaves whole is added to what stays."""
        stage, sizes = self._stages[name]
        gathered, released = (set(layers_listed(instruction, word)) for word in ("gather", "release"))
        scattered, last = set(layers_listed(instruction, "scatter")), len(sizes) - 1
        whole = self._whole.setdefault(name, set())
        through = [sizes[n] for n in gathered & released if n < last]
        released_sizes = [sizes[n] for n in (whole | gathered) & released if n == last or (n < last and n in whole)]
        held = integer(instruction.attrs.get("held", HELD))
        elements = min(held, len(through)) * max((size.parameters for size in through), default=0.0)
        bytes_held = (elements + sum(size.parameters for size in released_sizes)) * element_bytes(stage)
        blocks = [sizes[n].trained for n in scattered if n < last]
        gradients = min(2, len(blocks)) * max(blocks, default=0.0) + (sizes[last].trained if last in scattered else 0.0)
        bytes_held += gradients * gradient_element_bytes(stage)
        whole |= gathered
        whole -= released
        return bytes_held / GIB

    def _stay(self, name: str, layers: set[int]) -> float:
        stage, sizes = self._stages[name]
        return sum(sizes[n].parameters for n in layers if n < len(sizes)) * element_bytes(stage) / GIB
