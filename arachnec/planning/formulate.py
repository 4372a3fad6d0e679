"""From a costed module to the scheduling problem it poses, and from a schedule back to a module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from arachnec.cost.memory import RESERVE
from arachnec.cost.model import CostModel
from arachnec.cost.table import Entry
from arachnec.ir.diagnostic import Mistake, UserError, counted, user_error
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Reduce, Step, integers
from arachnec.ir.stage_sizes import recompute_value, times_of
from arachnec.ir.values import Attributes, Quantity
from arachnec.planning.handoff_memory import in_turn
from arachnec.planning.validate import validate_schedule
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import TICKS, Choice, Job, Problem, Schedule, Solution, violations


@dataclass(frozen=True)
class LacksMemory(Mistake):
    """What host memory would help, too: ``joint`` stands between the help and that remedy."""

    joint: str = ", or "


def bad_schedule_error(problem: str) -> UserError:
    return user_error(
        f"the schedule is wrong: {problem}",
        help="arachnec.planning.validate.validate_schedule lists everything that is wrong with it",
    )


def problem_of(module: Module, cost: CostModel) -> Problem:
    """The problem of a costed module.

    Raises UserError naming the clip where a cascade fits the memory at no degree.
    """
    if cost.room <= 0:
        taken = f"{cost.resident:.1f} of the device's {cost.cluster.memory:.1f} GiB on every rank"
        remedy = "use devices with more memory, or train fewer parameters"
        title = f"parameters and optimizer state take {taken}"
        raise UserError(LacksMemory(None, title, help=f"{RESERVE:.0%} stay free for buffers; {remedy}"))
    index = {cascade.name: position for position, cascade in enumerate(module.cascades)}
    choices: dict[tuple[object, ...], tuple[Choice, ...]] = {}  # shared, so that equal jobs are known by identity
    co_resident = co_resident_outputs(module, cost)
    jobs = []
    for cascade in module.cascades:
        if "shards" in cascade.attrs:  # of a plan; others are possible
            cascade = cascade.with_attrs(shards=None)
        held = co_resident.get(cascade.name, 0.0)
        key = (*cost.table.shape(cascade), held)
        if key not in choices:
            choices[key] = choices_of(cascade, cost, held)
        jobs.append(Job(choices[key], tuple(index[name] for name in cascade.inputs if name in index)))
    return Problem(tuple(jobs), cost.cluster.world)


def co_resident_outputs(module: Module, cost: CostModel) -> dict[str, float]:
    """For every encoder the GiB of what others made of its clips before it, where one rank encodes all in turn."""
    named = {cascade.name: cascade for cascade in module.cascades}
    held: dict[str, float] = {}
    for cascade in module.cascades:
        encoders = [named[name] for name in cascade.inputs if name in named and named[name].phase is Phase.ENCODE]
        outputs = 0.0
        for encoder in in_turn(encoders, cost) if len(encoders) > 1 else ():
            held[encoder.name] = max(held.get(encoder.name, 0.0), outputs)
            outputs += cost.output(encoder)
    return held


def choices_of(cascade: Cascade, cost: CostModel, held: float = 0.0) -> tuple[Choice, ...]:
    """The degrees worth considering: they fit the memory, and each is faster than every smaller one.

    Where it fits only with recomputation it recomputes as few blocks as that takes. ``held`` GiB of other encoders'
    outputs are co-resident. They may take what cascades leave free of a device. Raises UserError where there is no
    degree at all.
    """
    legal = cost.legal_degrees(cascade)
    if not legal:
        degrees = sorted(times_of(cascade)) or [0]
        listed = ", ".join(str(degree) for degree in degrees)
        gpus = counted(cost.cluster.world, "GPU")
        raise user_error(
            f"{describe(cascade)} has no legal degree on {gpus}",
            label=f"legal are {listed}",
            help=f"use a cluster of at least {counted(degrees[0], 'GPU')}, or measure it at a smaller degree",
            span=cascade.span,
        )
    spare = cost.spare(cost.cluster.memory) - held
    options = cost.table.options(cascade) if spare >= 0 else _options_next_to(cascade, cost, legal, spare)
    choices: list[Choice] = []
    for degree, entry in options.items():
        ticks = max(1, math.ceil(entry.time * TICKS - 1e-6))
        if not choices or ticks < choices[-1].ticks:
            choices.append(Choice(degree, ticks, entry.recompute))
    if not choices and cost.table.options(cascade):
        smallest = min(cost.memory(cascade, degree) for degree in legal)
        room = cost.largest_memory - cost.resident - cost.communicators
        raise user_error(
            f"{describe(cascade)} needs {smallest:.3f} GiB per GPU beside {held:.3f} GiB that other encoders made of "
            f"the same clips, there are {room:.3f}",
            label="does not fit beside the outputs of the others",
            help="use devices with more memory, or lower `tokens` of `partition` so that fewer clips share one",
            span=cascade.span,
        )
    if not choices and not any(cost.table.ways(cascade, degree) for degree in legal):
        raise _not_divided(cascade, cost, legal[0])
    if not choices:
        raise UserError(_fits_no_degree(cascade, cost, legal))
    return tuple(choices)


def _options_next_to(cascade: Cascade, cost: CostModel, legal: Sequence[int], spare: float) -> dict[int, Entry]:
    """An encoder's rows by degree where it must leave ``-spare`` GiB of what cascades may use."""
    return {
        degree: cost.table.entry(cascade, degree)
        for degree in legal
        if cost.memory(cascade, degree) <= cost.room_on(None, degree) + spare
    }


