"""The named pipelines. Every way of training that is compared is one line here, over the same IR."""

from __future__ import annotations

# Which pass schedules a layout: the first row whose attribute the module has. A pipeline says the last one for all of
# them, and the layout's own runs in its place, with the options that both have.
LAYOUT_SCHEDULERS: tuple[tuple[str | None, str], ...] = (
    ("schedule", "schedule-stages"),  # stages, in the order of the pipeline schedule that the layout names
    (None, "schedule-z3"),  # cells, or a copy on every rank: degrees and start times by search
)
OUR_SCHEDULER = LAYOUT_SCHEDULERS[-1][1]

# First, because what the state leaves of a device decides how large micro-batches may be.
_STATE = "shard-optimizer"
_EQUAL = f"{_STATE},partition{{policy=equal-token}},annotate"
# Every baseline all-reduces its gradients in buckets behind its last backward, as PyTorch's DDP does. Which backward
# is the last one follows from the schedule.
_END = "place,bucket{reverse=false},lower,check"
# Where a copy of the state on every rank would crowd the device, the shortest of: the optimizer alone, cells, stages.
# Host memory where not even cells let every clip fit.
_OURS = f"choose-layout,offload,partition{{policy=dual}},annotate,{OUR_SCHEDULER},place,bucket,lower,check"
# Attention over chosen keys is another computation: asked for by name, never a default.
CHANGES_NUMERICS = frozenset({"sparse", "dsv"})
# `fused` plans as another does, so comparing it says nothing.
NOT_COMPARED = frozenset({"fused"}) | CHANGES_NUMERICS

PIPELINES = {
    # ours: both limits on a micro-batch, every cascade its own degree
    "default": _OURS,
    # ours, and the memory-bound operations of every block run as few kernels: apart, until the kernels ran on a GPU
    "fused": f"fuse,{_OURS}",
    # ours, and every layer that is faster so attends to chosen keys; heads are cut where ranks would wait for one
    "sparse": f"sparsify,{_OURS}",
    # DSV: sparse, whole heads dealt out longest first, one degree for all, the one that is best for these clips
    "dsv": f"sparsify{{division=heads}},{_STATE},partition,annotate,schedule-static,{_END}",
    # buckets of equal token count, every GPU its own, dealt out as they arrive, as Open-Sora trains
    "data-parallel": f"{_EQUAL},schedule-static{{policy=data-parallel}},{_END}",
    # micro-batches of equal token count, the one degree for all that is best for them
    "equal-token": f"{_EQUAL},schedule-static,{_END}",
    # one sequence-parallel degree for all, the one that is best for these clips
    "ulysses": f"{_STATE},partition,annotate,schedule-static,{_END}",
    # AdaptiveLoad: the dual limits balance the micro-batches, data parallelism runs them
    "adaptive-load": f"{_STATE},partition{{policy=dual}},annotate,schedule-static{{policy=data-parallel}},{_END}",
    # NeMo: one bucket at a time on all GPUs, one degree for the whole run
    "same-bucket": f"{_EQUAL},schedule-same-bucket,{_END}",
    # Megatron-Core: greedy rounds of groups, the smallest power of two that holds a sequence, work S^2 / cp
    "megatron-dynamic-cp": f"{_STATE},partition,annotate,schedule-dynamic-cp,{_END}",
    # FlexSP: an integer program chooses groups of unequal size and what each runs
    "flexsp": f"{_STATE},partition,annotate,schedule-flexsp,{_END}",
    # KnapFormer: bags of fixed sizes, filled greedily to equal load
    "knapformer": f"{_STATE},partition,annotate,schedule-knapformer,{_END}",
    # PipeDream's 1F1B: the fewest stages that hold the longest clip; a stage's gradients end with its last backward
    "pipeline-1f1b": "stages,partition{policy=dual},annotate,schedule-pipeline,lower,check",
    # DAPPLE: its planner's cuts and replicas, early backward; replicas of a stage take turns
    "dapple": "stages-dapple,partition{policy=dual},annotate,schedule-pipeline{schedule=dapple},lower,check",
    # AdaPtis: cuts, places and order searched together
    "adaptis": "stages-adaptis,partition{policy=dual},annotate,schedule-pipeline{schedule=planned},lower,check",
    # Ada-Grouper: 1F1B of groups of k micro-batches, k by the memory and the links, which a run measures
    "kfkb": "stages,partition{policy=dual},annotate,schedule-pipeline{schedule=kfkb},lower,check",
    # FSDP: parameters, gradients and optimizer dealt out over all ranks, one layer whole at a time
    "fsdp": f"shard-parameters{{cell=world}},partition,annotate,schedule-static,{_END}",
    # FSDP's hybrid sharding: dealt out within a machine, replicated between machines
    "fsdp-hybrid": f"shard-parameters{{cell=node}},partition,annotate,schedule-static,{_END}",
    # Arachne: a genetic search over degrees and priorities, decoded by list scheduling
    "arachne-ga": f"{_STATE},partition,annotate,schedule-genetic,{_END}",
}

# Ways to sample requests. Each begins with a traced module of requests (docs/sampling_plans.md).
_SAMPLED = "place,lower,check"
SAMPLING_PIPELINES = {
    # ours: degrees, borders, order and residency by search, again while it runs where switches are open
    "generate": "segment,annotate,schedule-sampling,place,rounds,lower,check",
    # each rank a request, the next one when it is free: data-parallel serving
    "replica": f"segment,annotate,schedule-sampling{{policy=replica}},{_SAMPLED}",
    # all ranks one request after another: Diffusers and xDiT
    "one-degree": f"segment,annotate,schedule-sampling{{policy=one-degree}},{_SAMPLED}",
    # ours without the second model
    "large-only": f"segment{{models=1}},annotate,schedule-sampling,{_SAMPLED}",
    # a fixed share of the ranks for each model, the best by enumeration: disaggregated serving
    "two-pools": f"segment,annotate,schedule-sampling{{policy=two-pools}},{_SAMPLED}",
}
NAMED = PIPELINES | SAMPLING_PIPELINES

# What becomes of clips in the originals. Here every pipeline trains every clip of the batch once; `check` proves it.
ORIGINAL_CLIPS = {
    "data-parallel": "drops what does not fill a batch of its bucket, or repeats clips to fill it, by configuration",
    "adaptive-load": "drops or repeats what does not fill a batch, as its buckets' sampler does",
    "same-bucket": "draws buckets at random from a stream: a step's clips are no given list",
}
