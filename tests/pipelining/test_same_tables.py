"""What searches of pipelines compute on their way is the same from version to version, on drawn small instances.

Steps are few and slack is wide here, so that it shows in every answer when either is counted differently.
``pytest tests/pipelining --update-golden`` writes them anew: read what became longer or took more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import z3

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining import hybrid_search, partition_balance, pipeline_search
from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.csv_format import to_csv
from arachnec.pipelining.evaluate import StageTimes, evaluate
from arachnec.pipelining.grouping import choose_k, groupings, overfull
from arachnec.pipelining.held import held, held_micro_batches
from arachnec.pipelining.hybrid_plan import Instance, Machines, Stage
from arachnec.pipelining.hybrid_search import _Copies, _Partial
from arachnec.pipelining.interleaved import interleaved_1f1b
from arachnec.pipelining.list_schedule import list_schedule
from arachnec.pipelining.one_f_one_b import dapple, dapple_in_turns, gpipe, kfkb, warm_up
from arachnec.pipelining.order_bound import _Chains, _memory, _shares
from arachnec.pipelining.order_search import anneal
from arachnec.pipelining.order_windows import _held_at, _Model, _whole, _window
from arachnec.pipelining.partition_balance import balanced_sizes
from arachnec.pipelining.pipeline_model import LayerCosts, PipelineInstance
from arachnec.pipelining.pipeline_search import Candidate, _seeds, find_plan
from arachnec.pipelining.profile_file import Layer, LayerProfile
from arachnec.pipelining.zb_v import zb_v
from arachnec.pipelining.zero_bubble import zb_h1, zb_h2
from tests.pipelining.test_same_answers import order_problem
from tests.pipelining.written_down import Kind, Row, digest, require_as_written

EXPECTED = Path(__file__).parent / "same_tables.json"


def entries(rng: random.Random) -> Row:
    """The order of entry that few moves come to."""
    problem = order_problem(rng, most=9)
    return [anneal(problem, split, rng.choice((3, 40)), rng.randint(0, 9)) for split in (False, True)]


def chains(rng: random.Random) -> Row:
    """Heads, tails, what is held how long, and the measures of memory."""
    problem = order_problem(rng, most=4)
    row: Row = []
    for split in (False, True):
        tables = _Chains(problem, split)
        spans = [[tables.held(s, m) for m in range(problem.micro_batches)] for s in range(problem.stages)]
        row += [digest([tables.heads, tables.tails, tables.returned, spans])]
        row += [sum(map(sum, spans)), max(map(tables.whole, range(problem.micro_batches)))]
        row += [round(_memory(problem, tables, rank), 6) for rank in range(len(problem.hosted))]
        row += [digest([tables.actions(hosted) for hosted in problem.hosted])]
    sizes = [float(size) for size in problem.saved[0]]
    limit = sum(sizes)
    shares = list(_shares(limit, [(size, 1.0) for size in sizes]))
    return [*row, sum(share(size) for share in shares for size in (*sizes, 1.0, limit))]


def windows(rng: random.Random) -> Row:
    """Whole numbers, heads, tails and conditions of a window; half of the times are no whole numbers."""
    problem = order_problem(rng, most=3)
    if rng.random() < 0.5:
        times = problem.times

        def scaled(table: object) -> list[list[float]]:
            return [[time / 7 for time in line] for line in table]  # type: ignore[attr-defined]

        halves = scaled(times.forward), scaled(times.activation_gradient), scaled(times.weight_gradient)
        sends = scaled(times.send_forward), scaled(times.send_backward)
        whole = None if times.backward is None else scaled(times.backward)
        problem = type(problem)(StageTimes(*halves, whole, *sends), problem.saved, problem.limits, problem.placement)
    schedule = list_schedule(problem, range(problem.micro_batches)[::-1], rng.random() < 0.5)[1]
    ticks = _whole(problem, evaluate(schedule, problem.times).makespan)
    evaluation = evaluate(schedule, ticks.times)
    actions = sum(map(len, schedule.orders))
    size = rng.choice((4, 8, actions))
    window = _window(schedule, evaluation, rng.randint(0, actions - size) if size < actions else 0, size)
    solver = z3.Solver()
    model = _Model(ticks, schedule, evaluation, window, solver)
    asked = [assertion.sexpr() for assertion in solver.assertions()]
    left = [_held_at(order, ticks) for order in schedule.orders]
    around = sum(model.heads.values()), sum(model.tails.values()), model.horizon
    return [
        digest(ticks.times.send_forward),
        left,
        [[own.start, own.stop] for own in window],
        *around,
        len(asked),
        digest(asked),
    ]


def groups(rng: random.Random) -> Row:
    """The makespan of every k that fits, which k is taken, and what it holds."""
    stages, count = rng.randint(1, 4), rng.choice((1, 2, 4, 6, 6, 8, 9, 12))

    def table(rows: int, least: int = 1) -> list[list[int]]:
        return [[rng.randint(least, 9) for _ in range(count)] for _ in range(rows)]

    saved, send = table(stages), rng.choice((0, 1, 20, 60))
    sends = [[send] * count] * (stages - 1)
    times = StageTimes(table(stages), table(stages), table(stages), None, sends, sends)
    limits = [rng.choice((count, 2 * count, 9 * count)) for _ in range(stages)]
    row: Row = [[overfull(k, saved, limits) for k in groupings(count)]]
    for candidates in (None, groupings(count)):
        for now in (None, rng.randint(1, count)):
            try:
                chosen = choose_k(times, saved, limits, now=now, candidates=candidates)
            except UserError as refused:
                row += [str(refused.diagnostics[0])]
            else:
                row += [chosen.k, chosen.modest, chosen.makespans]
    return row


def schedules(rng: random.Random) -> Row:
    """Every kind of schedule for a few ranks: its orders, what is held, and when all begins and ends."""
    ranks, count = rng.randint(1, 4), rng.randint(1, 9)
    drawn: list[PipelineSchedule] = [gpipe(ranks, count), kfkb(ranks, count, rng.randint(1, count))]
    drawn += [zb_h1(ranks, count), zb_h2(ranks, count), zb_v(ranks, count)]
    most = [rng.randint(1, 5) for _ in range(ranks)]
    drawn += [dapple(ranks, count, policy, limit) for policy in ("A", "B") for limit in (None, 2, most)]
    if count % max(1, count // ranks) == 0:
        drawn += [interleaved_1f1b(ranks, count, rng.randint(1, 3))]
    row: Row = []
    for schedule in drawn:
        stages = schedule.stages

        def table(rows: int) -> list[list[int]]:
            return [[rng.randint(0, 9) for _ in range(count)] for _ in range(rows)]

        times = StageTimes(table(stages), table(stages), table(stages), None, table(stages - 1), table(stages - 1))
        ended = evaluate(schedule, times)
        kept = held(schedule, table(stages), table(stages) if rng.random() < 0.5 else None)
        told = str(schedule), ended.start, ended.end, kept, held_micro_batches(schedule), to_csv(schedule)
        row += [ended.makespan, digest(told)]
    replicas = [rng.randint(1, 3) for _ in range(ranks)]
    turns = [dapple_in_turns(replicas, count, policy, most) for policy in ("A", "B")]
    return [*row, [warm_up(replicas, policy, None) for policy in ("A", "B")], digest(turns)]


# -- partition, placement and schedule ---------------------------------------------------------------------------------


def pipeline_instance(rng: random.Random, least: int, most: int, grain: int = 1) -> PipelineInstance:
    """Times between ``least`` and ``most`` grains."""
    ranks = rng.randint(1, 4)

    def costs() -> LayerCosts:
        times = [rng.randint(least, most) / grain for _ in range(3)]
        return LayerCosts(*times, *(rng.randint(1, 9) for _ in range(3)))

    layers = tuple(costs() for _ in range(rng.randint(2 * ranks, 10)))
    speeds = tuple(rng.choice((1.0, 2.0)) for _ in range(ranks))
    memory = tuple(rng.randint(30, 120) for _ in range(ranks))
    bandwidth, latency = rng.choice(((math.inf, 0.0), (1.0, 0.5), (0.2, 3.0)))
    return PipelineInstance(layers, rng.randint(2, 4), speeds, memory, bandwidth, latency)


def sizes(rng: random.Random) -> Row:
    """Layers of every stage, of which few cuts were tried."""
    instance = pipeline_instance(rng, 1, 60)
    seeds = [placement for candidate in _seeds(instance, True, 0) for placement in [candidate.placement]]
    placement = rng.choice(seeds)
    return [placement, [balanced_sizes(instance, placement, seed) for seed in range(5)]]


def seeds(rng: random.Random) -> Row:
    """The plans that the search begins from, of as many layers as one to four stages a rank need, or one more."""
    instance = pipeline_instance(rng, 1, 60)
    count = instance.ranks * rng.randint(1, 4) + rng.randint(0, 1)
    instance = replace(instance, layers=(instance.layers * 8)[:count])
    return [instance.ranks, count, [[seed.sizes, seed.placement] for seed in _seeds(instance, True, 0)]]


def repairs(rng: random.Random) -> Row:
    """Nearly equal layers, so that moves cost little."""
    instance = pipeline_instance(rng, 1000, 1004, 100)
    try:
        repaired = find_plan(instance, split=rng.random() < 0.7, tries=20, seed=rng.randint(0, 9))
    except UserError as refused:
        return [type(refused.diagnostics[0]).__name__]
    shown = repaired.performance
    return [
        repaired.plan.sizes,
        repaired.plan.placement,
        digest(str(repaired.plan.schedule)),
        repaired.repaired,
        shown.makespan,
    ]


def moves(rng: random.Random) -> Row:
    """What is changed first of drawn plans, for every bottleneck."""
    instance = pipeline_instance(rng, 1, 9)
    candidate = rng.choice(list(_seeds(instance, rng.random() < 0.5, 0)))
    decoded = pipeline_search._decoded(instance, candidate)
    if decoded is None:
        return [type(candidate).__name__]
    costs = decoded[1].performance
    told: list[Candidate] = [pipeline_search._move(instance, candidate, costs, rng) for _ in range(40)]
    return [costs.bottleneck, len(set(told)), digest([[one.sizes, one.placement, one.share] for one in told])]


# -- hybrid plans ------------------------------------------------------------------------------------------------------


def hybrid_instance(rng: random.Random, fewest: int = 1, most_layers: int = 7) -> Instance:
    """Layers alike, or one much heavier than all; cheap and dear messages; little room or enough."""
    unit, heavy = rng.choice((0.001, 1, 1)), rng.random() < 0.3
    count = rng.randint(fewest, most_layers)
    layers = tuple(
        Layer(
            f"l{k}",
            rng.randint(0, 9) * unit,
            (rng.randint(1, 9) + 90 * (heavy and k == count // 2)) * unit,
            rng.randint(0, 20) * 1e6,
            rng.choice((0, 1, 4, 20)) * 1e7 * unit,
        )
        for k in range(count)
    )
    cuts = tuple(rng.choice((0, 1, 5, 30)) * 1e6 * unit for _ in layers[1:])
    machines = Machines(*rng.choice(((1, 4), (2, 2), (2, 3), (3, 2), (2, 4), (5, 1), (2, 5))))
    needs = tuple(rng.randint(1, 9) * 1.0 for _ in layers)
    room = rng.choice((math.inf, max(needs), sum(needs) / 2 + max(needs)))
    return Instance(LayerProfile(layers, cuts), machines, rng.choice((2, 4, 8, 12)), 2, 2, needs, room)


def partial_plan(rng: random.Random, instance: Instance, copies: _Copies) -> _Partial:
    """Stages of one layer each on one device each, with whole times."""
    stages, used = [], [0] * copies.machines
    for k in range(rng.randint(1, min(3, instance.layers - 1, copies.machines * copies.devices))):
        machine = rng.choice([own for own, taken in enumerate(used) if taken < copies.devices])
        used[machine] += 1
        stages.append(Stage(k, k + 1, tuple(int(own == machine) for own in range(copies.machines))))
    reduces = tuple((k, float(rng.randint(0, 12))) for k, _ in enumerate(stages))
    return _Partial(tuple(stages), tuple(used), rng.randint(1, 36) / 4, float(rng.randint(0, 3)), reduces)


def partials(rng: random.Random) -> Row:
    """What a partial plan needs at least, which of them beat which, and all that follow one."""
    instance = hybrid_instance(rng, fewest=2)
    copies = rng.choice(list(hybrid_search._copies(instance, (1, 2, 3))))
    m = instance.micro_batches(copies.pipelines)
    assert m is not None
    some = [partial_plan(rng, instance, copies) for _ in range(12)]
    row: Row = [[hybrid_search._least(instance, copies, partial, m) for partial in some[:3]]]
    row += [hybrid_search._deep(instance, copies, own) for own in (m, copies.machines * copies.devices)]
    for deep in (False, True):
        beats = [[hybrid_search._beats(a, b, m, deep) for b in some] for a in some]
        kept: list[_Partial] = []
        for new in some:
            hybrid_search._keep(kept, new, m, deep)
        row += [sum(map(sum, beats)), digest(beats), [some.index(partial) for partial in kept]]
    for every in (False, True):
        most = instance.total / rng.choice((1.0, 3.0, 6.0))
        last = some[0].stages[-1].last
        follow = list(hybrid_search._next(instance, copies, some[0], last, most, every=every))
        row += [len(follow), digest([[one.used, one.longest, one.sends, one.reduces] for one in follow])]
    evenly = [[(stage.last, *stage.devices) for stage in plan] for plan in hybrid_search._even(instance, copies)]
    return [*row, str(evenly)]


def programs(rng: random.Random) -> Row:
    """Both programs with all numbers of copies, and how much each looks at."""
    instance = hybrid_instance(rng)
    looked_at: list[int] = []
    plain = hybrid_search._next

    def counted(*arguments: object, every: bool) -> Iterator[_Partial]:
        for number, partial in enumerate(plain(*arguments, every=every)):  # type: ignore[arg-type]
            looked_at.append(number)
            yield partial

    row: Row = []
    hybrid_search._next = counted  # type: ignore[assignment]
    try:
        for copies in hybrid_search._copies(instance, (1, 2, 3)):
            smallest = hybrid_search._smallest_block(instance, copies)
            row += [[(stage.last, *stage.devices) for stage in smallest], len(looked_at)]
        for plan_of in (hybrid_search.dapple_plan, hybrid_search.best_plan):
            try:
                plan = plan_of(instance, (1, 2, 3))
            except UserError as refused:
                row += [type(refused.diagnostics[0]).__name__, len(looked_at)]
                continue
            row += [str(plan), plan.apart, plan.block, plan.latency, len(looked_at)]
    finally:
        hybrid_search._next = plain
    partition = hybrid_search.pipedream_plan(instance)
    return [*row, str(partition), [stage.devices for stage in partition.stages], partition.latency]


KINDS: dict[str, Kind] = {
    "entries": (entries, 24), "chains": (chains, 16), "windows": (windows, 24),
    "groups": (groups, 40), "schedules": (schedules, 12), "sizes": (sizes, 24),
    "repairs": (repairs, 12), "moves": (moves, 24),
    "partials": (partials, 150), "seeds": (seeds, 12), "programs": (programs, 40),
    "widely": (programs, 40), "exactly": (programs, 30),
}  # fmt: skip


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_balance, "STEPS", 40)
    monkeypatch.setattr(hybrid_search, "SLACK", 0.0)
    monkeypatch.setattr(hybrid_search, "EXACT", 6)
    monkeypatch.setattr(hybrid_search, "GAIN", 0.2)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("few_steps")
def test_the_tables_are_those_that_were_written_down(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "widely":
        monkeypatch.setattr(hybrid_search, "SLACK", 0.1)
    elif name == "exactly":
        monkeypatch.setattr(hybrid_search, "EXACT", 20_000)
    require_as_written(EXPECTED, name, KINDS[name], update=request.config.getoption("--update-golden"))
