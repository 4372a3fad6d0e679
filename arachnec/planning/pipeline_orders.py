"""Orders of a pipeline's micro-batches: schedules by name, and those that times and memory choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from arachnec.ir.diagnostic import user_error
from arachnec.pipelining.action import BACKWARD, FORWARD, Action, PipelineSchedule
from arachnec.pipelining.evaluate import StageTimes, Table
from arachnec.pipelining.order_problem import OrderProblem
from arachnec.pipelining.order_search import choose_k, groupings, overfull, plan_order
from arachnec.pipelining.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_h2, zb_v
from arachnec.solver.problem import Effort

ScheduleName: TypeAlias = Literal[
    "gpipe", "1f1b", "kfkb", "dapple", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "planned"
]
SPLITTING = frozenset({"zb-h1", "zb-h2", "zb-v", "planned"})  # weight gradients are actions of their own


def stages_each(name: ScheduleName, v: int) -> int:
    """Stages on every rank."""
    return {"interleaved-1f1b": v, "zb-v": 2}.get(name, 1)


def pipeline_ranks(name: ScheduleName, stages: int, v: int) -> int:
    """Ranks of one pipeline. Raises UserError where its stages do not go on them evenly."""
    per_rank = stages_each(name, v)
    if stages % per_rank:
        raise user_error(
            f"`{name}` puts {per_rank} stages on every rank, and the model has {stages}",
            help=f"give `stages` a p that {per_rank} divides",
        )
    return stages // per_rank


def ranks_of_stages(
    world: int, stages: int, per_rank: int, degrees: Sequence[int] | None, pipeline: int | None = None
) -> tuple[int, ...]:
    """How many ranks hold every stage: ``per_rank`` stages lie on a rank, or stages have ``degrees`` of their own.

    ``pipeline`` are the ranks of one pipeline where orders that somebody wrote say them.
    """
    if pipeline is not None:
        return (world // pipeline,) * stages
    if degrees is None or len(degrees) != stages:
        return (world * per_rank // stages,) * stages
    return tuple(world // max(1, sum(degrees)) * degree for degree in degrees)


def orders_of(name: ScheduleName, ranks: int, micro_batches: int, *, v: int) -> PipelineSchedule:
    """The orders of a schedule that asks for nothing else. What lacks of whole rounds is left out of the last."""
    if name == "interleaved-1f1b":
        whole = micro_batches if micro_batches <= ranks else -(-micro_batches // ranks) * ranks
        return _without(interleaved_1f1b(ranks, whole, v), micro_batches)
    plain: dict[str, Callable[[int, int], PipelineSchedule]] = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
    }
    return plain[name](ranks, micro_batches)


def _without(schedule: PipelineSchedule, micro_batches: int) -> PipelineSchedule:
    orders = (tuple(a for a in order if a.micro_batch < micro_batches) for order in schedule.orders)
    return PipelineSchedule(tuple(orders))


TRIES = 400  # orders of entry that are looked at for each replica, at most
DECODED = 400_000  # actions in the orders that are looked at for all replicas
DECODED_QUICKLY = 20_000  # the same for a comparison: a tenth of a second
WINDOWED = 512  # actions of all replicas up to which Z3 improves windows of their orders
WINDOW_STEPS = 300_000  # of Z3 for each


@dataclass(frozen=True)
class Replica:
    """ms of its micro-batches, GiB that they keep by stage, GiB that its ranks may keep, the rank of every stage."""

    times: StageTimes
    kept: Table
    limits: Sequence[float]
    placement: tuple[int, ...]

    @property
    def micro_batches(self) -> int:
        return len(self.kept[0])

    @property
    def actions(self) -> int:
        """Of a backward in halves."""
        return 3 * len(self.kept) * self.micro_batches


def group_size(replica: Replica, asked: int | None) -> int:
    """The k that was asked for, else the one with the shortest step of those that fit, else 1."""
    if asked is not None:
        return min(asked, replica.micro_batches)
    if overfull(1, replica.kept, replica.limits) is not None:
        return 1  # which does not fit either, and says so
    candidates = groupings(replica.micro_batches)
    return choose_k(replica.times, replica.kept, replica.limits, candidates=candidates).modest


def planned_order(replica: Replica, replicas: int, decoded: int = DECODED) -> PipelineSchedule:
    """The best order found with the share of the effort of one of so many different ``replicas``: ``decoded`` actions
    in the orders that are looked at for all of them. Less than the whole effort is for a comparison.

    The effort is counted, and all replicas share it: where they are many or long, each gets less.
    """
    if exceeds_alone(replica):
        return _one_after_another(replica)
    mib = [[size * 1024 for size in row] for row in replica.kept]  # Z3 counts in whole numbers
    problem = OrderProblem(replica.times, mib, [limit * 1024 for limit in replica.limits], replica.placement)
    tries = min(TRIES, decoded // (replicas * replica.actions))
    schedule = plan_order(problem, split=True, tries=tries).schedule
    if decoded < DECODED or replicas * sum(map(len, schedule.orders)) > WINDOWED:
        return schedule
    from arachnec.pipelining.order_windows import improve_windows  # Z3 takes a while to load

    return improve_windows(problem, schedule, Effort(WINDOW_STEPS)).schedule


def exceeds_alone(replica: Replica) -> bool:
    """Whether a micro-batch does not fit on a rank alone."""
    held = [[0.0] * replica.micro_batches for _ in replica.limits]
    for rank, row in zip(replica.placement, replica.kept, strict=True):
        held[rank] = [a + b for a, b in zip(held[rank], row, strict=True)]
    return any(max(row) > limit for row, limit in zip(held, replica.limits, strict=True))


def _one_after_another(replica: Replica) -> PipelineSchedule:
    """One micro-batch after the other, which does not fit either, and says so."""
    orders: list[list[Action]] = [[] for _ in replica.limits]
    stages = range(len(replica.kept))
    for number in range(replica.micro_batches):
        for stage in stages:
            orders[replica.placement[stage]].append(Action(stage, FORWARD, number))
        for stage in reversed(stages):
            orders[replica.placement[stage]].append(Action(stage, BACKWARD, number))
    return PipelineSchedule(tuple(map(tuple, orders)))
