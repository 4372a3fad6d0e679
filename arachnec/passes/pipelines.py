"""The named pipelines. Every way of training that is compared is one line here, over the same IR."""

from __future__ import annotations

PIPELINES = {
    # ours: both limits on a micro-batch, every cascade its own degree
    "default": "partition{policy=dual},annotate,schedule-z3,place,lower,check",
    # buckets of equal token count, every GPU its own, dealt out as they arrive, as Open-Sora trains
    "data-parallel": "partition{policy=equal-token},annotate,schedule-static{policy=data-parallel},place,lower,check",
    # micro-batches of equal token count, the one degree for all that is best for them
    "equal-token": "partition{policy=equal-token},annotate,schedule-static,place,lower,check",
    # one sequence-parallel degree for all, the one that is best for these clips
    "ulysses": "partition,annotate,schedule-static,place,lower,check",
    # AdaptiveLoad: the dual limits balance the micro-batches, data parallelism runs them
    "adaptive-load": "partition{policy=dual},annotate,schedule-static{policy=data-parallel},place,lower,check",
}
