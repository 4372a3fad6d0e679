"""A program whose next rounds are planned again. In: the program that ranks execute, the round that they come to, and
what is known of each request's switch. Out: a program with the same beginning, and the rest as it is best now.

Everything here is a function of the program and the windows. Whoever plans, all ranks are given one text, and its proof
is that of any program. A rest is judged by its mean makespan over drawn outcomes of the switches that are open, not by
the forecast alone. It is planned where every rank holds all stages, from the moments at which ranks and
requests are expected at the round, in groups of ranks that are there already; the rest as it stood is one of the ways.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import networkx as nx

from arachnec.analysis.communicators import cascade_groups, family, heads_of
from arachnec.analysis.uses import COMPUTE
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Instruction, Level, Module, Phase, integer, quantity
from arachnec.ir.sampling import chain_of, models_of, outcomes_of, segment_of
from arachnec.ir.values import Quantity
from arachnec.lowering.continuation import continued
from arachnec.planning.placement import end_of
from arachnec.planning.sampling.chains import Rates, RequestChain, placed_segments, request_chains, with_pieces
from arachnec.planning.sampling.policies import in_order_of_length, side_by_side, wrap_arounds
from arachnec.planning.sampling.requests import Begun, Segment, chain, cut_steps
from arachnec.planning.sampling.rounds import (
    Windows,
    in_rounds,
    moved,
    number_of,
    one_after_another,
    placed_round_by_round,
    retimed,
    with_forecast,
    with_memory,
    with_windows,
)
from arachnec.solver.malleable import Chain, Piece, least_makespan
from arachnec.solver.problem import TICKS

GAIN = 5e-3  # of the makespan, from which on the rest is changed
DRAWS = 4  # outcomes of all open switches by which a rest is judged
NEAR = 1.15  # of the least makespan at the forecast, up to which a rest is judged
LENGTH = 2  # of a segment that a switch may end


@dataclass(frozen=True)
class _Fixed:
    """What is not planned again: the requests as known now, and the cascades of earlier rounds as they will be."""

    module: Module
    cascades: tuple[Cascade, ...]
    busy: tuple[float, ...]  # ms until when each rank is

    @property
    def since(self) -> float:
        """ms at which the first rank comes to the round."""
        return min(self.busy)

    def ready(self, requests: Sequence[int]) -> float:
        """ms at which a batch of requests may go on."""
        return max((c.end for c in self.cascades if c.clips == tuple(requests)), default=0.0)

    def followed(self, rest: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
        """Cascades that name their ranks, placed behind these, in the order of their starts."""
        names = {cascade.name for cascade in self.cascades}
        late = [
            cascade if "assigned" in cascade.attrs else cascade.with_attrs(assigned=cascade.ranks) for cascade in rest
        ]
        placed = placed_segments(self.module, [*one_after_another(self.cascades), *late], cost)
        return [cascade for cascade in placed if cascade.name not in names]


def replanned(module: Module, round: int, windows: Windows, length: int = LENGTH) -> Module:
    """The program with what follows ``replan`` of ``round`` planned again. ``windows`` narrow those of the requests.

    Segments that a switch may end have at most ``length`` steps. Raises UserError as ``lower`` does.
    """
    clips = with_windows(module.clips, windows)
    named = {clip.id: clip for clip in clips}
    told = tuple(with_forecast(cascade, named, models_of(module)[1:]) for cascade in module.cascades)
    now = replace(module, clips=clips, cascades=told)
    cost = CostModel(now)
    timed = [retimed(cascade, cost) for cascade in _in_list_order(now)]
    fixed = _fixed(now, [cascade for cascade in timed if cascade.round < round], cost)
    kept = one_after_another([cascade for cascade in timed if cascade.round >= round])
    best = fixed.followed([moved(cascade, float(len(kept))) for cascade in kept], cost)
    draws = [_drawn(clips, number) for number in range(DRAWS)]
    least = _mean_end(fixed, best, draws, cost)
    ways = sorted(_ways(fixed, length), key=end_of)
    for rest in ways:
        if end_of(rest) > NEAR * end_of(ways[0]):
            break
        mean = _mean_end(fixed, rest, draws, cost)
        if mean < least * (1 - GAIN):
            best, least = rest, mean
    return _with_rest(fixed, module, round, best)


def _drawn(clips: Sequence[Clip], number: int) -> dict[int, Clip]:
    """The requests at outcomes drawn evenly from their windows, the same whenever they are asked for."""
    rng = random.Random(number)
    return {c.id: replace(c, attrs=c.attrs.updated(forecast=rng.choice(outcomes_of(c)))) for c in clips}


def _mean_end(fixed: _Fixed, rest: Sequence[Cascade], draws: Sequence[dict[int, Clip]], cost: CostModel) -> float:
    """ms at which everything ends, on average over outcomes: what suits one forecast alone may be far off at others."""
    second, listed = models_of(fixed.module)[1:], [*fixed.cascades, *sorted(rest, key=lambda cascade: cascade.start)]
    ends = []
    for clips in draws:
        timed = [retimed(with_forecast(cascade, clips, second), cost) for cascade in listed]
        ends.append(end_of(placed_segments(fixed.module, one_after_another(timed), cost)))
    return statistics.mean(ends)


def _fixed(module: Module, cascades: Sequence[Cascade], cost: CostModel) -> _Fixed:
    assert module.cluster is not None
    placed = {c.name: c for c in placed_segments(module, one_after_another(cascades), cost)}
    timed = tuple(
        cascade.with_attrs(start=placed[cascade.name].attrs["start"], end=placed[cascade.name].attrs["end"])
        for cascade in cascades
    )
    busy = [0.0] * module.cluster.world
    for cascade in timed:
        for rank in cascade.ranks:
            busy[rank] = max(busy[rank], cascade.end)
    return _Fixed(module, timed, tuple(busy))


def _ways(fixed: _Fixed, length: int) -> Iterator[list[Cascade]]:
    """The rest planned anew, placed, in one way after another."""
    rest = rest_of(fixed.module, fixed.cascades, length)
    costed = replace(fixed.module, level=Level.COSTED, cascades=(*fixed.cascades, *rest), programs=())
    cost = CostModel(costed)
    rates = Rates(cost, {cascade.stage for cascade in costed.cascades})
    chains = request_chains(replace(costed, cascades=tuple(rest)), rates)
    if isinstance(chains, Cascade) or not chains:
        return
    groups = _groups(fixed.module)
    for pieces in _pieces(fixed, chains):
        placed = fixed.followed(with_pieces(costed, chains, pieces, rates), cost)
        if all(_communicates_in(cascade, groups) for cascade in placed):
            yield placed


def _pieces(fixed: _Fixed, chains: Sequence[RequestChain]) -> Iterator[list[Piece]]:
    """By the moments at which ranks and requests come to the round, and as if all came at once."""
    cluster = fixed.module.cluster
    assert cluster is not None
    busy = [math.ceil((ms - fixed.since) * TICKS) for ms in fixed.busy]
    since = math.ceil(fixed.since * TICKS)
    late = [max(math.ceil(fixed.ready(one.requests) * TICKS), one.chain.release) - since for one in chains]
    plain = [Chain(request.chain.runs) for request in chains]
    coming = [Chain(one.runs, max(0, ready)) for one, ready in zip(plain, late, strict=True)]
    yield from in_order_of_length(coming, cluster.world, cluster.gpus, busy)
    bound = least_makespan(plain, cluster.world)
    yield from wrap_arounds(plain, cluster.world, cluster.gpus, bound)
    parallel = side_by_side(plain, cluster.world, cluster.gpus, bound)
    if parallel is not None:
        yield parallel


def rest_of(module: Module, fixed: Sequence[Cascade], length: int) -> list[Cascade]:
    """The chains of all requests behind the cascades that are fixed, without ranks."""
    clips = {clip.id: clip for clip in module.clips}
    own: dict[tuple[int, ...], list[Cascade]] = {}
    for cascade in module.cascades:
        own.setdefault(cascade.clips, []).append(cascade)
    names = {cascade.name for cascade in fixed}
    rest: list[Cascade] = []
    for requests, cascades in own.items():
        done = [cascade for cascade in cascades if cascade.name in names]
        segments = list(_segments_left(module, clips[requests[0]], done, length))
        if not segments and ("decoder" not in module.attrs or any(c.phase is Phase.DECODE for c in done)):
            continue
        measured = {cascade.stage: cascade.attrs.get("per_clip") for cascade in cascades}
        begun = _begun(done, requests[0]) if done else None
        for cascade in chain(module, [clips[number] for number in requests], segments, begun):
            rest.append(cascade.with_attrs(per_clip=measured.get(cascade.stage)))
    return rest


def _begun(done: Sequence[Cascade], request: int) -> Begun:
    encoded = tuple(cascade.name for cascade in done if cascade.phase is Phase.ENCODE)
    segments = chain_of(done, request)
    return Begun(encoded, tuple(c.name for c in segments[-1:]), max((number_of(c) + 1 for c in segments), default=0))


def _segments_left(module: Module, clip: Clip, done: Sequence[Cascade], length: int) -> Iterator[Segment]:
    """What no fixed segment covers, at any outcome of the request's window as it is now."""
    models, steps = models_of(module), integer(clip.attrs["steps"])
    reached = [
        max((segment_of(c)[1] + 1 for c in done if c.phase is Phase.DENOISE and c.stage == name), default=0)
        for name in models
    ]
    least, most = outcomes_of(clip)[0], outcomes_of(clip)[-1]
    yield from cut_steps(reached[0], least, steps)
    yield from cut_steps(max(reached[0], least), most, length)
    if len(models) > 1:
        begin = max(least, reached[1])
        behind = [*cut_steps(begin, most, length), *cut_steps(max(begin, most), steps, steps)]
        yield from (replace(segment, after=True) for segment in behind)


