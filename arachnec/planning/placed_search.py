"""The portfolio of a module: schedules are counted, placed and simulated, and come from views of the problem.

A scheduler counts GPUs; ``place`` then finds that a group is on two nodes and takes longer, and what waits for it
starts later. So what counts here is when the gradients of the *placed* schedule are synchronised
(``ExposedSync``), and in the end its *simulated* iteration (``simulated_ms``), in which
groups that share links slow each other down. ``solver.portfolio`` screens by the cheaper ones.

The problem is seen in up to three ways, which are transformations with a way back: as it is; with degrees of the family
of process groups (``with_family_degrees``); and of these, with those whose blocks nest, which can be placed as they
are (``solver.widths``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module
from arachnec.ir.values import Quantity
from arachnec.planning.baselines.greedy import baseline_layouts
from arachnec.planning.family_placement import PRICE, markup, priced_placement
from arachnec.planning.formulate import decided
from arachnec.planning.lower_bounds import mixed_bound
from arachnec.planning.placed_objective import ExposedSync, Following, simulated_ms
from arachnec.planning.placement import best_placements, in_cells, placements, within_memory
from arachnec.solver.annealing import neighbour
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import LISTED, Clock
from arachnec.solver.decoder import start_order
from arachnec.solver.improvers import LargeNeighbourhoods, Transformed
from arachnec.solver.list_schedule import list_schedule
from arachnec.solver.portfolio import HOPE, Improvement, Improver, Incumbent, Objective, run
from arachnec.solver.problem import TICKS, Problem, Schedule, Solution
from arachnec.solver.search import First, solution
from arachnec.solver.widths import Nested, nested


def with_family_degrees(problem: Problem, cost: CostModel) -> Nested:
    """The problem with the family's degrees. A job that the family has no degree for keeps all of its own.

    Any degree is legal, and lower bounds count them all. But a cascade of 11 ranks needs groups that no other plan has.
    So a schedule is sought among the degrees of the family first, and outside of it where that promises more than its
    groups cost (``planning.family_placement``).
    """
    kept: dict[int, tuple[int, ...]] = {}
    for job in problem.jobs:
        if id(job.choices) not in kept:
            every = range(len(job.choices))
            inside = tuple(k for k in every if job.choices[k].degree in cost.family_degrees)
            kept[id(job.choices)] = inside or tuple(every)
    rows = [kept[id(job.choices)] for job in problem.jobs]
    if all(len(row) == len(job.choices) for row, job in zip(rows, problem.jobs, strict=True)):
        return Nested.all_of(problem)
    choices = {id(job.choices): tuple(job.choices[k] for k in kept[id(job.choices)]) for job in problem.jobs}
    jobs = tuple(replace(job, choices=choices[id(job.choices)]) for job in problem.jobs)
    return Nested(replace(problem, jobs=jobs), tuple(rows))


def inside(view: Nested, schedule: Schedule) -> Schedule | None:
    """A schedule of the whole problem as one of the view's; None where it has a choice that the view has not."""
    if any(pick not in kept for pick, kept in zip(schedule.picks, view.kept, strict=True)):
        return None
    picks = tuple(kept.index(pick) for pick, kept in zip(schedule.picks, view.kept, strict=True))
    return Schedule(picks, schedule.starts)


# Of a cascade and of a GPU, to place a schedule, or to lower and simulate it: 0.13 and 0.15 s for 1024 cascades on 256
# GPUs, 0.6 and 1 s for 4096 on 1024 (benchmarks/scale.py); small ones take up to three times as long to simulate.
JUDGING_MS = 0.2