def _not_divided(cascade: Cascade, cost: CostModel, cell: int) -> UserError:
    """Why its clips cannot be spread over a cell: their tokens are too few, or the stage lists smaller degrees."""
    listed = cost.stages[cascade.stage].attrs.get("degrees")
    reason, instead = "it has fewer tokens", "the clip"
    if cascade.tokens >= cell and listed is not None:
        degrees = ", ".join(map(str, integers(listed)))
        reason, instead = f"a clip of this stage runs at degrees {degrees} alone", "`shard-parameters`"
    return user_error(
        f"{describe(cascade)} cannot be divided over the {cell} ranks of a cell",
        label="not for a cell",
        help=f"{reason}: give `shard-parameters` a smaller `cell`, let more such clips share a micro-batch, or leave "
        f"{instead} out",
        span=cascade.span,
    )


def _fits_no_degree(cascade: Cascade, cost: CostModel, legal: Sequence[int]) -> LacksMemory:
    recompute = cost.blocks(cascade) if cost.can_recompute(cascade) else 0
    degree = min(legal, key=lambda d: cost.memory(cascade, d, recompute))
    needed = cost.memory(cascade, degree, recompute) + cost.state
    remedy = "train it at fewer frames or a lower resolution, or use more GPUs or devices with more memory"
    if cascade.batch > 1:
        remedy = "lower `tokens` of `partition` so that fewer clips share a micro-batch"
    there = f"it needs {needed:.1f} GiB per GPU at degree {degree}, there are {cost.largest_memory:.1f}"
    title = f"{describe(cascade)} fits no degree: {there}"
    return LacksMemory(cascade.span, title, label="too large for this cluster", help=remedy, joint="; or ")


def describe(cascade: Cascade) -> str:
    """A cascade in words: its clips, its size and its stage."""
    if not cascade.clips:
        return f"cascade `%{cascade.name}` of stage `@{cascade.stage}`"
    clips = ", ".join(str(clip) for clip in cascade.clips[:4]) + (", ..." if len(cascade.clips) > 4 else "")
    noun = "clip" if len(cascade.clips) == 1 else "the micro-batch of clips"
    return f"{noun} {clips} ({cascade.tokens} tokens, stage `@{cascade.stage}`)"


