"""Same problem, same seed, same number of tries: the same answer, and the same work for it, from version to version.

What a search prunes, prefers where two are equal, or tries next shows in no rule of the plans it gives. Here every
answer is written down, with how much was looked at. ``pytest tests/pipelining --update-golden`` writes them anew: read
what became longer or took more.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining import hybrid_search
from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.evaluate import StageTimes, evaluate
from arachnec.pipelining.held import held
from arachnec.pipelining.hybrid_plan import HybridPlan, Instance, Machines
from arachnec.pipelining.list_schedule import list_schedule
from arachnec.pipelining.order_bound import lower_bound, one_rank_bound
from arachnec.pipelining.order_search import plan_order
from arachnec.pipelining.order_windows import improve_windows
from arachnec.pipelining.partition_balance import balanced_sizes
from arachnec.pipelining.pipeline_model import LayerCosts, PipelineInstance, performance
from arachnec.pipelining.pipeline_search import find_plan
from arachnec.pipelining.problem import OrderProblem
from arachnec.pipelining.profile_file import Layer, LayerProfile
from arachnec.solver.problem import Effort

EXPECTED = Path(__file__).parent / "same_answers.json"
Row = list[object]


def order_problem(rng: random.Random, most: int = 6) -> OrderProblem:
    """One to two stages a rank in any place, all times unequal, memory for little more than the longest."""
    ranks, count = rng.randint(1, 4), rng.randint(2, most)
    stages = rng.randint(ranks, 2 * ranks)
    placement = [stage % ranks for stage in range(stages)]
    rng.shuffle(placement)

    def table(rows: int, least: int = 1) -> list[list[int]]:
        return [[rng.randint(least, 12) for _ in range(count)] for _ in range(rows)]

    whole = table(stages) if rng.random() < 0.3 else None
    times = StageTimes(table(stages), table(stages), table(stages), whole, table(stages - 1, 0), table(stages - 1, 0))
    saved = table(stages)
    alone = [
        max(sum(saved[s][m] for s in range(stages) if placement[s] == rank) for m in range(count))
        for rank in range(ranks)
    ]
    return OrderProblem(times, saved, [need + rng.randint(0, 12) for need in alone], tuple(placement))


def short(schedule: PipelineSchedule) -> str:
    return hashlib.sha256(repr(schedule.orders).encode()).hexdigest()[:10]


def orders(rng: random.Random) -> Row:
    """Bounds, list schedules of two entries, the search's order."""
    problem = order_problem(rng)
    row: Row = [lower_bound(problem, split) for split in (False, True)]
    entry = list(range(problem.micro_batches))
    rng.shuffle(entry)
    for split in (False, True):
        makespan, schedule = list_schedule(problem, entry, split)
        evaluation = evaluate(schedule, problem.times)
        row += [makespan, short(schedule), sum(evaluation.idle), sum(held(schedule, problem.saved))]
        planned = plan_order(problem, split=split, tries=12, seed=rng.randint(0, 9))
        row += [planned.makespan, short(planned.schedule), round(planned.gap, 9)]
    return row


def windows(rng: random.Random) -> Row:
    """A bad order improved window by window: what is left, how many there were, and how many are proved."""
    problem = order_problem(rng, most=4)
    entry = list(range(problem.micro_batches))
    start = list_schedule(problem, entry[::-1], rng.random() < 0.5)[1]
    size = rng.choice((8, 12, 64))
    improved = improve_windows(problem, start, Effort(400_000), size=size)
    row = sum(map(len, start.orders)), size, improved.makespan, improved.windows, improved.proved, improved.optimal
    return [evaluate(start, problem.times).makespan, *row]


def one_rank(rng: random.Random) -> Row:
    heads = [rng.randint(0, 12) for _ in range(6)]
    return [
        one_rank_bound([(head, rng.randint(1, 6), rng.randint(0, 9)) for head in heads[:count]]) for count in (3, 6)
    ]