def solve_placed(
    module: Module,
    cost: CostModel,
    problem: Problem,
    clock: Clock,
    *,
    seed: int,
    following: Following,
    baselines: bool,
    without: Collection[str] = (),
    few_groups: bool = True,
) -> Solution:
    """The schedule whose iteration is shortest within the budget, by all improvers and views but ``without`` some.

    Without ``baselines`` the layouts that others train with are not among what is tried. Without ``few_groups`` no
    process group has a price.
    """
    bound = lower_bound(problem)
    measure = Measure(module, cost, problem, following, few_groups=few_groups)
    family, views = _views(with_family_degrees(problem, cost) if few_groups else Nested.all_of(problem), cost, clock)
    whole = First.listed(problem, family.back(family.first.schedule), bound, family.first.ms)
    # of devices that differ the problem, and so its bound, counts all as the fastest
    real = mixed_bound(module, cost, problem) if cost.devices.kinds else bound
    starts = [family.back(family.first.schedule), *(view.back(view.first.schedule) for view in views)]
    challenged = whole.schedule.makespan(problem) * (1 + PRICE) < starts[0].makespan(problem)
    if challenged:
        starts.insert(0, whole.schedule)
    objectives = measure.objectives(clock.left() / (len(starts) + 1))  # so that one schedule more is judged than these
    incumbent = Incumbent(problem, starts[0], real, objectives, measure.sync.least)
    # first, so that no baseline over the same micro-batches is shorter, whatever becomes of the search
    named = baseline_layouts(module, problem) if baselines and incumbent.objectives else ()
    for schedule in chain(reversed(starts), named):
        incumbent.offer(schedule, clock)
    improvers = [
        improver
        for improver in chain(
            _of_problem(whole, family, challenged, measure),
            _of_views(family, views),
        )
        if not set(improver.name.split(": ")) & set(without)
    ]
    run(improvers, incumbent, clock, random.Random(seed))
    answer = solution(incumbent, bound, whole.ms)
    return Solution(answer.schedule, bound, bound, False, whole.ms) if cost.devices.kinds else answer


@dataclass(frozen=True)
class _View:
    """The problem with fewer choices, perhaps of one that has fewer itself, and what is first known of it."""

    nested: Nested
    first: First
    of: _View | None = None

    def back(self, schedule: Schedule) -> Schedule:
        """A schedule of the view as one of the whole problem."""
        schedule = self.nested.whole(schedule)
        return schedule if self.of is None else self.of.back(schedule)

    def incumbent(self) -> Incumbent:
        return Incumbent(self.nested.problem, self.first.schedule, lower_bound(self.nested.problem))


def _views(family: Nested, cost: CostModel, clock: Clock) -> tuple[_View, list[_View]]:
    """The problem with degrees of the family of process groups, and those with blocks that nest, the shortest last."""
    bound = lower_bound(family.problem)
    nests = _nested(family.problem, cost, bound, clock)
    if nests:
        best, first = nests[-1]
        first = First.listed(family.problem, best.whole(first.schedule), bound, first.ms)
    else:
        first = First.of(family.problem, bound, clock)
    view = _View(family, first)
    return view, [_View(nest, first, view) for nest, first in nests]


def _nested(problem: Problem, cost: CostModel, bound: int, clock: Clock) -> list[tuple[Nested, First]]:
    """Degrees whose blocks nest, the shortest last; none within one node, any GPUs of which are equally near."""
    views = nested(problem, cost.cluster.gpus, bound) if cost.cluster.nodes > 1 else []
    ways = [(view, First.of(view.problem, bound, clock)) for view in views]
    return sorted(ways, key=lambda way: -way[1].schedule.makespan(way[0].problem))


def _of_problem(whole: First, family: _View, challenged: bool, measure: Measure) -> Iterator[Improver]:
    """What searches all degrees: the prover, and the rest where that promises to pay for its groups."""
    yield PlacedSearch(measure, family.nested)
    for improver in whole.improvers():
        if improver.proves or challenged:
            yield improver


def _of_views(family: _View, views: list[_View]) -> Iterator[Improver]:
    """What searches degrees of the family, and packs those whose blocks nest."""
    incumbent = family.incumbent()
    for improver in family.first.improvers():
        # blocks that nest are packed in their own view
        if not improver.proves and not (views and improver.name == LargeNeighbourhoods.name):
            yield Transformed("family", improver, incumbent, family.back)
    for view in views:
        incumbent = view.incumbent()
        for improver in view.first.improvers():
            if improver.name == LargeNeighbourhoods.name:
                yield Transformed("nested widths", improver, incumbent, view.back)


