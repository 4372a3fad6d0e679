"""The cost table of a module: (stage, shape, degree, strategy) to ms and GiB.

::

    table = CostModel(module).table
    table.entry(cascade, 4)                       # on four ranks of one node, with the cheapest attention
    table.entry(cascade, 4, (0, 1, 8, 9))         # on these ranks
    table.entry(cascade, 4, strategy=Strategy(Attention(2, 2), recompute=5))
    table.fitting(cascade, 4)                     # recomputing as few blocks as fit the memory, or None
    table.options(cascade)                        # the degrees that a scheduler chooses from

The scheduling problem, its bounds, placement, ``recost`` and ``explain`` read their numbers here. Rows are filled when
they are first asked for, and cascades of one shape share them. A new dimension of planning is a field of ``Strategy``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from arachnec.cluster.device_kinds import Devices
from arachnec.cluster.topology import node_of, packed_ranks
from arachnec.cost.communication import Communication
from arachnec.cost.compute import Compute, Load, shares
from arachnec.cost.gathering import Gathering
from arachnec.cost.host_memory import HostTransfers
from arachnec.cost.memory import Memory
from arachnec.cost.sparse_attention import SparseLoads
from arachnec.cost.strategy import (
    CHEAPEST,
    Attention,
    Strategy,
    even_ranks,
    first_ranks,
    legal_degrees,
    sides,
    widest_ulysses,
)
from arachnec.cost.timed_steps import TimedStep, correction, timed_steps
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.nodes import Cascade, Cluster, Phase, Stage
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.sampling import branches_of, on_one_side
from arachnec.ir.stage_sizes import count_in, layers_of, shape_of, times_of
from arachnec.ir.values import Value

MOST_UNEVEN = 16  # ranks of an unconditional branch that has ranks of its own number


@dataclass(frozen=True)
class Entry:
    """One row: what a cascade of a shape costs on so many ranks by a strategy."""

    time: float  # ms that it holds its ranks
    memory: float  # GiB on each of them while it runs, without the rank's state
    strategy: Strategy

    @property
    def recompute(self) -> int:
        """How many blocks run again in the backward."""
        return self.strategy.recompute


@dataclass(frozen=True)
class SharedCosts:
    """What modules share whose cascades cost alike: rows, and GiB that cascades hold beside the state."""

    entries: dict[tuple[object, ...], Entry] = field(default_factory=dict)
    held: dict[tuple[object, ...], float] = field(default_factory=dict)


Rows = dict[object, SharedCosts]
STATE = ("state", "sharded", "optimizer")  # what a stage says of its state alone: no row depends on it


def costs_alike(cluster: Cluster, stages: Iterable[Stage]) -> object:
    """The key under which modules have the same rows."""
    without: dict[str, Value | None] = dict.fromkeys(STATE)
    return cluster, tuple((stage.name, stage.trained, stage.attrs.updated(**without)) for stage in stages)


@dataclass(frozen=True)
class CostTable:
    """The rows of one module's cascades."""

    stages: Mapping[str, Stage]
    devices: Devices
    memory: Memory
    split: Set[str] = frozenset()  # cascades of phase backward whose weight gradients are another cascade
    _entries: dict[tuple[object, ...], Entry] = field(default_factory=dict, repr=False, compare=False)
    _options: dict[tuple[object, ...], dict[int, Entry]] = field(default_factory=dict, repr=False, compare=False)
    _corrections: dict[object, float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def compute(self) -> Compute:
        return Compute(self.stages, self.split, self.sparse)

    @cached_property
    def communication(self) -> Communication:
        return Communication(self.stages, self.devices.cluster, self.sparse)

    @cached_property
    def sparse(self) -> SparseLoads:
        return SparseLoads(self.stages, self.devices.cluster.gpus)

    def shape(self, cascade: Cascade) -> tuple[object, ...]:
        """The key under which cascades have the same rows; parts of a model that are alike share theirs."""
        _, *sizes = shape_of(cascade)
        return self._alike_stages[cascade.stage], *sizes, cascade.name in self.split, self.memory.received(cascade)

    @cached_property
    def _alike_stages(self) -> Mapping[str, str]:
        """For every stage the first that says the same of itself, but for the names of its layers."""
        first: dict[object, str] = {}
        unnamed = ((name, _unnamed(stage)) for name, stage in self.stages.items())
        return {name: first.setdefault(alike, name) for name, alike in unnamed}

    @cached_property
    def gathering(self) -> Gathering:
        return Gathering(self.stages, self.devices.cluster, self.split)

    @cached_property
    def transfers(self) -> HostTransfers:
        return HostTransfers(self.stages, self.devices.cluster, self.gathering)

    def legal_degrees(self, cascade: Cascade) -> tuple[int, ...]:
        """Degrees at which the cascade may run on the cluster, ascending, whether the memory holds it or not."""
        return legal_degrees(cascade, self.stages[cascade.stage], self.devices.cluster)

    def entry(
        self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None = None, strategy: Strategy = CHEAPEST
    ) -> Entry:
        """The row of a cascade at a degree. Without ``ranks`` they are packed on as few nodes as possible, or, where
        devices differ, on the kind that is best for it. Measured ``times`` stand as they were measured.

        Raises ValueError where the cascade was measured, and not at this degree.
        """
        if self.devices.kinds and ranks is None:
            packed = (self.entry(cascade, degree, group, strategy) for group in self.devices.packed(degree))
            return min(packed, key=lambda entry: entry.time)
        ranks = self._alike(ranks, degree)
        key = (*self.shape(cascade), degree, ranks, strategy)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._new(cascade, degree, ranks, strategy)
        return entry

    def fitting(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None = None) -> Entry | None:
        """The row at a degree where the cascade fits the memory, recomputing as few blocks as it must; None where it
        never does. Without ``ranks`` those with most memory count."""
        fitting = [
            self.entry(cascade, degree, ranks, replace(way, recompute=recompute))
            for way in self.ways(cascade, degree, ranks)
            for recompute in (self.memory.recompute_at(cascade, even_ranks(way, degree), ranks, way.sides),)
            if recompute is not None
        ]
        return min(fitting, key=lambda entry: entry.time, default=None)

    def ways(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None = None) -> tuple[Strategy, ...]:
        """Its clips or branches side by side in every way that so many ranks can, attention undecided.

        Of equal ranks a branch is never done earlier by more of them than the other has, so uneven ones are for devices
        that differ.
        """
        even = tuple(Strategy(side=side) for side in sides(cascade, self.stages[cascade.stage], degree))
        if not self.devices.kinds or cascade.phase is not Phase.DENOISE or branches_of(cascade) != 2:
            return even
        if sparse_layers(cascade):  # heads are divided for one number of ranks
            return even
        one = on_one_side(cascade, 2)
        counts = (count for count in range(1, min(degree - 1, MOST_UNEVEN) + 1) if 2 * count != degree)
        uneven = (self._cheapest(one, count, ranks and ranks[-count:]) for count in counts)
        return *even, *(Strategy(side=2, unconditional=grid) for grid in uneven)

    def options(self, cascade: Cascade) -> Mapping[int, Entry]:
        """Rows by degree, ascending: of the legal degrees those that fit and beat every smaller one."""
        key = self.shape(cascade)
        options = self._options.get(key)
        if options is None:
            options = self._options[key] = {}
            fastest = math.inf
            for degree in self.legal_degrees(cascade):
                entry = self.fitting(cascade, degree)
                if entry is not None and entry.time < fastest:
                    options[degree] = entry
                    fastest = entry.time
        return options

    def _alike(self, ranks: tuple[int, ...] | None, degree: int) -> tuple[int, ...] | None:
        """The ranks whose row these share: every node is like the first, or the first of its kind."""
        if ranks is None:
            return None
        gpus = self.devices.cluster.gpus
        if len({rank // gpus for rank in ranks}) > 1:
            apart = self.devices.kinds or "rack" in self.devices.cluster.attrs
            return ranks if apart else tuple(rank - ranks[0] // gpus * gpus for rank in ranks)
        if not self.devices.kinds:
            return None
        alike = self.devices.like(ranks[0])
        return alike[:degree] if set(ranks) <= set(alike) else ranks  # a node has ranks that a run found slow

    def _new(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None, strategy: Strategy) -> Entry:
        if strategy.side is None:
            tried = self.ways(cascade, degree, ranks) or (Strategy(side=1),)
            asked = (replace(way, attention=strategy.attention, recompute=strategy.recompute) for way in tried)
            return min((self.entry(cascade, degree, ranks, way) for way in asked), key=lambda entry: entry.time)
        memory = self.memory.of(cascade, even_ranks(strategy, degree), strategy.recompute, strategy.side)
        times = times_of(cascade)
        if times and degree not in times:
            raise ValueError(f"cascade {cascade.name} was not measured at degree {degree}")
        one, first = on_one_side(cascade, strategy.side), first_ranks(strategy, degree)
        attention = strategy.attention or self._cheapest(one, first, ranks and ranks[:first])
        resolved = replace(strategy, attention=attention)
        if times:
            return Entry(times[degree] * self.devices.slowdown(ranks), memory, resolved)
        apart = self.communication.exchange(cascade, degree, ranks) if strategy.side > 1 else 0.0
        slowest = max(
            self._measured(one, count, grid, strategy.recompute, group)
            for count, grid, group in self._groups(cascade, degree, ranks, resolved)
        )
        return Entry(apart + slowest, memory, resolved)

    def _groups(
        self, cascade: Cascade, width: int, ranks: tuple[int, ...] | None, strategy: Strategy
    ) -> list[tuple[int, Attention, tuple[int, ...] | None]]:
        """How the ranks of every side share it; sides whose ranks are alike are one."""
        assert strategy.attention is not None
        first, other = first_ranks(strategy, width), strategy.unconditional
        counts = [first] * strategy.sides if other is None else [first, width - first]
        if ranks is None and width > self.devices.cluster.gpus:  # sides of packed ranks may lie on one node or on two
            ranks = packed_ranks(self.devices.cluster, width)
        grids = [strategy.attention, *[other or strategy.attention] * (len(counts) - 1)]
        groups: dict[object, tuple[int, Attention, tuple[int, ...] | None]] = {}
        for count, grid, end in zip(counts, grids, accumulate(counts), strict=True):
            own = ranks and ranks[end - count : end]
            groups.setdefault((count, grid, self._alike(own, count)), (count, grid, own))
        return list(groups.values())

    def shown_copies(self, cascade: Cascade, degree: int, recompute: int, ranks: tuple[int, ...]) -> float:
        """ms of a clip's cascade in which its ranks wait for their hosts' memory, all devices of a node copying."""
        attention = Attention(degree, 1)
        forward, backward = self._halves(cascade, degree, attention, recompute, ranks)
        inputs = self.memory.host_inputs(cascade, degree, recompute)
        shown = self.transfers.exposed(cascade, forward, backward, inputs, ranks[0])
        return max(0.0, shown - self.gathering.exposed(cascade, forward, backward, ranks[0]))

    def _cheapest(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None) -> Attention:
        """The cheapest product of Ulysses and ring without recomputation; ties go to more Ulysses. Heads of
        sparse layers are exchanged between all ranks, so there is no ring."""
        if sparse_layers(cascade):
            return Attention(degree, 1)
        stage = self.stages[cascade.stage]
        heads = count_in(stage, "heads") or degree
        grids = [Attention(u, degree // u) for u in range(1, min(heads, degree) + 1) if degree % u == 0]
        if not count_in(stage, "attentions") or "forward" not in stage.attrs:
            return grids[-1]
        return min(grids, key=lambda grid: (self._time(cascade, degree, grid, 0, ranks), -grid.ulysses))

    def _measured(
        self, cascade: Cascade, degree: int, attention: Attention, recompute: int, ranks: tuple[int, ...] | None
    ) -> float:
        """``_time``, as far from it as measured steps of one machine were, whatever the product of Ulysses and ring."""
        time = self._time(cascade, degree, attention, recompute, ranks)
        rows = self._timed[cascade.stage]
        if not rows or len({node_of(self.devices.cluster, rank) for rank in ranks or range(degree)}) > 1:
            return time
        key = self.shape(cascade), degree
        if key not in self._corrections:
            self._corrections[key] = correction(cascade, degree, rows, self._one_step)
        return time * self._corrections[key]

    def _one_step(self, cascade: Cascade, degree: int) -> float:
        """As a profile times it: dense."""
        heads = count_in(self.stages[cascade.stage], "heads")
        dense = cascade.with_attrs(sparse=None, heads=None)
        return self._time(dense, degree, widest_ulysses(degree, heads), 0, None)

    @cached_property
    def _timed(self) -> Mapping[str, tuple[TimedStep, ...]]:
        return {name: timed_steps(stage) for name, stage in self.stages.items()}

    def _time(
        self, cascade: Cascade, degree: int, attention: Attention, recompute: int, ranks: tuple[int, ...] | None
    ) -> float:
        forward, backward = self._halves(cascade, degree, attention, recompute, ranks)
        inputs = self.memory.host_inputs(cascade, degree, recompute)
        cells = self._cells(cascade, ranks)
        gathering = max(self.transfers.exposed(cascade, forward, backward, inputs, rank) for rank in cells)
        return forward + backward + gathering + self.communication.time(cascade, degree, attention, recompute, ranks)

    def _cells(self, cascade: Cascade, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
        """A rank of every cell whose gathers a cascade waits for: where devices differ the slowest counts."""
        if ranks is None or not self.devices.kinds:
            return (ranks[0] if ranks else 0,)
        cell = cell_of(self.stages[cascade.stage]) or 1
        return tuple(dict.fromkeys(rank - rank % cell for rank in ranks)) if cell > 1 else ranks[:1]

    def _halves(
        self, cascade: Cascade, degree: int, attention: Attention, recompute: int, ranks: tuple[int, ...] | None
    ) -> tuple[float, float]:
        own = shares(cascade, attention)
        if own is None:
            whole = Load(self.devices.slowdown(ranks), self.devices.slowed(ranks))
            return self.compute.halves(cascade, degree, attention, recompute, (whole,))
        groups = [(rank,) for rank in ranks] if ranks else [None] * degree
        pairs = zip(own, groups, strict=True)
        loads = {Load(self.devices.slowdown(rank), self.devices.slowed(rank), share) for share, rank in pairs}
        return self.compute.halves(cascade, degree, attention, recompute, loads)


def _unnamed(stage: Stage) -> tuple[object, ...]:
    """What a stage says of itself, its layers without their names."""
    return stage.trained, stage.attrs.updated(layers=None), tuple(count for _, count in layers_of(stage))
