"""Layers that are whole on a rank where parameters are dealt out over cells: which, and the GiB they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Stage, integer, integers
from arachnec.ir.parameter_cells import GIB, HELD, LayerSize, cell_of, layer_sizes
from arachnec.ir.stage_sizes import element_bytes, gradient_element_bytes

GIVES_SLOTS_BACK = ("encode", "denoise", "decode", "norm", "step")
"""Instructions before which a rank gives back the memory that gathered layers take in turn."""


def layers_listed(instruction: Instruction, name: str) -> tuple[int, ...]:
    """The layers in one of an instruction's lists."""
    return integers(instruction.attrs.get(name, ()))


@dataclass
class Gathers:
    """Follows one rank's program; ``at`` is to be asked for every instruction in order."""

    values: Values
    _whole: dict[str, set[int]] = field(default_factory=dict)  # by stage, what stays from one instruction to the next
    _slots: dict[int, float] = field(default_factory=dict)  # bytes of those that layers have lain in
    _between: float = 0.0  # GiB while no cascade of these stages runs

    @cached_property
    def _stages(self) -> Mapping[str, tuple[Stage, tuple[LayerSize, ...]]]:
        stages = (stage for stage in self.values.module.stages if cell_of(stage))
        return {stage.name: (stage, layer_sizes(stage)) for stage in stages}

    def at(self, instruction: Instruction) -> float:
        """GiB while the instruction runs: what stays whole throughout, and ``held`` of the layers that come and go, or
        the slots that they have lain in.

        What reduce-scatters has the gradients of two such layers besides, one in the making and one on its way.
        """
        if not self._stages:
            return 0.0
        if instruction.op in GIVES_SLOTS_BACK:
            if self._slots:
                self._slots.clear()
                self._between = self._with(0.0, 0.0)
            return self._between
        cascade = self.values.cascades.get(instruction.target)
        if instruction.op not in ("forward", "backward", "weight") or cascade is None:
            return self._between
        if cascade.stage not in self._stages:
            return self._between
        during = self._with(*self._run(instruction, cascade.stage))
        self._between = self._with(0.0, 0.0)
        return during

    def _with(self, coming: float, here: float) -> float:
        """GiB with so many bytes that come and go, of layers in slots and of all else."""
        stays = any(len(self._stages[name][1]) - 1 in layers for name, layers in self._whole.items())
        come = math.fsum(size for slot, size in self._slots.items() if slot != HELD or not stays)
        return (max(coming, come) + here) / GIB + sum(self._stay(name, layers) for name, layers in self._whole.items())

    def _run(self, instruction: Instruction, name: str) -> tuple[float, float]:
        """Bytes that come and go inside the instruction: of layers in slots, and of all else. What it leaves whole is
        added to what stays."""
        stage, sizes = self._stages[name]
        gathered, released = (set(layers_listed(instruction, word)) for word in ("gather", "release"))
        scattered, last = set(layers_listed(instruction, "scatter")), len(sizes) - 1
        whole, element = self._whole.setdefault(name, set()), element_bytes(stage)
        through = [sizes[n] for n in gathered & released if n < last]
        held = integer(instruction.attrs.get("held", HELD))
        elements = min(held, len(through)) * max((size.parameters for size in through), default=0.0)
        outside = sizes[last].parameters if last in (whole | gathered) & released else 0.0
        rest = sum(sizes[n].parameters for n in (whole & released) - gathered if n < last) * element
        blocks = [sizes[n].trained for n in scattered if n < last]
        gradients = min(2, len(blocks)) * max(blocks, default=0.0) + (sizes[last].trained if last in scattered else 0.0)
        whole |= gathered
        for number in whole & released:
            slot = HELD if number == last else number % HELD
            self._slots[slot] = max(self._slots.get(slot, 0.0), sizes[number].parameters * element)
        whole -= released
        return (elements + outside) * element, rest + gradients * gradient_element_bytes(stage)

    def _stay(self, name: str, layers: set[int]) -> float:
        stage, sizes = self._stages[name]
        return sum(sizes[n].parameters for n in layers if n < len(sizes)) * element_bytes(stage) / GIB