def partition(rng: random.Random) -> Row:
    """Layers balanced over stages, and partition, placement and schedule together."""
    ranks = rng.randint(2, 4)
    layers = tuple(LayerCosts(*(rng.randint(1, 9) for _ in range(6))) for _ in range(rng.randint(2 * ranks, 12)))
    memory, speeds = (
        tuple(rng.randint(40, 160) for _ in range(ranks)),
        tuple(rng.choice((1.0, 2.0)) for _ in range(ranks)),
    )
    bandwidth, latency = rng.choice(((float("inf"), 0.0), (1.0, 0.5)))
    instance = PipelineInstance(layers, rng.randint(2, 5), speeds, memory, bandwidth, latency)
    placement = [*range(ranks), *range(ranks)]
    row: Row = [str(balanced_sizes(instance, placement, seed=rng.randint(0, 9)))]
    try:
        plan = find_plan(instance, split=rng.random() < 0.7, tries=4, seed=rng.randint(0, 9))
    except UserError as refused:
        return [*row, type(refused.diagnostics[0]).__name__]
    again = performance(instance, plan.plan)
    figures = [again.makespan, again.exposed, sum(again.communication), sum(again.memory), sum(again.bubble)]
    return [
        *row,
        str(plan.plan.sizes),
        str(plan.plan.placement),
        short(plan.plan.schedule),
        str(plan.repaired),
        *figures,
    ]


def hybrid(rng: random.Random) -> Row:
    """DAPPLE's program, ours and PipeDream's partition, and how many partial plans they look at."""
    layers = tuple(
        Layer(f"l{k}", rng.randint(0, 20), rng.randint(1, 20), rng.randint(0, 20) * 1e6, rng.randint(0, 20) * 1e7)
        for k in range(rng.randint(3, 9))
    )
    cuts = tuple(rng.randint(0, 30) * 1e6 for _ in layers[1:])
    machines = Machines(*rng.choice(((1, 4), (2, 2), (2, 3), (3, 2), (2, 4), (5, 1))))
    needs = tuple(rng.randint(1, 9) * 1.0 for _ in layers)
    room = rng.choice((float("inf"), max(needs), sum(needs) / 2 + max(needs)))
    instance = Instance(LayerProfile(layers, cuts), machines, rng.choice((2, 4, 12, 16)), 2, 2, needs, room)
    looked_at = [0]
    plain = hybrid_search._next

    def counted(*arguments: object, every: bool) -> object:
        for partial in plain(*arguments, every=every):  # type: ignore[arg-type]
            looked_at[0] += 1
            yield partial

    row: Row = []
    hybrid_search._next = counted  # type: ignore[assignment]
    try:
        for plan_of in (hybrid_search.dapple_plan, hybrid_search.best_plan):
            for pipelines in ((1,), (1, 2, 3)):
                row += [*_told(plan_of, instance, pipelines), looked_at[0]]
    finally:
        hybrid_search._next = plain
    return [*row, *_shown(hybrid_search.pipedream_plan(instance))]


def _told(plan_of: Callable[..., HybridPlan], instance: Instance, pipelines: tuple[int, ...]) -> Row:
    try:
        return _shown(plan_of(instance, pipelines))
    except UserError as refused:
        return [type(refused.diagnostics[0]).__name__]


def _shown(plan: HybridPlan) -> Row:
    stages = [(stage.last, *stage.devices) for stage in plan.stages]
    return [
        str(stages),
        plan.pipelines,
        plan.apart,
        round(plan.block, 6),
        round(plan.latency, 6),
        round(plan.speed_up, 6),
    ]


KINDS: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "orders": (orders, 12), "windows": (windows, 6), "one_rank": (one_rank, 12), "partition": (partition, 7),
    "hybrid": (hybrid, 12),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_the_one_that_was_written_down(kind: str, request: pytest.FixtureRequest) -> None:
    answer, count = KINDS[kind]
    rows = [json.loads(json.dumps(answer(random.Random(f"{kind}/{number}")))) for number in range(count)]
    written = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    if request.config.getoption("--update-golden"):
        written[kind] = rows
        lines = ",\n".join(
            f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in told) + "\n]" for name, told in written.items()
        )
        EXPECTED.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    for number, (row, expected) in enumerate(zip(rows, written[kind], strict=True)):
        assert row == pytest.approx(expected, rel=1e-9) if _numbers(row) else row == expected, number


def _numbers(row: Row) -> bool:
    return all(isinstance(value, int | float) for value in row)
