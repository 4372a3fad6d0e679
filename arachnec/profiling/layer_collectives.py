"""What a layer's gather and reduce-scatter take in a cell of these ranks, of the tensors that cells really move.

More than plain messages of as many bytes: a reduce-scatter puts a layer's gradients together, and gloo adds up the
whole where a ring would add up a share. Memory is what it is in a cascade: the same for every layer.

Each runs alone, and beside compute as in a cascade: layer after layer, of a backward a gather and a reduce-scatter at
once. Ranks that wait leave their cores idle; ranks that compute lose what their cores do for the collectives, and what
they wait for each other at every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.cost.profile import GATHER, SCATTER, Collective
from arachnec.model_state.cells.flat_layer import FlatLayer
from arachnec.model_state.cells.layout import layouts_of
from arachnec.model_state.kept_gradients import set_gradient
from arachnec.runtime.agreement import gather

SMALL = 1024  # parameters of the layer that tells the latency
ROWS = 256  # of what the compute beside a collective multiplies
LAYERS = 6  # one after another, beside compute
SIZES = ("small", "large")
PHASES = tuple(f"{op} {size}{how}" for size in SIZES for op in (GATHER, SCATTER) for how in ("", " overlapped"))


@dataclass(frozen=True)
class LayerCollectives:
    """A small layer, and one like the largest block of a model; ``now`` in seconds."""

    small: FlatLayer
    large: FlatLayer
    group: dist.ProcessGroup
    now: Callable[[], float]
    weight: Tensor  # of a product that stands for compute
    together: Tensor  # where gradients are put together
    products: int = 1  # so many take as long as a gather and a reduce-scatter of the large layer

    @classmethod
    def of(cls, block: Mapping[str, Tensor], group: dist.ProcessGroup, now: Callable[[], float]) -> LayerCollectives:
        """``block`` are the parameters, of one precision, of the block whose size is measured; they are not touched.

        Collective.
        """
        some = next(iter(block.values()))
        matrices = (value.detach() for value in block.values() if value.ndim == 2)
        weight = max(matrices, key=torch.numel, default=some.new_ones(ROWS, ROWS))
        small, large = _flat({"small": some.new_zeros(SMALL)}, group), _flat(block, group)
        size = max(small.whole.numel(), large.whole.numel())
        together = torch.empty(size, dtype=large.gradient_dtype, device=large.whole.device)
        once = cls(small, large, group, now, weight, together)
        return replace(once, products=once._covering())

    def run(self) -> tuple[float, ...]:
        """ms by ``PHASES``: of each collective alone, and what compute takes longer beside it. Collective."""
        times: list[float] = []
        for flat in (self.small, self.large):
            alone = [self._timed(start, flat) for start in (self._gather, self._scatter)]
            dist.barrier(self.group)
            computed, forward, backward = (self._layers(flat, kinds) for kinds in ((), (GATHER,), (GATHER, SCATTER)))
            beside = max(0.0, forward - computed), max(0.0, backward - max(forward, computed))
            times += [alone[0], beside[0], alone[1], beside[1]]
        return tuple(times)

    def measurements(self, times: Mapping[str, float]) -> list[Collective]:
        """What the ms of each phase say."""
        rows = []
        for size, flat in zip(SIZES, (self.small, self.large), strict=True):
            for op, dtype in ((GATHER, flat.whole.dtype), (SCATTER, flat.gradient_dtype)):
                alone, overlapped = times[f"{op} {size}"], times[f"{op} {size} overlapped"]
                rows.append(Collective(op, flat.layout.ranks, flat.whole.numel() * dtype.itemsize, alone, overlapped))
        return rows

    def _covering(self) -> int:
        """So many products as take as long as both collectives of the large layer on every rank."""
        self._computed()
        one = max(self._computed(), 1e-3)
        self._timed(self._gather, self.large)
        both = math.fsum(self._timed(start, self.large) for start in (self._gather, self._scatter))
        products = torch.tensor([math.ceil(both / one)])
        return max(int(value) for value in gather(products))

    def _computed(self) -> float:
        """ms of compute with nothing beside it."""
        started = self.now()
        self._compute()
        return (self.now() - started) * 1e3

    @torch.no_grad()
    def _compute(self) -> None:
        values = self.weight.new_ones(ROWS, self.weight.shape[0])
        for _ in range(self.products):
            nn.functional.gelu(values @ self.weight)

    def _timed(self, start: Callable[[FlatLayer], Callable[[], object]], flat: FlatLayer) -> float:
        """ms of a collective with nothing beside it."""
        if start == self._scatter:
            _set_gradients(flat)
        started = self.now()
        start(flat)()
        return (self.now() - started) * 1e3

    def _layers(self, flat: FlatLayer, kinds: Collection[str]) -> float:
        """ms of a layer's compute among others, with collectives of these ``kinds`` beside it."""
        dist.barrier(self.group)
        coming = self._gather(flat) if GATHER in kinds else _nothing
        going: Callable[[], object] = _nothing
        coming()
        took = 0.0
        for _ in range(LAYERS):
            if SCATTER in kinds:
                _set_gradients(flat)
            started = self.now()
            coming = self._gather(flat) if GATHER in kinds else _nothing
            self._compute()
            going()
            going = self._scatter(flat) if SCATTER in kinds else _nothing
            coming()
            took += self.now() - started
        going()
        return took / LAYERS * 1e3

    def _gather(self, flat: FlatLayer) -> Callable[[], object]:
        return flat.gather(self.group).wait

    def _scatter(self, flat: FlatLayer) -> Callable[[], object]:
        scattering = flat.scatter(self.group, self.together[: flat.whole.numel()])
        assert scattering is not None, "the layer trains"
        return scattering.finish


def _set_gradients(flat: FlatLayer) -> None:
    """What a backward leaves; a scatter takes it."""
    for value in flat.parameters.values():
        set_gradient(value, torch.zeros(value.shape, dtype=flat.gradient_dtype, device=value.device))


def _nothing() -> None:
    pass


def _flat(values: Mapping[str, Tensor], group: dist.ProcessGroup) -> FlatLayer:
    """A layer of parameters like these."""
    parameters = {name: nn.Parameter(torch.zeros_like(value)) for name, value in values.items()}
    (layout,) = layouts_of(parameters, dict.fromkeys(parameters, 0), dist.get_world_size(group))
    some = next(iter(parameters.values())).detach()
    shard, whole = some.new_zeros(layout.shard_size), some.new_empty(layout.shard_size * layout.ranks)
    return FlatLayer.of(layout, shard, whole, parameters, dist.get_rank(group))
