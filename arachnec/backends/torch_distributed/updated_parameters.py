"""Parameters of which every rank has updated a part, gathered layer by layer while the next step begins.

The gathers are started in the order of the program's ``gather``. A layer is waited for when it is about to run, by a
hook of its module as in a cell (``cells.gathering``); here it is never released. What arrives lies beside the
parameters until then. It has the room of the gradients, which a plan counts always and which come into being later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from arachnec.backends.torch_distributed.gradients import layers_in
from arachnec.backends.torch_distributed.optimizer import Optimizer
from arachnec.backends.torch_distributed.parameter_parts import GatheredParts
from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Module


@dataclass
class UpdatedParameters:
    """Of one stage. ``names`` are the parameters of every layer by number, ``modules`` the layers that are modules."""

    optimizer: Optimizer
    names: Mapping[int, Sequence[str]]
    modules: Mapping[int, nn.Module]
    _coming: dict[int, list[GatheredParts]] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for number, module in self.modules.items():
            module.register_forward_pre_hook(lambda _, __, number=number: self._wait(number))

    def start(self, layers: Iterable[int], group: dist.ProcessGroup | None) -> None:
        """Start to gather these layers, one after another. Collective over the group."""
        for number in layers:
            self._started.add(number)
            self._coming[number] = self.optimizer.gathered(self.names.get(number, ()), group)

    def wait_outside(self) -> None:
        """Wait for what lies in no module that says when it runs."""
        for number in [number for number in self._coming if number not in self.modules]:
            self._wait(number)

    def wait(self) -> None:
        """Wait for all layers, before they are updated again."""
        for number in list(self._coming):
            self._wait(number)
        assert self._started >= set(self.names), "a program gathers every layer that has parameters here"
        self._started.clear()

    def _wait(self, number: int) -> None:
        for coming in self._coming.pop(number, ()):
            coming.wait()


def updated_parameters(
    module: Module, model: nn.Module, optimizer: Optimizer, parameters: Iterable[str]
) -> dict[str, UpdatedParameters]:
    """By stage, those of a model that trains as one stage whose optimizer is dealt out; else none."""
    if not optimizer.sharded:
        return {}
    stage = next(stage for stage in module.stages if stage.trained)
    paths, layers = [path for path, _ in layers_of(stage)], layers_in(module, model)
    names: dict[int, list[str]] = {}
    for name in parameters:
        layer = layers.get(name)
        names.setdefault(len(paths) if layer is None else layer, []).append(name)
    modules = {number: model.get_submodule(path) for number, path in enumerate(paths)}
    return {stage.name: UpdatedParameters(optimizer, names, modules)}