def scheduled(module: Module, cost: CostModel, problem: Problem, solution: Solution) -> Module:
    """The module at level scheduled.

    Raises AssertionError where the schedule is not valid: a heuristic may be wrong, but never unnoticed.
    """
    schedule = solution.schedule
    problems = violations(problem, schedule)
    assert not problems, problems
    picked = [job.choices[pick] for job, pick in zip(problem.jobs, schedule.picks, strict=True)]
    cascades = tuple(
        decided(cascade, cost, choice.degree, choice.recompute, start / TICKS, (start + choice.ticks) / TICKS)
        for cascade, choice, start in zip(module.cascades, picked, schedule.starts, strict=True)
    )
    return _at_level_scheduled(module, cascades, solution, schedule.makespan(problem) / TICKS)


def with_schedule(module: Module, cost: CostModel, problem: Problem, schedule: Schedule) -> Module:
    """The module at level scheduled, of a schedule that was not searched for: the bound is the problem's own."""
    bound = lower_bound(problem)
    return scheduled(module, cost, problem, Solution(schedule, bound, bound, schedule.makespan(problem) <= bound))


def with_times(module: Module, degrees: Mapping[str, int], times: Mapping[str, tuple[float, float]]) -> Module:
    """The module at level scheduled, from the degree and the start and end in ms of every cascade by name.

    For schedulers of one's own: recomputation is switched on where the memory asks for it, the bound is added, and the
    result is checked. Raises UserError naming the first thing that is wrong.
    """
    cost = CostModel(module)
    problem = problem_of(module, cost)
    missing = [cascade.name for cascade in module.cascades if cascade.name not in degrees or cascade.name not in times]
    if missing:
        raise bad_schedule_error(f"%{missing[0]} was given no degree and times")
    cascades = tuple(
        decided(cascade, cost, degree, cost.recompute_at(cascade, degree) or 0, *times[cascade.name])
        for cascade in module.cascades
        for degree in [degrees[cascade.name]]
    )
    makespan = max((end for _, end in times.values()), default=0.0)
    # the problem rounds each time up by less than a tick, which these times need not do
    bound = max(0, lower_bound(problem) - len(problem.jobs))
    proved = makespan * TICKS <= bound
    solution = Solution(Schedule((), ()), bound, bound, proved)
    planned = _at_level_scheduled(module, cascades, solution, makespan)
    problems = validate_schedule(planned)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise bad_schedule_error(problems[0] + more)
    return planned


def decided(
    cascade: Cascade, cost: CostModel, degree: int, recompute: int, start: float, end: float, side: int | None = None
) -> Cascade:
    """A cascade with its degree, the number of blocks it recomputes, and its times in ms.

    ``degree`` ranks are its own, for one clip or several ``side`` by side; without it as many as are fastest.
    """
    side = side or cost.side_at(cascade, degree)
    return cascade.with_attrs(
        degree=degree // side,
        side=side if side > 1 else None,
        start=Quantity(start, "ms"),
        end=Quantity(end, "ms"),
        recompute=recompute_value(recompute, cost.stages[cascade.stage]),
        memory=Quantity(round(cost.memory(cascade, degree, recompute, side), 6), "GiB"),
    )


def _at_level_scheduled(module: Module, cascades: tuple[Cascade, ...], solution: Solution, makespan: float) -> Module:
    trained = [stage.name for stage in module.stages if stage.trained]
    return replace(
        module,
        level=Level.SCHEDULED,
        cascades=cascades,
        reductions=tuple(
            Reduce(name, tuple(c.name for c in cascades if c.stage == name and has_gradient(c)), Attributes())
            for name in trained
        ),
        steps=tuple(Step(name) for name in trained),
        attrs=module.attrs.updated(
            makespan=Quantity(makespan, "ms"),
            bound=Quantity(solution.bound / TICKS, "ms"),
            area_bound=Quantity(solution.area_bound / TICKS, "ms"),
            proved=solution.proved,
        ),
    )


def has_gradient(cascade: Cascade) -> bool:
    return cascade.phase in (Phase.TRAIN, Phase.BACKWARD, Phase.WEIGHT)
