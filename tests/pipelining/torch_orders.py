"""What the schedule classes of ``torch.distributed.pipelining`` execute, had from stages that only take notes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch

from arachnec.pipelining.action import Action, PipelineSchedule, parse_action
from arachnec.pipelining.evaluate import held

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.pipelining import schedules


def parse_schedule(text: str) -> PipelineSchedule:
    """The reverse of ``str(schedule)``."""
    return PipelineSchedule(tuple(tuple(map(parse_action, line.split())) for line in text.splitlines()))


def held_micro_batches(schedule: PipelineSchedule) -> tuple[int, ...]:
    """The most pairs of stage and micro-batch that every rank holds at once, until their last gradient."""
    return held(schedule, ((1,) * schedule.micro_batches,) * schedule.stages)


class Stage(SimpleNamespace):
    """A stage without a process group: it has no neighbours, computes nothing, and writes down what it was asked."""

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        super().__init__(
            stage_index=index,
            num_stages=stages,
            group_size=ranks,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == stages - 1,
            device=torch.device("cpu"),
            submod=torch.nn.Identity(),
            has_backward=True,
            done=[],
        )

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.done.append(Action(self.stage_index, "F", micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.done.append(Action(self.stage_index, "B", micro_batch))

    def perform_reduce_grad(self, _: int) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            return lambda micro_batch: []
        raise AttributeError(name)


def executed(kind: str, stages: int, micro_batches: int) -> PipelineSchedule:
    """The orders in which ``step`` of GPipe or 1F1B calls its stages: their printed table is another."""
    orders = []
    for rank in range(stages):
        stage = Stage(rank, stages, stages, rank)
        schedule = schedules.get_schedule_class(kind)(stage, micro_batches, loss_fn=lambda *_: None)
        schedule._initialize_stage = lambda *_, **__: None
        schedule._maybe_compute_loss = schedule._maybe_get_loss = lambda *_, **__: None
        schedule._update_losses = lambda *_: None
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
        orders.append(tuple(stage.done))
    return PipelineSchedule(tuple(orders))


def planned(kind: str, ranks: int, v: int, micro_batches: int) -> Any:
    """An instance of a class for several stages, whose ``pipeline_order`` is what it executes."""
    stages = [Stage(0, v * ranks, ranks, 0) for _ in range(v)]
    return schedules.get_schedule_class(kind)(stages, micro_batches, loss_fn=lambda *_: None)


def orders_of(schedule: Any) -> PipelineSchedule:
    """``pipeline_order`` in our words, without empty cells."""
    return PipelineSchedule(
        tuple(
            tuple(
                Action(action.stage_index, action.computation_type.value, action.microbatch_index)
                for action in schedule.pipeline_order[rank]
                if action is not None
            )
            for rank in sorted(schedule.pipeline_order)
        )
    )
