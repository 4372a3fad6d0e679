"""Parameters of which every rank has updated a part, gathered layer by layer while the next step begins.

The gathers are started in the order of the program's ``gather``, once for every update: what samples, a validation or
somebody's own loop has brought is not brought again. A layer is waited for when it is about to run, by a
hook of its module as in a cell (``cells.gathering``); here it is never released. In a cell a layer's shard is waited
for before the cell gathers the layer. What arrives lies beside the
parameters until then. It has the room of the gradients, which a plan counts always and which come into being later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from arachnec.ir.nodes import Module
from arachnec.ir.stage_sizes import layers_of
from arachnec.model_state.cells.gathering import Gathering
from arachnec.model_state.gradients import layers_in
from arachnec.model_state.optimizer import Optimizer
from arachnec.model_state.parameter_parts import GatheredParts


@dataclass
class UpdatedParameters:
    """Of one stage. ``names`` are the parameters of every layer by number, ``modules`` the layers that are modules."""

    optimizer: Optimizer
    names: Mapping[int, Sequence[str]]
    modules: Mapping[int, nn.Module]
    cell: Gathering | None = None  # which gathers the layers from their shards
    _coming: dict[int, list[GatheredParts]] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.cell is not None:
            self.cell.updated = self._wait
            return
        for number, module in self.modules.items():
            module.register_forward_pre_hook(lambda _, __, number=number: self._wait(number))

    def start(self, layers: Iterable[int], group: dist.ProcessGroup | None) -> None:
        """Start to gather these layers, one after another, those that were not since the update. Collective over the
        group."""
        for number in layers:
            if number in self._started:
                continue
            self._started.add(number)
            self._coming[number] = self.optimizer.gathered(self.names.get(number, ()), group)

    def wait_outside(self) -> None:
        """Wait for what lies in no module that says when it runs; in a cell it is gathered first."""
        for number in [number for number in self._coming if number not in self.modules]:
            self._wait(number)

    def wait(self) -> None:
        """Wait for all layers, before they are updated again."""
        self.finish()
        assert self._started >= set(self.names), "a program gathers every layer that has parameters here"

    def finish(self) -> None:
        """Wait for the layers that are on their way."""
        for number in list(self._coming):
            self._wait(number)

    def outdate(self) -> None:
        """The ranks have updated their parts: all layers are to be gathered again."""
        self._started.clear()

    def _wait(self, number: int) -> None:
        for coming in self._coming.pop(number, ()):
            coming.wait()


def updated_parameters(
    stages: Mapping[str, Mapping[str, int | None]],
    module: Module,
    model: nn.Module,
    optimizer: Optimizer,
    cells: Mapping[str, Gathering],
) -> dict[str, UpdatedParameters]:
    """By stage, where the optimizer is dealt out; else none.

    ``stages`` has the parameters of each of this rank's stages with the layers that hold them; ``cells`` gather
    the layers of stages whose parameters are dealt out, too.
    """
    if not optimizer.sharded:
        return {}
    updated: dict[str, UpdatedParameters] = {}
    for stage, layers in stages.items():
        paths = [path for path, _ in layers_of(module.stage(stage))]
        names: dict[int, list[str]] = {}
        for name, layer in layers.items():
            names.setdefault(len(paths) if layer is None else layer, []).append(name)
        modules = {number: model.get_submodule(path) for number, path in enumerate(paths)}
        updated[stage] = UpdatedParameters(optimizer, names, modules, cells.get(stage))
    return updated


def layers_of_stages(module: Module, model: nn.Module, parameters: Iterable[str]) -> dict[str, dict[str, int | None]]:
    """The parameters of a model that trains as one stage, with the layers that hold them."""
    layers = layers_in(module, model)
    return {stage.name: {n: layers.get(n) for n in parameters} for stage in module.stages if stage.trained}
