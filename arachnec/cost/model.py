"""What a cascade costs at a degree: the only code that turns stage formulas or measured times into time and memory.

::

    cost = CostModel(module)
    cost.time(cascade, 4)                     # ms on four ranks of one node
    cost.time(cascade, 16, recompute=5)       # ms, packed on as few nodes as hold it, 5 blocks recomputed
    cost.memory(cascade, 4)                   # GiB per rank while it runs, without the rank's state
    cost.legal_degrees(cascade)               # (1, 2, 3, 4, ...)
    cost.table                                # all of it as rows: ``arachnec.cost.table``

Time is compute (``arachnec.cost.compute``) and communication (``arachnec.cost.communication``). Where devices differ,
the slowest of a group sets its pace, and a cascade without ranks is thought of on the kind that is best for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from arachnec.analysis.communicators import Grid, family_grids, heads_of
from arachnec.analysis.uses import split_backwards
from arachnec.cluster.device_kinds import Devices
from arachnec.cluster.topology import machines, node_of, packed_ranks
from arachnec.cost import communication
from arachnec.cost.communication import Volumes
from arachnec.cost.memory import Memory
from arachnec.cost.strategy import Attention, Strategy, grid_of, sides, strategy_of
from arachnec.cost.table import CostTable, Rows, SharedCosts, costs_alike
from arachnec.ir.host_placement import in_host
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Stage
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.sampling import on_one_side
from arachnec.ir.stage_sizes import block_count, count_in, recomputed_blocks, times_of


@dataclass(frozen=True)
class CostModel:
    """Time in ms and memory in GiB for every cascade of a costed module.

    ``rows`` are those of modules that cost alike: whoever compares layouts of one model fills them once.
    """

    module: Module
    rows: Rows | None = field(default=None, compare=False, repr=False)

    @cached_property
    def cluster(self) -> Cluster:
        if self.module.cluster is None:
            raise ValueError("a module without a cluster has no costs")
        return self.module.cluster

    @cached_property
    def stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.module.stages}

    @cached_property
    def devices(self) -> Devices:
        return Devices(self.cluster)

    @cached_property
    def table(self) -> CostTable:
        split = split_backwards(self.module)
        return CostTable(self.stages, self.devices, self._memory, split, self._shared_costs.entries)

    @cached_property
    def _shared_costs(self) -> SharedCosts:
        rows = Rows() if self.rows is None else self.rows
        return rows.setdefault(costs_alike(self.cluster, self.module.stages), SharedCosts())

    @cached_property
    def family_grids(self) -> tuple[Grid, ...]:
        """The grids of Ulysses x ring of the family of process groups (``arachnec.analysis.communicators``)."""
        return family_grids(self.cluster, heads_of(self.module.stages))

    @cached_property
    def family_degrees(self) -> frozenset[int]:
        """The degrees of cascades in the family: one rank, and those of its grids."""
        return frozenset({1, *(ulysses * ring for ulysses, ring in self.family_grids)})

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self.module, self.devices, self._shared_costs.held)

    # -- degrees ---------------------------------------------------------------------------------------------------

    def legal_degrees(self, cascade: Cascade) -> tuple[int, ...]:
        """Degrees at which this cascade can run on this cluster, ascending, whether the memory holds it or not."""
        return self.table.legal_degrees(cascade)

    def options(self, cascade: Cascade) -> dict[int, float]:
        """The degrees worth trying, and the ms at each: they fit the memory and beat every smaller one.

        Of formulas every legal degree up to 64 is tried, and in coarser steps up to the whole cluster.
        """
        return {degree: entry.time for degree, entry in self.table.options(cascade).items()}

    def best_attention(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None = None) -> Attention:
        """The cheapest product of Ulysses and ring on these ranks (default: packed); ties go to more Ulysses."""
        attention = self.table.entry(cascade, degree, ranks).strategy.attention
        assert attention is not None, "a row says which"
        return attention

    # -- time ------------------------------------------------------------------------------------------------------

    def time(
        self,
        cascade: Cascade,
        degree: int,
        *,
        spans_nodes: int | None = None,
        ranks: tuple[int, ...] | None = None,
        ulysses: int | None = None,
        ring: int | None = None,
        recompute: int = 0,
        side: int | None = None,
    ) -> float:
        """ms that the cascade holds its ``degree`` ranks, its clips so many ``side`` by side.

        Without ``ranks`` they are packed on as few nodes as possible, or spread evenly over ``spans_nodes``. Without
        ``ulysses`` and ``ring`` the cheaper product is taken. Measured ``times`` stand as they were measured.

        Raises ValueError where the cascade was measured and not at this degree, and where ``ulysses`` times ``ring``
        is not the degree.
        """
        if ranks is None and spans_nodes is not None:
            ranks = packed_ranks(self.cluster, degree, spans_nodes)
        strategy = Strategy(recompute=recompute, side=side)
        if ulysses is not None or ring is not None:
            strategy = replace(strategy, attention=grid_of(degree // (side or 1), ulysses, ring), side=side or 1)
        return self.table.entry(cascade, degree, ranks, strategy).time

    def placed_time(self, cascade: Cascade) -> float:
        """ms on its ranks, shared between them as it says."""
        strategy = strategy_of(cascade, self.recomputed(cascade))
        return self.table.entry(cascade, cascade.width, cascade.ranks, strategy).time

    def least_compute(self, cascade: Cascade, degree: int, slowdown: float, *, recompute: int = 0) -> float:
        """ms that the cascade computes at least, divided evenly, where a group's slowest device is so much slower."""
        times = times_of(cascade)
        if times:
            return times[degree] * slowdown
        return self.table.compute.time(cascade, degree, Attention(1, degree), recompute, slowdown)

    def volumes(self, cascade: Cascade, split: Attention, recompute: int = 0) -> Volumes:
        """What each rank of the cascade sends to its clip's others; nothing where its times were measured."""
        if times_of(cascade):
            return Volumes(split.ulysses, split.ring)
        cascade = one_of_its_sides(cascade)
        return self.table.communication.volumes(cascade, split, recompute)

    def shown_copies(self, cascade: Cascade, ranks: tuple[int, ...]) -> float:
        """The part of ``time`` in which ranks wait for their hosts' memory, ms; 0 where times were measured."""
        if times_of(cascade) or not in_host(self.stages[cascade.stage]):
            return 0.0
        ranks, own = ranks[: cascade.degree], one_of_its_sides(cascade)
        return self.table.shown_copies(own, len(ranks), self.recomputed(cascade), ranks)

    def communication(self, cascade: Cascade, split: Attention, ranks: tuple[int, ...], recompute: int = 0) -> float:
        """The part of ``time`` that is communication of these ranks, those of one of its sides, ms; 0 where the
        cascade's times were measured."""
        if times_of(cascade):
            return 0.0
        cascade = one_of_its_sides(cascade)
        within = len({node_of(self.cluster, rank) for rank in ranks}) == 1
        return self.table.communication.time(cascade, len(ranks), split, recompute, None if within else ranks)

    # -- memory ----------------------------------------------------------------------------------------------------

    def memory(self, cascade: Cascade, degree: int, recompute: int = 0, side: int = 1) -> float:
        """GiB that each of its ranks holds while the cascade runs, so many blocks recomputed, without its ``state``."""
        return self._memory.of(cascade, degree, recompute, side)

    def side_at(self, cascade: Cascade, ranks: int) -> int:
        """How many of its clips the cascade runs side by side where it takes so many ranks; 1 where nothing fits."""
        if (cell_of(self.stages[cascade.stage]) or 1) == 1 and cascade.phase is not Phase.DENOISE:
            return 1
        entry = self.table.fitting(cascade, ranks)
        return 1 if entry is None else entry.strategy.sides

    def kept(self, cascade: Cascade, ranks: int, recompute: int = 0, side: int = 1) -> float:
        """GiB of this that stay until the backward of a cascade of phase forward has ended."""
        return self._memory.kept(cascade, ranks, recompute, side)

    def sides(self, cascade: Cascade, ranks: int) -> tuple[int, ...]:
        """How many of its clips the cascade may run side by side on so many ranks."""
        return sides(cascade, self.stages[cascade.stage], ranks)

    def host_inputs(self, cascade: Cascade, ranks: int, recompute: int = 0, side: int = 1) -> float:
        """GiB of blocks' inputs that each of its ranks keeps in its host's memory until the backward has ended."""
        return self._memory.host_inputs(cascade, ranks, recompute, side)

    def received(self, cascade: Cascade, side: int = 1) -> float:
        """GiB of what its inputs hand off to each of its ranks, with ``side`` clips side by side."""
        return self._memory.received(cascade, side)

    def output(self, cascade: Cascade) -> float:
        """GiB of what a stage hands off to each rank of a consumer."""
        return self._memory.output(cascade)

    def handed(self, producer: Cascade, consumer: Cascade) -> float:
        """GiB that each rank of ``consumer`` reads of ``producer``'s value."""
        return self._memory.handed(producer, consumer)

    @property
    def state(self) -> float:
        """GiB on every rank that no cascade may use: ``resident`` and a reserve."""
        return self._memory.state

    @property
    def resident(self) -> float:
        """GiB always on the ranks that hold most: parameters, gradients and optimizer state of their stages."""
        return self._memory.resident

    def resident_with(self, stage: str) -> float:
        """GiB always on the ranks that hold this stage."""
        return self._memory.resident_with(stage)

    @property
    def prepared(self) -> float:
        """GiB of the batch that is made ahead on every rank, at most."""
        return self._memory.prepared

    @property
    def room(self) -> float:
        """GiB that cascades may use on every rank."""
        return self._memory.room

    @property
    def communicators(self) -> float:
        """GiB of the communicators that the run makes at its start, on the rank that has most."""
        return self._memory.communicators

    def spare(self, memory: float) -> float:
        """GiB that cascades leave free of a device of so many, where values may wait."""
        return self._memory.spare(memory)

    def room_on(self, ranks: Sequence[int] | None, degree: int, stage: str | None = None) -> float:
        """GiB that a cascade may use on these ranks, or on the ``degree`` ranks with most memory, where they hold a
        ``stage``; without it, where they hold most."""
        return self._memory.room_on(ranks, degree, stage)

    @cached_property
    def largest_memory(self) -> float:
        """GiB of the device that has most."""
        return max(machine.memory for machine in machines(self.cluster))

    def has_attention(self, cascade: Cascade) -> bool:
        return bool(count_in(self.stages[cascade.stage], "attentions"))

    def can_recompute(self, cascade: Cascade) -> bool:
        return self._memory.can_recompute(cascade)

    def blocks(self, cascade: Cascade) -> int:
        """How many blocks the cascade could recompute; 1 where its stage does not say of how many it consists."""
        return block_count(self.stages[cascade.stage])

    def recomputed(self, cascade: Cascade) -> int:
        """How many blocks the cascade recomputes, as it is planned."""
        return recomputed_blocks(cascade.attrs.get("recompute"), self.stages[cascade.stage])

    def recompute_at(self, cascade: Cascade, degree: int, ranks: Sequence[int] | None = None) -> int | None:
        """How many blocks the cascade must recompute to fit the memory at this degree; None where not even all help.

        Without ``ranks`` those with most memory count.
        """
        return self._memory.recompute_at(cascade, degree, ranks, self.side_at(cascade, degree))

    # -- the end of the iteration ----------------------------------------------------------------------------------

    def reduce_time(self, stage: Stage, ranks: tuple[int, ...], size: float | None = None) -> float:
        """ms of the all-reduce of a trained stage's gradients over these ranks, or of ``size`` bytes of them."""
        return communication.reduce_time(self.cluster, stage, ranks, size)

    def gather_time(self, stage: Stage, ranks: tuple[int, ...], layers: Sequence[int]) -> float:
        """ms of gathering what each of these ranks has updated of these layers."""
        return communication.gather_time(self.cluster, stage, ranks, layers)

    def norm_time(self, ranks: tuple[int, ...]) -> float:
        """ms of summing the norm of the gradients over these ranks."""
        return communication.norm_time(self.cluster, ranks)

    def all_reduce_time(self, ranks: tuple[int, ...], size: float) -> float:
        """ms of an all-reduce of so many bytes over these ranks, such as that of predictors' gradients."""
        return communication.all_reduce_time(self.cluster, ranks, size)

    def step_time(self, stage: Stage) -> float:
        """ms of the optimizer's step."""
        return communication.step_time(self.cluster, stage)


def one_of_its_sides(cascade: Cascade) -> Cascade:
    """What the ranks of one clip, or of one share of its clips, do in a cascade of several side by side."""
    return on_one_side(cascade, cascade.side)
