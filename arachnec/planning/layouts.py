"""How a model's state may lie on the ranks: the table of layouts that the default chooses from.

A layout is decided once for a run. What follows it (degrees, order, ranks) is planned for every iteration. Another
layout is another row here, and what it does to the stages a line in ``arachnec.passes.choose_layout``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arachnec.cluster.device_kinds import Devices
from arachnec.cost.strategy import FINE, wide_steps
from arachnec.ir.diagnostic import UserError
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cluster, Module, Stage
from arachnec.ir.parameter_cells import cell_fits, cell_of
from arachnec.ir.stage_sizes import layers_of
from arachnec.ir.state_placement import place
from arachnec.ir.tables import FIGURES
from arachnec.planning.pipeline_orders import ScheduleName

REPLICATED = "replicated"
ONE_LENGTH: tuple[ScheduleName, ...] = ("1f1b", "zb-h1")
MIXED_LENGTHS: tuple[ScheduleName, ...] = ("1f1b", "planned")


@dataclass(frozen=True)
class Layout:
    """Parameters on every rank, or in cells of ``cell`` ranks, or in so many ``stages`` that run by ``schedule``, or in
    cells of the ranks of each stage.

    ``spread``: a shard's optimizer lies in parts on all ranks that hold the shard, whether it crowds the device or not.
    ``full``: a cell takes as many clips at once as fit with every block recomputed, and so gathers less often.
    """

    name: str = REPLICATED
    cell: int = 1
    spread: bool = False
    full: bool = False
    stages: int = 1
    schedule: ScheduleName | None = None


def layouts(module: Module) -> Iterator[Layout]:
    """Every layout of a traced module on its cluster, the plainest first."""
    yield Layout()
    if module.cluster is None:
        return
    for size in cell_sizes(module.cluster):
        for spread in (False, True) if size < module.cluster.world else (False,):
            name = f"cells-{size}{'-spread' if spread else ''}"
            yield Layout(name, cell=size, spread=spread)
            yield Layout(f"{name}-full", cell=size, spread=spread, full=True)
    schedules = ONE_LENGTH if len({(clip.tokens, clip.text) for clip in module.clips}) < 2 else MIXED_LENGTHS
    for count in stage_counts(module, module.cluster):
        for schedule in schedules:
            yield Layout(f"stages-{count}-{schedule}", stages=count, schedule=schedule)
            if (size := largest_cell(module.cluster, module.cluster.world // count)) > 1:
                yield Layout(f"stages-{count}-cells-{size}-{schedule}", cell=size, stages=count, schedule=schedule)


def cell_sizes(cluster: Cluster) -> Iterator[int]:
    """The sizes of cells that are worth a comparison: parts of a machine, machines by doubling, and all ranks."""
    doubled = cluster.gpus
    for size in range(2, cluster.world + 1):
        if not cell_fits(size, cluster.nodes, cluster.gpus):
            continue
        while doubled < size:
            doubled *= 2
        if size <= cluster.gpus or size in (doubled, cluster.world):
            yield size


def largest_cell(cluster: Cluster, ranks: int) -> int:
    """The largest cell of a stage's ranks inside a machine: stages are there so that no gather leaves one."""
    fitting = (size for size in range(1, min(ranks, cluster.gpus) + 1) if ranks % size == 0)
    return max(size for size in fitting if cell_fits(size, cluster.nodes, cluster.gpus))


def stage_counts(module: Module, cluster: Cluster) -> Iterator[int]:
    """Numbers of stages that divide the ranks, at most one for each block; none where the model cannot be cut."""
    trained = [stage for stage in module.stages if stage.trained]
    if len(trained) != 1 or any(name not in trained[0].attrs for name in FIGURES):
        return
    for count in range(2, min(cluster.world, len(layers_of(trained[0]))) + 1):
        if cluster.world % count == 0:
            yield count


