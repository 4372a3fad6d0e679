"""What a layer's gather and reduce-scatter take in a cell of these ranks, of the tensors that cells really move.

More than plain messages of as many bytes: a gather gives the layer new memory and a reduce-scatter puts its gradients
together; gloo copies both once more, and adds up the whole where a ring would add up a share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.cost.profile import GATHER, SCATTER, Collective
from arachnec.model_state.cells.flat_layer import FlatLayer
from arachnec.model_state.cells.layout import layouts_of
from arachnec.model_state.kept_gradients import set_gradient

SMALL = 1024  # parameters of the layer that tells the latency
PHASES = tuple(f"{op} {size}" for size in ("small", "large") for op in (GATHER, SCATTER))


@dataclass(frozen=True)
class LayerCollectives:
    """A small layer, and one like the largest block of a model; ``now`` in seconds."""

    small: FlatLayer
    large: FlatLayer
    group: dist.ProcessGroup
    now: Callable[[], float]

    @classmethod
    def of(cls, block: Mapping[str, Tensor], group: dist.ProcessGroup, now: Callable[[], float]) -> LayerCollectives:
        """``block`` are the parameters, of one precision, of the block whose size is measured; they are not touched."""
        some = next(iter(block.values()))
        return cls(_flat({"small": some.new_zeros(SMALL)}, group), _flat(block, group), group, now)

    def run(self) -> tuple[float, ...]:
        """ms by ``PHASES``. Collective."""
        return tuple(time for flat in (self.small, self.large) for time in self._times(flat))

    def measurements(self, times: Mapping[str, float]) -> list[Collective]:
        """What the ms of each phase say."""
        rows = []
        for phase, flat in zip(PHASES, (self.small, self.small, self.large, self.large), strict=True):
            op = phase.split()[0]
            itemsize = flat.whole.itemsize if op == GATHER else flat.gradient_dtype.itemsize
            rows.append(Collective(op, flat.layout.ranks, flat.whole.numel() * itemsize, times[phase]))
        return rows

    def _times(self, flat: FlatLayer) -> tuple[float, float]:
        started = self.now()
        flat.gather(self.group).wait()
        gathered = self.now()
        flat.release()
        for value in flat.parameters.values():
            set_gradient(value, torch.zeros(value.shape, dtype=flat.gradient_dtype, device=value.device))
        summing = self.now()
        scattering = flat.scatter(self.group)
        assert scattering is not None, "the layer trains"
        scattering.finish()
        return (gathered - started) * 1e3, (self.now() - summing) * 1e3


def _flat(values: Mapping[str, Tensor], group: dist.ProcessGroup) -> FlatLayer:
    """A layer of parameters like these."""
    parameters = {name: nn.Parameter(torch.zeros_like(value)) for name, value in values.items()}
    (layout,) = layouts_of(parameters, dict.fromkeys(parameters, 0), dist.get_world_size(group))
    shard = next(iter(parameters.values())).new_zeros(layout.shard_size).detach()
    return FlatLayer.of(layout, shard, parameters, dist.get_rank(group))
