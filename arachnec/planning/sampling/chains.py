"""A costed module's chains on plain numbers, and a schedule of their steps back as cascades with ranks.

A segment that a switch may end is one indivisible step, as are encode and decode; of the others every step is one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from arachnec.cost.model import CostModel
from arachnec.cost.table import Entry
from arachnec.ir.nodes import Cascade, Clip, Module, Phase, integers
from arachnec.ir.sampling import arrival_of, arrivals, models_of, planned_steps, segment_of
from arachnec.ir.stage_sizes import gib
from arachnec.ir.values import Quantity
from arachnec.planning.cascade_ranks import divided, on, placed_in_turn
from arachnec.planning.placement import in_order
from arachnec.planning.sampling.requests import Segment, begun_before, chain
from arachnec.solver.malleable import Chain, Piece, Rate, Run
from arachnec.solver.problem import TICKS


@dataclass(frozen=True)
class RequestChain:
    """The cascades of one batch of requests in order, and what they are to the solver."""

    cascades: tuple[Cascade, ...]
    chain: Chain

    @property
    def requests(self) -> tuple[int, ...]:
        return self.cascades[0].clips


@dataclass(frozen=True)
class Rates:
    """Times of a step of each cascade by degree, where ranks hold ``stages`` beside the cascade's own.

    Ticks are rounded up, for a bound ``down``.
    """

    cost: CostModel
    stages: Collection[str] = ()
    down: bool = False
    _entries: dict[tuple[object, ...], dict[int, Entry]] = field(default_factory=dict, repr=False, compare=False)

    def entries(self, cascade: Cascade) -> dict[int, Entry]:
        """Rows by degree that fit the memory, whole and cut, and beat every narrower one."""
        key = self.cost.table.shape(cascade)
        if key not in self._entries:
            self._entries[key] = self._new(cascade)
        return self._entries[key]

    def _new(self, cascade: Cascade) -> dict[int, Entry]:
        """What a switch may leave of a segment does not decide which degrees are worth it: all of its steps do."""
        best: dict[int, Entry] = {}
        fastest, whole = math.inf, cascade.with_attrs(planned=None)
        for degree in self.cost.legal_degrees(cascade):
            entry = self._fitting(whole, degree)
            if entry is not None and entry.time < fastest:
                fastest = entry.time
                best[degree] = self.cost.table.entry(cascade, degree, None, entry.strategy)
        return best

    def _fitting(self, cascade: Cascade, degree: int) -> Entry | None:
        """The fastest row of a cascade at a degree that fits."""
        room = self.room(cascade.stage) - self._handed_to_a_part(cascade)
        rows = (self.cost.table.entry(cascade, degree, None, way) for way in self.cost.table.ways(cascade, degree))
        return min((row for row in rows if row.memory <= room), key=lambda row: row.time, default=None)

    def _handed_to_a_part(self, cascade: Cascade) -> float:
        """GiB that a later part of a cascade would read of the part before it, and the cascade itself does not read."""
        if self.down or divisible_steps(cascade) == 1 or not self._denoised.isdisjoint(cascade.inputs):
            return 0.0
        return self.cost.output(cascade)

    @cached_property
    def _denoised(self) -> frozenset[str]:
        return frozenset(cascade.name for cascade in self.cost.module.cascades if cascade.phase is Phase.DENOISE)

    def row(self, cascade: Cascade, degree: int) -> Entry:
        """The row of a cascade at a degree that fits."""
        entry = self._fitting(cascade, degree)
        assert entry is not None, "it was among the entries"
        return entry

    def room(self, stage: str) -> float:
        """GiB for a cascade of a stage on a rank that holds these stages too."""
        held = math.fsum(gib(self.cost.stages[name].attrs.get("state")) for name in {*self.stages, stage})
        alone = gib(self.cost.stages[stage].attrs.get("state"))
        return self.cost.room_on(None, 1, stage) + alone - held

    def run(self, cascade: Cascade) -> Run | None:
        """A cascade's steps; None where it fits at no degree."""
        steps = divisible_steps(cascade)
        rates: list[Rate] = []
        for degree, entry in self.entries(cascade).items():
            exact = entry.time * TICKS / steps
            ticks = math.floor(exact + 1e-6) if self.down else max(1, math.ceil(exact - 1e-6))
            if not rates or ticks < rates[-1].ticks or planned_steps(cascade) == 0:
                rates.append(Rate(degree, ticks))
        return Run(steps, tuple(rates)) if rates else None


