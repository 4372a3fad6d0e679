"""The named pipelines. Every way of training that is compared is one line here, over the same IR."""

from __future__ import annotations

PIPELINES = {
    # ours: both limits on a micro-batch, every cascade its own degree
    "default": "partition{policy=dual},annotate,schedule-z3,place,lower,check",
    # buckets of equal shape, every GPU its own clips, as Open-Sora trains
    "data-parallel": "partition,annotate,schedule-static{degree=1},place,lower,check",
    # micro-batches of equal token count, one degree for all
    "equal-token": "partition{policy=equal-token},annotate,schedule-static,place,lower,check",
    # one sequence-parallel degree for all, the whole node
    "ulysses": "partition,annotate,schedule-static{degree=8},place,lower,check",
    # AdaptiveLoad: the dual limits balance the micro-batches, data parallelism runs them
    "adaptive-load": "partition{policy=dual},annotate,schedule-static{degree=1},place,lower,check",
}
