"""What every layer of a model costs, for the planners of stages. In: a traced stage. Out: times and memory by layer.

Each layer is made a stage of its own and costed as any other, embedding with the first and head with the last. The
costs are the mean over the micro-batches of the first iterations of the manifest (``SAMPLE``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum

from arachnec.cluster.topology import handoff_time
from arachnec.cost.memory import GIB, saved_for_backward
from arachnec.cost.model import CostModel
from arachnec.executable.folder import batch_sizes, iteration_of
from arachnec.ir.nodes import Cascade, Module, Phase, Stage
from arachnec.ir.stage_sizes import gib, layers_of, uneven
from arachnec.pipelining.pipeline_model import LayerCosts
from arachnec.planning.pipeline_places import MicroBatch, micro_batches
from arachnec.planning.stage_cuts import parts_of

SAMPLE = 4  # iterations of the manifest that plans of stages are made for

Shape = tuple[int, int, int]  # clips, tokens, text


@dataclass(frozen=True)
class CostedLayers:
    """``module`` is costed, its trained stage cut into single layers; ``shapes`` are its micro-batches, each of them
    once with how many there are, in all ``iterations`` of the sample."""

    cost: CostModel
    parts: tuple[Stage, ...]
    shapes: tuple[tuple[MicroBatch, int], ...]
    iterations: int

    @property
    def micro_batches(self) -> int:
        """Of one iteration, on average."""
        return max(1, round(sum(count for _, count in self.shapes) / self.iterations))

    def costs(self, degree: int, recompute: bool, stages: int) -> tuple[LayerCosts, ...]:
        """Of one micro-batch on ``degree`` ranks: ms, and GiB on each of them.

        What a stage receives and hands on is spread over the layers that it has, with so many ``stages``.
        """
        phases = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT

        def time(cascade: Cascade) -> float:
            return self.cost.time(cascade, degree, recompute=int(recompute))

        def of(layer: int, part: Stage) -> LayerCosts:
            forward, activation, weight = (self._mean(layer, phase, time) for phase in phases)
            saved = self._mean(layer, Phase.FORWARD, lambda c: self._saved(c, degree, recompute, stages))
            output = self._mean(layer, Phase.FORWARD, self.cost.output)
            return LayerCosts(forward, activation, weight, saved, gib(part.attrs.get("state")), output)

        return tuple(of(layer, part) for layer, part in enumerate(self.parts))

    def running(self, degree: int, recompute: bool) -> float:
        """GiB that the largest cascade needs while it runs, beyond what is kept."""
        forwards = [b.cascades[layer, Phase.FORWARD] for b, _ in self.shapes for layer in range(len(self.parts))]
        blocks = int(recompute)
        return max(self.cost.memory(c, degree, blocks) - self.cost.kept(c, degree, blocks) for c in forwards)

    def limit(self, ranks: Sequence[int]) -> float:
        """GiB for layers and micro-batches on each of these ranks: encoders lie on all of them."""
        name = self.parts[0].name
        own = gib(self.parts[0].attrs.get("state"))
        return self.cost.room_on(ranks, len(ranks), name) + own

    def handoff(self, source: int, target: int, size: float) -> float:
        """ms of so many GiB."""
        return handoff_time(self.cost.cluster, source, target, size * GIB)

    def all_reduce(self, first: int, last: int, ranks: tuple[int, ...]) -> float:
        """ms to all-reduce the gradients of these layers over these ranks."""
        return fsum(self.cost.reduce_time(part, ranks) for part in self.parts[first:last] if part.trained)

    @cached_property
    def _total(self) -> int:
        return sum(count for _, count in self.shapes)

    def _mean(self, layer: int, phase: Phase, value: Callable[[Cascade], float]) -> float:
        of = ((batch.cascades.get((layer, phase)), count) for batch, count in self.shapes)
        return fsum(value(cascade) * count for cascade, count in of if cascade is not None) / self._total

    def _saved(self, forward: Cascade, degree: int, recompute: bool, stages: int) -> float:
        stage = self.cost.stages[forward.stage]
        own = saved_for_backward(stage, forward, uneven(forward.tokens, degree), int(recompute))
        ends = self.cost.received(forward) + self.cost.output(forward)
        return own + ends * stages / len(self.parts)


def costed_layers(module: Module, stage: Stage, costed: Callable[[Module], Module]) -> CostedLayers:
    """``costed`` makes micro-batches of an iteration's clips and costs them: the passes before the scheduler."""
    parts = parts_of(stage, range(1, len(layers_of(stage))))
    stages = tuple(part for other in module.stages for part in (parts if other.name == stage.name else (other,)))
    count = min(SAMPLE, max(1, len(batch_sizes(module))))
    shapes: Counter[Shape] = Counter()
    of: dict[Shape, tuple[Module, MicroBatch]] = {}
    for number in range(count):
        iteration = costed(iteration_of(replace(module, stages=stages), number))
        own = [node for node in iteration.stages if node.attrs.get("part_of") == stage.name]
        for batch in micro_batches(iteration, own):
            first = batch.cascades[0, Phase.FORWARD]
            shape = (first.batch, first.tokens, first.text)
            shapes[shape] += 1
            of.setdefault(shape, (iteration, batch))
    return _joined(of, shapes, stage.name, count)


def _joined(
    of: Mapping[Shape, tuple[Module, MicroBatch]], shapes: Mapping[Shape, int], name: str, iterations: int
) -> CostedLayers:
    """One module with a micro-batch of every shape, under names of their own."""
    first = next(iter(of.values()))[0]
    renamed: list[Cascade] = []
    for number, (iteration, batch) in enumerate(of.values()):
        wanted = {c.name for c in (*batch.encoders, *batch.cascades.values())}
        for cascade in iteration.cascades:
            if cascade.name in wanted:
                inputs = tuple(f"{number}_{source}" for source in cascade.inputs)
                # clips of other iterations may have the same numbers: a shape's number stands for its clips
                renamed.append(replace(cascade, name=f"{number}_{cascade.name}", inputs=inputs, clips=(number,)))
    module = replace(first, cascades=tuple(renamed))
    parts = tuple(node for node in module.stages if node.attrs.get("part_of") == name)
    batches = micro_batches(module, parts)
    return CostedLayers(CostModel(module), parts, tuple(zip(batches, shapes.values(), strict=True)), iterations)