def _with_rest(fixed: _Fixed, module: Module, round: int, rest: Sequence[Cascade]) -> Module:
    """The program with placed cascades behind what is fixed, in rounds of the module's length.

    A round begins with the first cascade that is not fixed: one that fixes none would be planned for nothing. Where
    switches come late rounds get longer, so that the makespan has no more of them.
    """
    makespan = end_of([*fixed.cascades, *rest])
    length = max(quantity(module.attrs["round"]), makespan / integer(module.attrs["rounds"]))
    since = max(fixed.since, min((cascade.start for cascade in rest), default=makespan))
    placed = replace(fixed.module, cascades=(*fixed.cascades, *rest))
    cut = in_rounds(placed, rest, rounds_until(since, length, makespan), round)
    cascades = placed_round_by_round(placed, fixed.cascades, cut)
    makespan = end_of([*fixed.cascades, *cascades])
    timed = {cascade.name: cascade for cascade in fixed.cascades}
    early = (timed[cascade.name] for cascade in module.cascades if cascade.name in timed)  # messages are numbered so
    whole = replace(fixed.module, cascades=(*early, *cascades))
    cascades = with_memory(whole, cascades)
    rates = Rates(CostModel(replace(whole, level=Level.COSTED, programs=())), down=True)
    chains = request_chains(whole, rates)
    bound = 0 if isinstance(chains, Cascade) else least_makespan([c.chain for c in chains], rates.cost.cluster.world)
    attrs = module.attrs.updated(
        round=Quantity(length, "ms"),
        makespan=Quantity(makespan, "ms"),
        objective=None,
        bound=Quantity(bound / TICKS, "ms"),
        area_bound=Quantity(bound / TICKS, "ms"),
        proved=False,
    )
    return continued(replace(whole, programs=module.programs, attrs=attrs), round, cascades)


