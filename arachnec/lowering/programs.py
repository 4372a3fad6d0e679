"""Lowering. In: a placed module. Out: the module with one instruction list per rank.

All lists are projections of *one* global order of events: every cascade at its start, every handoff right after its
producer ends. So they cannot deadlock even where a send is a rendezvous, and sends and receives of a pair of ranks
stand in the same order. ``docs/check.md`` says how a back end may run them less strictly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from arachnec.analysis.stage_handoffs import handed_gib
from arachnec.analysis.stage_ranks import resident_gib, resident_ranks
from arachnec.analysis.uses import split_backwards
from arachnec.cluster.device_specs import find_device_specs
from arachnec.cost.host_memory import with_host_copies
from arachnec.cost.memory import divided
from arachnec.ir.diagnostic import Mistake, Span, UserError, user_error
from arachnec.ir.nodes import Cascade, Cluster, Instruction, Level, Module, Phase, Program, Stage, quantity
from arachnec.ir.parameter_cells import gathered_gib
from arachnec.ir.sampling import CODING, models_of, on_one_side
from arachnec.ir.stage_sizes import largest_share
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.kernels.attention.attention_backend import PREFERENCE, Capability, attention_backend
from arachnec.lowering.gathers import on_rank, updated_parameters
from arachnec.lowering.gradient_sync import gradient_synchronisation, overlapped_backwards
from arachnec.lowering.head_division import with_heads
from arachnec.lowering.order import (
    COMPUTE,
    GIB,
    GRADIENT,
    HANDOFF,
    REDUCE,
    REPLAN,
    Handoff,
    Place,
    evaluate,
    forward_share,
    global_order,
    plan_frees,
    plan_handoffs,
    reads_saved,
    round_bounds,
)


def demand_known(name: object, node: Cascade | Instruction) -> None:
    """Raises UserError, at the node, for a name that no kernel family has."""
    if name not in PREFERENCE:
        raise user_error(
            f"there is no attention back end `{name}`",
            help=f"write one of {', '.join(PREFERENCE)}, or leave `attention` out",
            span=node.attrs.span("attention") or node.span,
        )


def with_attention(
    cascades: Sequence[Cascade], stages: Sequence[Stage], cluster: Cluster, wanted: str | None
) -> tuple[Cascade, ...]:
    """The cascades, each that has a forward with the kernel family of its attention.

    A cascade keeps what it names. The others get ``wanted``, or the best that the cluster's device runs, the same for
    all grids of a stage. None gets any where the stage does not say its heads, or the cluster mixes devices or has one
    that is not known: the run chooses then.
    """
    capability = _capability(cluster)
    names = {stage.name: wanted or _best(stage, capability) for stage in stages}
    return tuple(_named(cascade, names[cascade.stage]) for cascade in cascades)


def _named(cascade: Cascade, name: str | None) -> Cascade:
    if cascade.phase not in (Phase.TRAIN, Phase.FORWARD, Phase.DENOISE):
        return cascade
    if "attention" in cascade.attrs:
        demand_known(cascade.attrs["attention"], cascade)
        return cascade
    return cascade if name is None else cascade.with_attrs(attention=name)


def _best(stage: Stage, capability: Capability | None) -> str | None:
    size = head_size(stage)
    if size is None or capability is None:
        return None
    return attention_backend(capability, str(stage.attrs.get("dtype", "f32")), size)


def head_size(stage: Stage) -> int | None:
    """Elements of one head; None where the stage does not say its width and heads, or has no self-attention."""
    hidden, heads = stage.attrs.get("hidden"), stage.attrs.get("heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or stage.attrs.get("attentions") == 0:
        return None
    return hidden // heads


def _capability(cluster: Cluster) -> Capability | None:
    specs = find_device_specs(str(cluster.attrs.get("device")))
    if specs is None or "mixed" in cluster.attrs:
        return None
    return Capability("cpu") if specs.name == "cpu" else Capability("cuda", specs.compute, cudnn=True)


# of a denoise
SAMPLED = ("steps", "branches", "switch", "ulysses", "ring", "shards", "side", "unconditional", "attention")


def no_cluster_error(span: Span | None, module: str) -> Mistake:
    return Mistake(
        span, f"module @{module} has no cluster", help="say where it runs: `cluster @pod { nodes = 2, gpus = 8, ... }`"
    )


def lower(module: Module, attention: str | None = None) -> Module:
    """The module at level ``lowered``, with a program for every rank of the cluster.

    ``attention`` is the kernel family for cascades that name none; None means the best of the cluster's device.
    Raises UserError for a plan that no order of instructions can follow.
    """
    module = replace(module, cascades=with_heads(module))
    if module.cluster is None:
        raise UserError(no_cluster_error(module.span, module.name))
    order = global_order(module.cascades)
    handoffs = plan_handoffs(module, module.cluster, order)
    placed = _placed(module, module.cluster, order, handoffs, attention)
    resident = {stage.name: resident_ranks(module, module.cluster, stage) for stage in module.stages}
    lists, ends = _with_ends(module, module.cluster, order, placed, resident)
    lists = _with_copies(module, lists)
    gathers = updated_parameters(module, resident)
    states, kept = (resident_by_rank(module, resident, name) for name in ("state", "host_state"))
    programs = tuple(
        Program(
            rank,
            (*gathers[rank], *lists[rank], *ends[rank]),
            Attributes.of(state=Quantity(states[rank], "GiB"), host_state=_some(kept[rank])),
        )
        for rank in range(module.cluster.world)
    )
    return replace(module, level=Level.LOWERED, programs=programs)


def resident_by_rank(module: Module, resident: Mapping[str, Collection[int]], name: str) -> dict[int, float]:
    """What every rank always holds by an attribute of the stages that lie on it: ``state`` or ``host_state``."""
    assert module.cluster is not None
    stages_of: dict[tuple[Stage, ...], float] = {}
    held = {}
    for rank in range(module.cluster.world):
        here = tuple(stage for stage in module.stages if rank in resident[stage.name])
        if here not in stages_of:
            stages_of[here] = resident_gib(here, name)
        held[rank] = stages_of[here]
    return held


def compute_lists(
    module: Module, cluster: Cluster, order: tuple[Cascade, ...], handoffs: list[Handoff], attention: str | None = None
) -> dict[int, list[Instruction]]:
    """Every rank's instructions up to the gradient synchronisation."""
    return _with_copies(module, _in_order(_placed(module, cluster, order, handoffs, attention)))