@dataclass
class PlacedSearch:
    """A local search over degrees and order with the dearest objective as its measure.

    From a schedule of the family's degrees it takes degrees of the family.
    """

    measure: Measure
    family: Nested
    name: str = "placed search"
    hope: float = HOPE
    proves: bool = False
    last: Schedule | None = None
    order: tuple[int, ...] = ()

    def slice(self, incumbent: Incumbent) -> float | None:
        """One neighbour, confirmed."""
        return incumbent.confirming if incumbent.objectives else None

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        if incumbent.schedule is not self.last:
            self.last, self.order = incumbent.schedule, tuple(start_order(incumbent.schedule))
        while clock.any_left() and not incumbent.closed:
            within = inside(self.family, self.last)
            problem = incumbent.problem if within is None else self.family.problem
            picks, wished = neighbour(problem, (within or self.last).picks, list(self.order), rng)
            tried = list_schedule(problem, picks, wished)
            if within is not None:
                tried = self.family.whole(tried)
            clock.count(LISTED * len(problem.jobs))
            if incumbent.offer(tried, clock):
                self.last, self.order = tried, tuple(wished)
        return Improvement()


class Measure:
    """Of placed schedules: ms until gradients are synchronised; infinite where memory does not hold one.

    Groups outside the family have a price (``planning.family_placement``).
    """

    def __init__(
        self,
        module: Module,
        cost: CostModel,
        problem: Problem,
        following: Following = Following(),  # noqa: B008
        *,
        few_groups: bool = True,
    ) -> None:
        self.module, self.cost, self.problem, self.following = module, cost, problem, following
        self.few_groups = few_groups
        self.sync = ExposedSync(module, cost, following)
        self.chosen: dict[tuple[int, int], Cascade] = {}
        self.latest: tuple[Schedule, list[Cascade] | None] | None = None

    def objectives(self, budget: float = math.inf) -> list[Objective]:
        """First placed, then simulated; those that together take no more than so many ms for one schedule."""
        ms = JUDGING_MS * (len(self.problem.jobs) + self.problem.gpus)
        objectives = [Objective("placed", self.of, ms), Objective("simulated", self.simulated, ms)]
        spent = accumulate(objective.ms for objective in objectives)
        return [objective for objective, ms in zip(objectives, spent, strict=True) if ms <= budget]

    def of(self, schedule: Schedule) -> float:
        placed = self._placed(schedule)
        return math.inf if placed is None else self.sync.of(placed) * self._markup(placed)

    def simulated(self, schedule: Schedule) -> float:
        """What cascades share is counted, too."""
        placed = self._placed(schedule)
        if placed is None:
            return math.inf
        return simulated_ms(self.module, self.cost.cluster, placed, self.following) * self._markup(placed)

    def _markup(self, placed: list[Cascade]) -> float:
        return markup(placed, self.cost) if self.few_groups else 1.0

    def _placed(self, schedule: Schedule) -> list[Cascade] | None:
        if self.latest is None or self.latest[0] is not schedule:
            try:
                self.latest = schedule, self._on_ranks(self._cascades(schedule))
            except UserError:
                self.latest = schedule, None
        return self.latest[1]

    def _on_ranks(self, cascades: list[Cascade]) -> list[Cascade]:
        """As ``place`` does it."""
        if in_cells(self.cost):
            return best_placements(cascades, self.cost)
        if self.following.topology:
            return (priced_placement if self.few_groups else best_placements)(cascades, self.cost)
        return within_memory(cascades, placements(cascades, self.cost, topology=False), self.cost)

    def _cascades(self, schedule: Schedule) -> list[Cascade]:
        return [self._cascade(job, *at) for job, at in enumerate(zip(schedule.picks, schedule.starts, strict=True))]

    def _cascade(self, job: int, pick: int, start: int) -> Cascade:
        choice = self.problem.jobs[job].choices[pick]
        begin, end = start / TICKS, (start + choice.ticks) / TICKS
        if (job, pick) not in self.chosen:
            cascade = self.module.cascades[job]
            self.chosen[job, pick] = decided(cascade, self.cost, choice.degree, choice.recompute, begin, end)
        return self.chosen[job, pick].with_attrs(start=Quantity(begin, "ms"), end=Quantity(end, "ms"))
