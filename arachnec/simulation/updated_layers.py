"""Which layers' updated parameters are on their way while a program runs, and how far a forward can go without them.

A forward reads what lies in no layer first, then layer after layer. Layers count as equally long.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, integer, quantity
from arachnec.ir.parameter_cells import last_layer, layer_sizes
from arachnec.ir.values import Attributes, Quantity


@dataclass
class UpdatedLayers:
    """Of one simulated iteration."""

    values: Values
    _coming: dict[str, set[int]] = field(init=False)  # by stage

    def __post_init__(self) -> None:
        steps = (step for program in self.values.module.programs for step in program.instructions)
        self._coming = defaultdict(set)
        for gather in dict.fromkeys(step for step in steps if step.op == "gather"):
            self._coming[gather.target].update(layers_listed(gather, "layers"))

    def parts(self, gather: Instruction) -> tuple[Instruction, ...]:
        """The gather of each layer, with its share of time and bytes."""
        layers = layers_listed(gather, "layers")
        sizes = layer_sizes(self.values.module.stage(gather.target))
        whole = sum(sizes[layer].trained for layer in layers) or 1.0
        time, size = quantity(gather.attrs["time"]), integer(gather.attrs["bytes"])
        shares = ((layer, sizes[layer].trained / whole) for layer in layers)
        return tuple(
            replace(
                gather,
                attrs=Attributes.of(layers=(layer,), bytes=round(size * share), time=Quantity(time * share, "ms")),
            )
            for layer, share in shares
        )

    def arrived(self, gather: Instruction) -> tuple[str, int]:
        """One of ``parts`` is through: the stage and the layer that are whole now."""
        (layer,) = layers_listed(gather, "layers")
        self._coming[gather.target].discard(layer)
        return gather.target, layer

    def missing(self, forward: Instruction, done: int) -> tuple[str, int] | None:
        """The stage and the layer that a forward must wait for after so many of its layers; None where it may go on."""
        stage, order = self._order(forward)
        layer = order[min(done, len(order) - 1)]
        return (stage, layer) if layer in self._coming[stage] else None

    def reaches(self, forward: Instruction, done: int) -> int:
        """How many of its layers a forward has run when it must wait again; all of them where none is missing."""
        stage, order = self._order(forward)
        coming = self._coming[stage]
        return next((place for place in range(done, len(order)) if order[place] in coming), len(order))

    def part(self, forward: Instruction, done: int, until: int) -> Instruction:
        """The part of a forward between two of its layers."""
        layers = len(self._order(forward)[1]) - 1
        share = (until - max(done, 1)) / layers if layers else 1.0  # what lies in no layer takes no time of its own
        time = Quantity(quantity(forward.attrs["time"]) * share, "ms")
        return replace(forward, attrs=forward.attrs.updated(time=time))

    def is_over(self, forward: Instruction, done: int) -> bool:
        return done >= len(self._order(forward)[1])

    def _order(self, forward: Instruction) -> tuple[str, tuple[int, ...]]:
        stage = self.values.module.stage(self.values.cascades[forward.target].stage)
        last = last_layer(stage)
        return stage.name, (last, *range(last))