def _in_order(placed: Mapping[int, Sequence[tuple[Place, Instruction]]]) -> dict[int, list[Instruction]]:
    return {rank: [item for _, item in sorted(items, key=lambda p: p[0])] for rank, items in placed.items()}


def _with_copies(module: Module, lists: Mapping[int, list[Instruction]]) -> dict[int, list[Instruction]]:
    """The lists with what each instruction brings in from host memory and takes back."""
    cascades = {cascade.name: cascade for cascade in module.cascades}
    stages = {stage.name: stage for stage in module.stages}
    return {rank: with_host_copies(items, cascades, stages) for rank, items in lists.items()}


def _with_ends(
    module: Module,
    cluster: Cluster,
    order: tuple[Cascade, ...],
    placed: Mapping[int, Sequence[tuple[Place, Instruction]]],
    resident: dict[str, frozenset[int]],
) -> tuple[dict[int, list[Instruction]], dict[int, list[Instruction]]]:
    """Every rank's list with the reduces that stand between its cascades, and what ends it.

    Which reduces start inside a last backward follows from where the others stand: those of other stages first.
    """

    def ended(overlapped: dict[int, Instruction]) -> dict[int, list[Instruction]]:
        ends = gradient_synchronisation(module, cluster, resident, overlapped)
        moved = {rank: [*items, *_moved_up(module, order, ends[rank])] for rank, items in placed.items()}
        lists.update(_in_order(moved))
        return ends

    lists = _in_order(placed)
    stage_of = {cascade.name: cascade.stage for cascade in order}
    trained = Counter(rank for stage in module.stages if stage.trained for rank in resident[stage.name])
    if any(count > 1 for count in trained.values()):
        ended({})
    ends = ended(overlapped_backwards(lists, stage_of))
    return lists, ends


def _moved_up(
    module: Module, order: tuple[Cascade, ...], ends: list[Instruction]
) -> Iterator[tuple[Place, Instruction]]:
    """Take the reduces off the end of a rank with several stages, and give each the place behind its stage's last
    gradient in the global order: the other stages' backwards hide it."""
    if sum(item.op == "step" for item in ends) < 2:
        return
    last = {cascade.stage: i for i, cascade in enumerate(order) if cascade.phase in GRADIENT}
    for item in [item for item in ends if item.op == "reduce" and item.target in last and "tied" not in item.attrs]:
        ends.remove(item)
        yield (last[item.target], REDUCE), item