def divisible_steps(cascade: Cascade) -> int:
    """Into how many parts a cascade may be cut."""
    if cascade.phase is not Phase.DENOISE or "switch" in cascade.attrs:
        return 1
    first, last = segment_of(cascade)
    return last - first + 1


def request_chains(module: Module, rates: Rates) -> list[RequestChain] | Cascade:
    """The chains of a costed module in its order, or a cascade that fits at no degree."""
    own: dict[tuple[int, ...], list[Cascade]] = {}
    runs: dict[tuple[object, ...], Run | None] = {}
    clips = {clip.id: clip for clip in module.clips}
    for cascade in module.cascades:
        own.setdefault(cascade.clips, []).append(cascade)
    chains = []
    for requests, cascades in own.items():
        chain_runs = []
        for cascade in cascades:
            key = *rates.cost.table.shape(cascade), divisible_steps(cascade)
            if key not in runs:
                runs[key] = rates.run(cascade)
            run = runs[key]
            if run is None:
                return cascade
            chain_runs.append(run)
        release = max(arrival_of(clips[number]) for number in requests)
        chains.append(RequestChain(tuple(cascades), Chain(tuple(chain_runs), math.ceil(release * TICKS))))
    return chains


def with_pieces(module: Module, chains: Sequence[RequestChain], pieces: Sequence[Piece], rates: Rates) -> list[Cascade]:
    """Cascades cut and scheduled as the pieces say, each on the ranks of its piece as ``assigned``."""
    by_chain: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_chain.setdefault(piece.chain, []).append(piece)
    clips = {clip.id: clip for clip in module.clips}
    cascades: list[Cascade] = []
    for number, request in enumerate(chains):
        parts = sorted(by_chain[number], key=lambda piece: (piece.run, piece.begin))
        cut = recut(module, [clips[clip] for clip in request.requests], request.cascades, parts)
        for cascade, piece in zip(cut, parts, strict=True):
            row = rates.row(cascade, piece.degree)
            cascades.append(scheduled(cascade, row, piece.degree, piece.first, piece.start / TICKS))
    return cascades


def recut(
    module: Module, requests: Sequence[Clip], cascades: Sequence[Cascade], parts: Sequence[Piece]
) -> list[Cascade]:
    """The chain of some requests anew, a segment for every piece."""
    second = models_of(module)[1:]
    segments = []
    for part in parts:
        cascade = cascades[part.run]
        if cascade.phase is not Phase.DENOISE:
            continue
        first, last = segment_of(cascade)
        if divisible_steps(cascade) > 1:
            first, last = first + part.begin, first + part.begin + part.steps - 1
        segments.append(Segment(first, last, cascade.stage in second))
    cut = chain(module, requests, segments, begun_before(module, cascades))
    measured = {cascade.stage: cascade.attrs.get("per_clip") for cascade in cascades}
    return [replace(cascade, attrs=cascade.attrs.updated(per_clip=measured.get(cascade.stage))) for cascade in cut]


def scheduled(cascade: Cascade, row: Entry, width: int, first: int, start: float) -> Cascade:
    """A cascade on ``width`` ranks from ``first`` on, from ``start`` ms."""
    return divided(cascade, width, row.strategy).with_attrs(
        start=Quantity(start, "ms"),
        end=Quantity(start + row.time, "ms"),
        memory=Quantity(round(row.memory, 6), "GiB"),
        assigned=tuple(range(first, first + width)),
    )


def placed_segments(module: Module, cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """Cascades with ``assigned`` ranks on these, every rank in the order of the schedule."""
    arrived = arrivals(module.clips, cascades)

    def place(cascade: Cascade, inputs: Sequence[Cascade], free: Sequence[float]) -> Cascade:
        ranks = integers(cascade.attrs["assigned"])
        placed = on(cascade.with_attrs(assigned=None), ranks, inputs, free, cost)
        late = arrived.get(cascade.name, 0.0) - placed.start
        if late <= 0:
            return placed
        start, end = placed.start + late, placed.end + late
        return placed.with_attrs(start=Quantity(round(start, 6), "ms"), end=Quantity(round(end, 6), "ms"))

    return placed_in_turn(in_order(cascades), cost, place)
