"""Pipeline schedules for any number of micro-batches. In: a name, ranks and micro-batches. Out: the orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from arachnec.ir.diagnostic import user_error
from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.interleaved import interleaved_1f1b
from arachnec.pipelining.one_f_one_b import gpipe, one_f_one_b
from arachnec.pipelining.zb_v import zb_v
from arachnec.pipelining.zero_bubble import zb_h1, zb_h2

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