def _placed(
    module: Module, cluster: Cluster, order: tuple[Cascade, ...], handoffs: list[Handoff], attention: str | None
) -> dict[int, list[tuple[Place, Instruction]]]:
    placed: dict[int, list[tuple[Place, Instruction]]] = {rank: [] for rank in range(cluster.world)}
    for handoff in handoffs:
        name = order[handoff.producer].name
        memory = _some(handoff.size / GIB)
        send = Instruction("send", name, (handoff.target,), Attributes.of(bytes=handoff.size))
        receive = Instruction("receive", name, (handoff.source,), Attributes.of(bytes=handoff.size, memory=memory))
        placed[handoff.source].append(((handoff.slot, HANDOFF), send))
        placed[handoff.target].append(((handoff.slot, HANDOFF), receive))
    stages = {stage.name: stage for stage in module.stages}
    # a table of durations has no clips
    count = len(module.clips) or len({clip for cascade in order for clip in cascade.clips}) or 1
    named = {cascade.name: cascade for cascade in order}
    split = split_backwards(module)
    for i, cascade in enumerate(with_attention(order, module.stages, cluster, attention)):
        inputs = math.fsum(
            handed_gib(named[name], cascade, stages, named)
            for name in cascade.inputs
            if not reads_saved(cascade, named[name])
        )
        stage = stages[cascade.stage]
        instructions = instructions_of(cascade, stage, count, inputs)
        for rank in cascade.ranks:
            lines = on_rank(instructions, stage, rank, cascade.phase, split=cascade.name in split)
            placed[rank].extend(((i, COMPUTE), item) for item in lines)
    for rank, place, name in plan_frees(cluster, order, handoffs):
        placed[rank].append((place, Instruction("free", name)))
    for first in sorted({first for first, _ in round_bounds(order)} - {0}):
        replan = Instruction("replan", models_of(module)[0], attrs=Attributes.of(round=order[first].round))
        for items in placed.values():
            items.append(((first, REPLAN), replan))
    return placed


def instructions_of(cascade: Cascade, stage: Stage, clips: int, inputs: float) -> tuple[Instruction, ...]:
    """The instructions of one cascade on each of its ranks.

    ``clips`` counts the global batch. ``inputs`` are the GiB that the cascade reads: its planned memory includes them,
    a program holds them from their receive to their free. What it gathers follows from its lists of layers.
    """
    own = max(0.0, _gib(cascade.attrs.get("memory")) - inputs - gathered_gib(stage))
    group = cascade.ranks
    duration = max(0.0, cascade.end - cascade.start)
    if cascade.phase is Phase.TRAIN:
        first = duration * forward_share(cascade, stage)
        backward = _times(cascade.start + first, duration - first)
        return (
            Instruction("forward", cascade.name, group, _forward_attrs(cascade, clips, first, own)),
            Instruction("backward", cascade.name, group, backward),
        )
    if cascade.phase is Phase.FORWARD:
        # several micro-batches are held at once, and one of them runs
        part = on_one_side(cascade, cascade.side)
        running = min(own, divided(stage, "workspace", part, largest_share(cascade, cascade.degree)))
        attrs = _forward_attrs(cascade, clips, duration, own - running).updated(workspace=_some(running))
        return (Instruction("forward", cascade.name, group, attrs),)
    attrs = _times(cascade.start, duration)
    if cascade.phase is Phase.BACKWARD:
        attrs = attrs.updated(workspace=_some(own))
    if cascade.phase in (*CODING, Phase.DENOISE):
        output = evaluate(stage.attrs.get("output"), cascade)
        attrs = attrs.updated(memory=Quantity(output, "GiB"), workspace=_some(own - output))
        group = () if cascade.phase in CODING and len(group) == 1 else group
    if cascade.phase is Phase.DENOISE:
        attrs = attrs.updated(**{name: cascade.attrs.get(name) for name in SAMPLED})
    return (Instruction(cascade.phase.value, cascade.name, group, attrs),)


def _forward_attrs(cascade: Cascade, clips: int, duration: float, own: float) -> Attributes:
    attrs = cascade.attrs
    return _times(cascade.start, duration).updated(
        memory=Quantity(own, "GiB"),
        weight=len(cascade.clips) / clips,
        ulysses=attrs.get("ulysses"),
        ring=attrs.get("ring"),
        shards=attrs.get("shards"),
        recompute=attrs.get("recompute"),
        attention=attrs.get("attention"),
        side=attrs.get("side"),
    )


def _times(start: float, duration: float) -> Attributes:
    return Attributes.of(time=Quantity(duration, "ms"), start=Quantity(start, "ms"))


def _some(gib: float) -> Quantity | None:
    return Quantity(gib, "GiB") if gib > 0 else None


def _gib(value: Value | None) -> float:
    return 0.0 if value is None else quantity(value)