def in_cells(stage: Stage, cell: int) -> Stage:
    """A trained stage with its state dealt out over cells of so many ranks; any other as it is."""
    if not stage.trained or "cell" in stage.attrs or "sharded" in stage.attrs:
        return stage
    return place(stage, cell=cell)


SEARCH_STEPS = 100  # of the scheduler, for each layout that is planned
DEFAULT_STEPS = 5000  # for all layouts: about 5 s
MS_JUDGED = 3.2  # of a cascade and of a rank, to schedule, place and simulate a layout's cascades
MS_PIPELINED = 1.0  # of a cascade of stages, for each degree
MS_ORDERED = 2.5  # of one where the order is searched for
MS_BOUNDED = 50  # of a layout
MS_COSTED = 0.3  # of a shape of clips at a degree, of few ranks
STAGES_AT_FIRST = 1.2  # plans of stages over their bounds, before any was made; of other layouts 1
TINY = 1e-9  # ms
FAR = 1.25  # of the shortest so far: what would take so long, were it planned as its kind, is not planned
WORTH = 0.01  # of the iteration, that a layout must save over a plainer one
BEHIND_ANCHORS = 0.0005  # of the iteration, that a plainer layout may be behind one that others train in


@dataclass(frozen=True)
class Choice:
    """``times`` are ms of those that were simulated, ``bounds`` of those that were not."""

    layout: Layout
    module: Module
    times: dict[str, float]
    bounds: dict[str, float]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A layout that may be taken, and the module in it.

    ``least_ms`` of its iterations at least, infinite where a clip fits nowhere; ``costed`` are the modules of its
    sample; ``steps`` is what planning them takes, in ms or about that. ``anchor``: others train in it, too.
    """

    layout: Layout
    module: Module
    least_ms: float
    costed: tuple[Module, ...] = ()
    steps: int = 0
    anchor: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """Bounds of one kind are about equally far from what is planned."""
        return self.layout.stages > 1, self.layout.cell > 1


def shortest(
    candidates: Sequence[Candidate],
    planned: Callable[[Candidate], float],
    steps: int = DEFAULT_STEPS,
    reporter: Reporter = unreported,
) -> Choice | None:
    """The layout that is ``planned`` shortest within so many steps, of about the same length the plainest, which stand
    first; None where none fits.

    The most promising is planned first: the one with the least bound, as much longer as the plans of its kind so far.
    One that takes as long at least as the shortest so far is not planned. Anchors come next, whatever steps are left,
    and where none fits others do. ``planned`` raises UserError for a layout that does not fit.
    """
    times: dict[str, float] = {}
    fitting = [one for one in candidates if math.isfinite(one.least_ms)]
    refused = {one.layout.name for one in candidates if math.isinf(one.least_ms)}
    costs = {one.layout.name: _costs(one) for one in fitting}
    ratios: dict[tuple[bool, bool], float] = {}
    waiting, planned_so_far = fitting, 0
    while waiting and (one := _next(waiting, times, ratios, steps)) is not None:
        name, planned_so_far = one.layout.name, planned_so_far + 1
        reporter(f"planning layout {planned_so_far} of {planned_so_far - 1 + len(waiting)}")
        steps -= one.steps
        try:
            ms = planned(one)
        except UserError:
            refused.add(name)
        else:
            times |= {other.layout.name: ms for other in fitting if costs[other.layout.name] == costs[name]}
            ratios[one.kind] = min(ratios.get(one.kind, math.inf), ms / max(one.least_ms, TINY))
        waiting = [other for other in fitting if other.layout.name not in {*times, *refused}]
        waiting = [other for other in waiting if not times or _may_win(other, candidates, times)]
    if not times:
        return None
    taken = _best(candidates, times)
    others = {one.layout.name: one.least_ms for one in fitting if one.layout.name not in {*times, *refused}}
    in_order = tuple(one.layout.name for one in candidates if one.layout.name in refused)
    return Choice(taken.layout, taken.module, times, others, in_order)


def _next(
    waiting: Sequence[Candidate],
    times: Mapping[str, float],
    ratios: Mapping[tuple[bool, bool], float],
    steps: int,
) -> Candidate | None:
    """The one to be planned next; None where none is worth the ``steps`` that are left."""

    def promised(one: Candidate) -> float:
        return one.least_ms * ratios.get(one.kind, STAGES_AT_FIRST if one.layout.stages > 1 else 1.0)

    if times and (others := [one for one in waiting if one.anchor]):
        return min(others, key=promised)
    affordable = [one for one in waiting if one.anchor or one.steps <= steps]
    if not times:
        return min(affordable, key=promised) if affordable else min(waiting, key=lambda one: one.steps)
    near = FAR * min(times.values())
    return min((one for one in affordable if promised(one) <= near), key=promised, default=None)


def _best(candidates: Sequence[Candidate], times: Mapping[str, float]) -> Candidate:
    """The plainest of those that take about as long as the shortest, and hardly longer than any anchor."""
    most = min(times.values()) * (1 + WORTH)
    anchored = [times[one.layout.name] for one in candidates if one.anchor and one.layout.name in times]
    most = min([most, *(time * (1 + BEHIND_ANCHORS) for time in anchored)])
    most = max(most, min(times.values()))
    return next(one for one in candidates if times.get(one.layout.name, math.inf) <= most)


def _may_win(one: Candidate, candidates: Sequence[Candidate], times: Mapping[str, float]) -> bool:
    """Whether it may be taken instead, or forbid the best so far: by its bound."""
    best = _best(candidates, times)
    time = times[best.layout.name]
    if one.anchor:
        return one.least_ms * (1 + BEHIND_ANCHORS) < time
    plainer = candidates.index(one) < candidates.index(best)
    return one.least_ms < (min(times.values()) * (1 + WORTH) if plainer else time * (1 - WORTH))


def anchors(cluster: Cluster) -> tuple[Layout, ...]:
    """The layouts of the named pipelines that everybody has: `ulysses`, `fsdp-hybrid` and `fsdp`."""
    sizes = {size for size in (cluster.gpus, cluster.world) if size > 1}
    return Layout(), *(Layout(f"cells-{size}", cell=size) for size in sorted(sizes))


def planning_steps(costed: Module) -> int:
    """What planning a costed module takes, in ms of processor time or about that."""
    assert costed.cluster is not None
    if "schedule" not in costed.attrs:
        judged = len(costed.cascades) + costed.cluster.world
        return round(SEARCH_STEPS + MS_JUDGED * judged * _kinds(costed.cluster))
    parts = sum("part_of" in stage.attrs for stage in costed.stages)
    run = costed.cluster.world // parts
    cell = max(cell_of(stage) or 1 for stage in costed.stages)
    degrees = sum(run % degree == 0 for degree in range(cell, run + 1, cell))
    ms = MS_ORDERED if costed.attrs["schedule"] == "planned" else MS_PIPELINED
    return round(ms * len(costed.cascades) * (1 + degrees) * _kinds(costed.cluster))


def bounding_steps(module: Module, layout: Layout) -> int:
    """What the bound of a layout takes, in ms of processor time or about that."""
    assert module.cluster is not None
    shapes = len({(clip.frames, clip.height, clip.width, clip.text) for clip in module.clips})
    largest = module.cluster.world // layout.stages
    degrees = len(wide_steps(max(1, largest // layout.cell), module.cluster.gpus))
    return round(MS_BOUNDED + MS_COSTED * shapes * degrees * (1 + largest / FINE) * _kinds(module.cluster))


def _kinds(cluster: Cluster) -> int:
    """Kinds of devices, each of which is priced."""
    return max(1, len(Devices(cluster).kinds))


def _costs(one: Candidate) -> object:
    """What candidates have in common whose sample is costed alike, and so planned alike."""
    if not one.costed:
        return one.layout.name
    return tuple((costed.stages, costed.cascades, costed.attrs.get("schedule")) for costed in one.costed)