def rounds_until(since: float, length: float, makespan: float) -> float:
    """ms at which the round that begins at ``since`` ends; infinite where too little is left for another."""
    return since + length if makespan - since >= 1.5 * length else math.inf


def _in_list_order(module: Module) -> list[Cascade]:
    """All cascades in an order that every rank's list has."""
    cascades = {cascade.name: cascade for cascade in module.cascades}
    before: nx.DiGraph[str] = nx.DiGraph()
    before.add_nodes_from(cascades)
    before.add_edges_from((name, cascade.name) for cascade in module.cascades for name in cascade.inputs)
    for program in module.programs:
        before.add_edges_from(pairwise(step.target for step in program.instructions if step.op in COMPUTE))
    return [cascades[name] for name in nx.topological_sort(before)]


def _groups(module: Module) -> set[frozenset[int]]:
    """Those that ranks made at the start."""
    assert module.cluster is not None
    steps = [step for program in module.programs for step in program.instructions]
    used = (group for step in steps for group in (*cascade_groups(step), step.peers))
    return set(map(frozenset, (*family(module.cluster, heads_of(module.stages)), *used)))


def _communicates_in(cascade: Cascade, groups: set[frozenset[int]]) -> bool:
    if cascade.width == 1:
        return True
    step = Instruction(cascade.phase.value, cascade.name, cascade.ranks, cascade.attrs)
    return {*map(frozenset, cascade_groups(step)), frozenset(cascade.ranks)} <= groups
