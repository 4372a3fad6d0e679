"""What a cascade costs at a degree: the only code that turns stage formulas or measured times into time and memory.

::

    cost = CostModel(module)
    cost.time(cascade, 4)                     # ms on four ranks of one node
    cost.time(cascade, 16, recompute=True)    # ms, packed on as few nodes as hold it
    cost.memory(cascade, 4)                   # GiB per rank while it runs, beside the rank's state
    cost.legal_degrees(cascade)               # (1, 2, 3, 4, ...)

Compute is the stage's formula over the degree: terms without S (launch overhead, what every rank does in full for
the caption) are not divided, terms linear in S wait for the rank with the most tokens, terms in S^2 and S*T for the
rank with the most heads. An encoder's ranks deal out whole clips and wait for the one with the most, which takes the
formula's time for so many, or so many times the cascade's ``per_clip``, where that was measured. Communication is
alpha-beta: Ulysses all-to-all (arXiv 2309.14509, section 3) and ring attention (arXiv 2310.01889), each over the links
that its groups really use. Where devices differ, the slowest of a group sets its pace, and a cascade without ranks is
thought of on the kind that is best for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from arachnec.cluster.device_kinds import Devices
from arachnec.cluster.device_specs import find_data_sheet
from arachnec.cluster.topology import (
    Link,
    group_link,
    machines,
    node_of,
    packed_ranks,
    penalty,
    ring_link,
    ulysses_link,
)
from arachnec.cost.communication import Volumes, collective_time, hop_time, volumes
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Stage, integer, integers, quantity
from arachnec.ir.stage_sizes import (
    clip_time,
    considered,
    gradient_bytes,
    shape_of,
    times_of,
    token_bytes,
    trained_bytes,
    uneven,
)
from arachnec.ir.values import Formula, Value

GIB = 2**30
RESERVE = 0.06  # of a device's memory: fragmentation, communication buffers, what no formula knows
ASSUMED_BANDWIDTH = 1000.0  # GB/s of a device's own memory, where there is no data sheet


@dataclass(frozen=True)
class Attention:
    """How the ranks of a cascade share its attention: ``degree = ulysses * ring``."""

    ulysses: int
    ring: int


@dataclass(frozen=True)
class CostModel:
    """Time in ms and memory in GiB for every cascade of a costed module."""

    module: Module

    @cached_property
    def cluster(self) -> Cluster:
        if self.module.cluster is None:
            raise ValueError("a module without a cluster has no costs")
        return self.module.cluster

    @cached_property
    def stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.module.stages}

    @cached_property
    def _memo(self) -> dict[tuple[object, ...], float]:
        return {}

    @cached_property
    def _attentions(self) -> dict[tuple[object, ...], Attention]:
        return {}

    @cached_property
    def _options(self) -> dict[tuple[object, ...], dict[int, float]]:
        return {}

    @cached_property
    def _found_sizes(self) -> dict[tuple[object, ...], tuple[float, float, float, float]]:
        return {}

    @cached_property
    def _found_links(self) -> dict[tuple[object, ...], tuple[Link, Link, Link, float]]:
        return {}

    @cached_property
    def devices(self) -> Devices:
        return Devices(self.cluster)

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each kind of device, where there are several kinds; those with most memory first."""
        return self.devices.kinds

    # -- degrees ---------------------------------------------------------------------------------------------------

    def legal_degrees(self, cascade: Cascade) -> tuple[int, ...]:
        """Degrees at which this cascade can run on this cluster, ascending; memory is not asked."""
        world = self.cluster.world
        times = times_of(cascade)
        if times:
            return tuple(sorted(degree for degree in times if degree <= world))
        listed = self.stages[cascade.stage].attrs.get("degrees")
        if listed is not None:
            return tuple(sorted(degree for degree in integers(listed) if degree <= world))
        if cascade.phase is Phase.ENCODE:
            return tuple(range(1, min(world, cascade.batch) + 1))  # the ranks share out the clips
        return tuple(range(1, min(world, max(1, cascade.tokens)) + 1))

    def best_attention(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None = None) -> Attention:
        """The cheapest product of Ulysses and ring on these ranks (default: packed); ties go to more Ulysses."""
        key = (*shape_of(cascade), degree, ranks)
        found = self._attentions.get(key)
        if found is None:
            found = self._attentions[key] = min(
                self._splits(cascade, degree),
                key=lambda split: (self._attention_time(cascade, degree, split, ranks), -split.ulysses),
            )
        return found

    def _splits(self, cascade: Cascade, degree: int) -> list[Attention]:
        heads = self._number(cascade, "heads") or degree
        return [Attention(u, degree // u) for u in range(1, degree + 1) if degree % u == 0 and u <= heads]

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
        recompute: bool = False,
    ) -> float:
        """ms that the cascade holds its ``degree`` ranks.

        Without ``ranks`` they are packed on as few nodes as possible, or spread evenly over ``spans_nodes``. Without
        ``ulysses`` and ``ring`` the cheaper product is taken. Measured ``times`` stand as they were measured.

        Raises ValueError where the degree is not one of ``legal_degrees``.
        """
        if ranks is None and spans_nodes is not None:
            ranks = packed_ranks(self.cluster, degree, spans_nodes)
        if self.kinds and ranks is None:
            return min(
                self.time(cascade, degree, ranks=where, ulysses=ulysses, ring=ring, recompute=recompute)
                for where in self.devices.packed(degree)
            )
        times = times_of(cascade)
        if times:
            if degree not in times:
                raise ValueError(f"cascade {cascade.name} was not measured at degree {degree}")
            return times[degree] * self.devices.slowdown(ranks)
        if ranks is not None and len({node_of(self.cluster, rank) for rank in ranks}) == 1:
            # every node is like the first, or the first of its kind
            ranks = self.devices.like(ranks[0])[:degree] if self.kinds else None
        key = (*shape_of(cascade), degree, ranks, ulysses, recompute)
        found = self._memo.get(key)
        if found is None:
            split = (
                self.best_attention(cascade, degree, ranks)
                if ulysses is None
                else Attention(ulysses, degree // ulysses)
            )
            if ring is not None and split.ring != ring:
                raise ValueError(f"ulysses {split.ulysses} times ring {ring} is not degree {degree}")
            found = self._time(cascade, degree, split, ranks, recompute)
            self._memo[key] = found
        return found

    def _time(
        self, cascade: Cascade, degree: int, split: Attention, ranks: tuple[int, ...] | None, recompute: bool
    ) -> float:
        forward, backward = self._passes(cascade)
        if recompute and backward:
            forward *= 2
        compute = 0.0
        for count, name in ((forward, "forward"), (backward, "backward")):
            if count:
                compute += count * self._compute(cascade, name, degree, split, self.devices.slowdown(ranks))
        return compute + self._communication(cascade, degree, split, ranks, forward, backward)

    def least_compute(self, cascade: Cascade, degree: int, slowdown: float, *, recompute: bool = False) -> float:
        """ms that the cascade computes at least, divided evenly, where a group's slowest device is so much slower."""
        times = times_of(cascade)
        if times:
            return times[degree] * slowdown
        forward, backward = self._passes(cascade)
        passes = (forward * 2 if recompute and backward else forward, "forward"), (backward, "backward")
        even = Attention(1, degree)
        return sum(count * self._compute(cascade, name, degree, even, slowdown) for count, name in passes if count)

    def _attention_time(self, cascade: Cascade, degree: int, split: Attention, ranks: tuple[int, ...] | None) -> float:
        if not self._number(cascade, "attentions"):
            return 0.0
        return self._time(cascade, degree, split, ranks, recompute=False)

    def _passes(self, cascade: Cascade) -> tuple[float, float]:
        """How many forwards and backwards of its stage this cascade is."""
        return {
            Phase.ENCODE: (1.0, 0.0),
            Phase.FORWARD: (1.0, 0.0),
            Phase.DENOISE: (1.0, 0.0),
            Phase.BACKWARD: (0.0, 1.0),
            Phase.WEIGHT: (0.0, 0.5),
            Phase.TRAIN: (1.0, 1.0),
        }[cascade.phase]

    def _compute(self, cascade: Cascade, name: str, degree: int, split: Attention, slowdown: float) -> float:
        if cascade.phase is Phase.ENCODE:
            busiest, each = _of_one_rank(cascade, degree), clip_time(cascade)
            if each is not None:
                return busiest.batch * each * slowdown
            fixed, caption, *shared = self._sizes(busiest, name)
            return fixed + (caption + sum(shared)) * slowdown
        fixed, caption, linear, pairwise = self._sizes(cascade, name)
        heads = self._number(cascade, "heads") or split.ulysses
        pairs = uneven(heads, split.ulysses) / split.ring
        return fixed + (caption + linear * uneven(cascade.tokens, degree) + pairwise * pairs) * slowdown

    def _sizes(self, cascade: Cascade, name: str) -> tuple[float, float, float, float]:
        """ms on one rank of a stage's ``name``: what no size and no degree changes, what the caption takes in full on
        every rank, what tokens divide, what pairs of them do."""
        key = cascade.stage, name, cascade.batch, cascade.tokens, cascade.text
        found = self._found_sizes.get(key)
        if found is None:
            formula = self._formula(cascade, name)
            if formula is None:
                raise ValueError(f"stage {cascade.stage} has no `{name}` formula; run `annotate` first")
            fixed = caption = linear = pairwise = 0.0
            for term in formula.terms:
                value = term.coefficient * math.prod(_size(cascade, symbol) ** power for symbol, power in term.powers)
                powers = dict(term.powers)
                if powers.get("S", 0) >= 2 or ("S" in powers and "T" in powers):
                    pairwise += value
                elif "S" in powers:
                    linear += value
                elif "T" in powers:
                    caption += value
                else:
                    fixed += value
            found = self._found_sizes[key] = fixed, caption, linear, pairwise
        return found

    def _communication(
        self,
        cascade: Cascade,
        degree: int,
        split: Attention,
        ranks: tuple[int, ...] | None,
        forward: float,
        backward: float,
    ) -> float:
        sent = self._volumes(cascade, split, forward, backward)
        if not sent.messages:
            return 0.0
        over_all, of_ulysses, of_ring, contention = self._links(degree, ranks, split.ulysses)
        total = collective_time(over_all, sent.gathered, degree, sent.gathers, contention)
        if split.ulysses > 1:
            total += collective_time(of_ulysses, sent.traded, split.ulysses, sent.trades, contention)
        if split.ring > 1:
            total += hop_time(of_ring, sent.passed, sent.hops, contention)
        return total

    def _volumes(self, cascade: Cascade, split: Attention, forward: float, backward: float) -> Volumes:
        if cascade.phase is Phase.ENCODE:
            return Volumes(split.ulysses, split.ring, gathered=self.output(cascade) * GIB, gathers=1)
        return volumes(
            ulysses=split.ulysses,
            ring=split.ring,
            heads=self._number(cascade, "heads") or split.ulysses,
            attentions=self._number(cascade, "attentions"),
            traffic=self._evaluate(cascade, "traffic"),
            forward=forward,
            backward=backward,
            output=token_bytes(self.stages[cascade.stage], cascade.batch * cascade.tokens),
        )

    def volumes(self, cascade: Cascade, split: Attention, recompute: bool = False) -> Volumes:
        """What each rank of the cascade sends to the others; nothing where its times were measured."""
        if times_of(cascade):
            return Volumes(split.ulysses, split.ring)
        forward, backward = self._passes(cascade)
        return self._volumes(cascade, split, forward * 2 if recompute and backward else forward, backward)

    def communication(
        self, cascade: Cascade, split: Attention, ranks: tuple[int, ...], recompute: bool = False
    ) -> float:
        """The part of ``time`` on these ranks that is communication, ms; 0 where the cascade's times were measured."""
        if times_of(cascade):
            return 0.0
        forward, backward = self._passes(cascade)
        if recompute and backward:
            forward *= 2
        within = len({node_of(self.cluster, rank) for rank in ranks}) == 1
        return self._communication(cascade, len(ranks), split, None if within else ranks, forward, backward)

    def _links(self, degree: int, ranks: tuple[int, ...] | None, ulysses: int) -> tuple[Link, Link, Link, float]:
        """The links of a group: of all its ranks, of its Ulysses groups and of its rings; and their contention."""
        key = (degree if ranks is None else ranks, ulysses)
        found = self._found_links.get(key)
        if found is None:
            where = ranks if ranks is not None else packed_ranks(self.cluster, degree)
            found = self._found_links[key] = (
                group_link(self.cluster, where),
                ulysses_link(self.cluster, where, ulysses),
                ring_link(self.cluster, where, ulysses),
                penalty(self.cluster, where),
            )
        return found

    # -- memory ----------------------------------------------------------------------------------------------------

    def memory(self, cascade: Cascade, degree: int, recompute: bool = False) -> float:
        """GiB that each of the cascade's ranks holds while it runs, beside its ``state``."""
        if cascade.phase is Phase.ENCODE:
            return self._shared(_of_one_rank(cascade, degree), "workspace", 1.0) + self.output(cascade)
        share = uneven(cascade.tokens, degree)
        total = 0.0
        if cascade.phase in (Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD):
            recomputed = recompute and "saved_recompute" in self.stages[cascade.stage].attrs
            total += self._shared(cascade, "saved_recompute" if recomputed else "saved", share)
        total += self._shared(cascade, "workspace", share)
        return total + sum(self.output(self._named[name]) for name in cascade.inputs if name in self._named)

    def output(self, cascade: Cascade) -> float:
        """GiB of what an encoder hands off to each rank of a consumer."""
        return self._evaluate(cascade, "output")

    @cached_property
    def state(self) -> float:
        """GiB on every rank that no cascade may use: ``resident`` and a reserve."""
        return self.resident + RESERVE * self.cluster.memory

    @cached_property
    def resident(self) -> float:
        """GiB on every rank, always: parameters, gradients and optimizer state of all stages."""
        return math.fsum(_gib(stage.attrs.get("state")) for stage in self.module.stages)

    @cached_property
    def room(self) -> float:
        """GiB that cascades may use on every rank."""
        return self.cluster.memory - self.state

    def room_on(self, ranks: Sequence[int] | None, degree: int) -> float:
        """GiB that a cascade may use on these ranks, or on the ``degree`` ranks with most memory."""
        if not self.kinds:
            return self.room
        return (1 - RESERVE) * self.devices.memory_of(ranks, degree) - self.resident

    @cached_property
    def largest_memory(self) -> float:
        """GiB of the device that has most."""
        return max(machine.memory for machine in machines(self.cluster))

    def has_attention(self, cascade: Cascade) -> bool:
        return self._number(cascade, "attentions") > 0

    def can_recompute(self, cascade: Cascade) -> bool:
        return cascade.phase in (Phase.TRAIN, Phase.FORWARD) and "saved_recompute" in self.stages[cascade.stage].attrs

    def recompute_at(self, cascade: Cascade, degree: int, ranks: Sequence[int] | None = None) -> bool | None:
        """Whether the cascade must recompute to fit the memory at this degree; None where even that does not help.

        Without ``ranks`` those with most memory count.
        """
        room = self.room_on(ranks, degree)
        if self.memory(cascade, degree) <= room:
            return False
        if self.can_recompute(cascade) and self.memory(cascade, degree, recompute=True) <= room:
            return True
        return None

    def options(self, cascade: Cascade) -> dict[int, float]:
        """The degrees worth considering, and the ms at each: they fit the memory and beat every smaller one.

        Of formulas every legal degree up to 64 is considered, and in coarser steps up to the whole cluster.
        """
        key = shape_of(cascade)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = {}
            least = math.inf
            legal = self.legal_degrees(cascade)
            for degree in legal if times_of(cascade) else considered(legal):
                recompute = self.recompute_at(cascade, degree)
                if recompute is None:
                    continue
                time = self.time(cascade, degree, recompute=recompute)
                if time < least:
                    found[degree] = least = time
        return dict(found)

    # -- the end of the iteration ----------------------------------------------------------------------------------

    def reduce_time(self, stage: Stage, ranks: tuple[int, ...], size: float | None = None) -> float:
        """ms of the all-reduce of a trained stage's gradients over these ranks (ring: 2 (n-1)/n of the bytes).

        ``size`` is the bytes of a bucket of them; without it they go all at once.
        """
        size = gradient_bytes(stage) if size is None else size
        if len(ranks) < 2 or not size:
            return 0.0
        link, measured = group_link(self.cluster, ranks), self.cluster.attrs.get("all_reduce")
        if measured is not None:
            link = replace(link, intra=quantity(measured))
        return 2 * collective_time(link, size, len(ranks), 1, penalty(self.cluster, ranks))

    def step_time(self, stage: Stage) -> float:
        """ms of the optimizer, which reads and writes the stage's state once and, dealt out, sends what it updated."""
        names = {machine.device for machine in machines(self.cluster)}
        sheets = [find_data_sheet(name) for name in names]
        bandwidth = min(sheet.bandwidth if sheet else ASSUMED_BANDWIDTH for sheet in sheets)
        update = 2 * _gib(stage.attrs.get("state")) * GIB / (bandwidth * 1e9) * 1e3
        if "update" in stage.attrs:  # measured with the whole state on every rank
            update = quantity(stage.attrs["update"]) / integer(stage.attrs.get("sharded", 1))
        if "sharded" not in stage.attrs:
            return update
        everyone = tuple(range(self.cluster.world))
        link, contention = group_link(self.cluster, everyone), penalty(self.cluster, everyone)
        return update + collective_time(link, trained_bytes(stage), len(everyone), 1, contention)

    # -- what the stage says ---------------------------------------------------------------------------------------

    @cached_property
    def _named(self) -> dict[str, Cascade]:
        return {cascade.name: cascade for cascade in self.module.cascades}

    def _number(self, cascade: Cascade, name: str) -> int:
        value = self.stages[cascade.stage].attrs.get(name, 0)
        return value if isinstance(value, int) else 0

    def _formula(self, cascade: Cascade, name: str) -> Formula | None:
        value = self.stages[cascade.stage].attrs.get(name)
        return value if isinstance(value, Formula) else None

    def _evaluate(self, cascade: Cascade, name: str) -> float:
        formula = self._formula(cascade, name)
        return formula(B=cascade.batch, S=cascade.tokens, T=cascade.text) if formula else 0.0

    def _shared(self, cascade: Cascade, name: str, share: float) -> float:
        formula = self._formula(cascade, name)
        if formula is None:
            return 0.0
        return math.fsum(
            term.coefficient
            * math.prod(_size(cascade, symbol) ** power for symbol, power in term.powers)
            * (share if any(symbol == "S" for symbol, _ in term.powers) else 1.0)
            for term in formula.terms
        )


def _of_one_rank(cascade: Cascade, degree: int) -> Cascade:
    """What the busiest of an encoder's ranks does: whole clips are dealt out."""
    return replace(cascade, batch=math.ceil(cascade.batch / degree))


def _size(cascade: Cascade, symbol: str) -> float:
    return {"B": cascade.batch, "S": cascade.tokens, "T": cascade.text}[symbol]


def _gib(value: Value | None) -> float:
    return quantity(value) if value is not None else 0.0
