"""The end of every list: all-reduces of gradients, one per stage or bucket, their norm, the optimizer steps, and what
sparse layers learn.

Backwards inside which gradients may start to be summed: a split backward has no whole gradients, its ``weight`` stands
for it, which nothing waits for. A rank that starts an all-reduce inside its last backward waits there, as far as a
proof knows, for every other rank that starts it so: each comes to its own last backward, and may have to wait for what
this rank hands on behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arachnec.analysis.stage_ranks import Places, norm_ranks, tied_parts, tied_ranks
from arachnec.analysis.uses import BACKWARDS
from arachnec.cost.host_memory import reduce_copies, step_copies
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import user_error
from arachnec.ir.head_density import predictor_bytes, sparse_stages
from arachnec.ir.host_placement import layers_in_host
from arachnec.ir.nodes import Cluster, Instruction, Module, Stage, integer, integers, quantity
from arachnec.ir.parameter_cells import cell_of, own_cell, replicas
from arachnec.ir.stage_sizes import (
    Bucket,
    buckets_of,
    gradient_bytes,
    gradient_element_bytes,
    layers_of,
    remaining_backward,
    tied_sets,
)
from arachnec.ir.values import Attributes, Quantity


def gradient_synchronisation(
    module: Module,
    cluster: Cluster,
    resident: dict[str, frozenset[int]],
    overlapped: dict[int, Instruction],
) -> dict[int, list[Instruction]]:
    """The reduces and optimizer steps at the end of every rank's list.

    ``resident`` are the ranks of every stage. ``overlapped`` is the backward or weight inside which a rank's reduces
    may start.
    """
    cost = CostModel(module)
    attributes = {reduce.stage: reduce.attrs for reduce in module.reductions}
    steps = {step.stage: step.attrs for step in module.steps}
    ends: dict[int, list[Instruction]] = {rank: [] for rank in range(cluster.world)}
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    trained = [stage for stage in module.stages if stage.trained and resident[stage.name]]
    for stage in trained:
        group = tuple(sorted(resident[stage.name]))
        stated = attributes.get(stage.name, Attributes())
        if "buckets" in stated or cell_of(stage) is not None:
            own = {rank: item for rank, item in overlapped.items() if stage_of[item.target] == stage.name}
            counts = integers(stated["buckets"]) if "buckets" in stated else None
            if layers_in_host(stage):
                own, counts = {}, None  # through the device, once all have come
            _add_buckets(ends, cost, stage, group, counts, own)
            continue
        size = integer(stated["bytes"]) if "bytes" in stated else round(gradient_bytes(stage))
        time = stated.get("time", Quantity(cost.reduce_time(stage, group), "ms"))
        instruction = Instruction("reduce", stage.name, group, Attributes.of(bytes=size, time=time))
        for rank in group:
            ends[rank].append(instruction)
    places = {stage.name: resident[stage.name] for stage in trained}
    for rank, reduces in _tied(module, cost, places).items():
        ends[rank] += reduces
    for rank, items in ends.items():
        here = [stage for stage in trained if rank in resident[stage.name]]
        normed = ((stage, norm_ranks(stage, rank, module.stages, places)) for stage in here)
        for ranks, first in {ranks: _first(stage, trained) for stage, ranks in normed if ranks}.items():
            norm_time = Quantity(cost.norm_time(ranks), "ms")
            items.append(Instruction("norm", first.name, ranks, Attributes.of(time=norm_time)))
        for stage in here:
            time = steps.get(stage.name, Attributes()).get("time", Quantity(cost.step_time(stage), "ms"))
            attrs = Attributes.of(time=time, **dict(step_copies(stage).pairs))
            items.append(Instruction("step", stage.name, (), attrs))
    for learn in _learning(module, cost, cluster):
        for items in ends.values():
            items.append(learn)
    return ends


def _learning(module: Module, cost: CostModel, cluster: Cluster) -> list[Instruction]:
    """Behind the updates, on all ranks: the predictors of layers that may be sparse, by the first stage that has
    some."""
    learning, everyone = list(sparse_stages(module).values()), tuple(range(cluster.world))
    if not learning:
        return []
    size = predictor_bytes(learning)
    attrs = Attributes.of(bytes=size, time=Quantity(cost.all_reduce_time(everyone, size), "ms"))
    return [Instruction("learn", learning[0].name, everyone, attrs)]


def _first(stage: Stage, trained: Sequence[Stage]) -> Stage:
    """The stage by which the norm goes of all gradients that are clipped with this one's: the same on every rank."""
    whole = stage.attrs.get("part_of", stage.name)
    return next(other for other in trained if other.attrs.get("part_of", other.name) == whole)


def _tied(module: Module, cost: CostModel, places: Places) -> dict[int, list[Instruction]]:
    """By rank, the all-reduces of what parts of a model on different ranks share."""
    reduces: dict[int, list[Instruction]] = defaultdict(list)
    sets = dict.fromkeys(pair for stage in module.stages for pair in tied_sets(stage.attrs.get("tied")))
    for tied, count in sorted(sets):
        stage, group = tied_parts(tied, module.stages)[0], tied_ranks(tied, module.stages, places)
        size = round(count * gradient_element_bytes(stage))
        whole = replace(stage, attrs=stage.attrs.updated(sharded=None))  # whole also where the optimizer is dealt out
        attrs = Attributes.of(bytes=size, time=Quantity(cost.reduce_time(whole, group, size), "ms"), tied=tied)
        for rank in group:
            reduces[rank].append(Instruction("reduce", stage.name, group, attrs))
    return reduces


def _add_buckets(
    ends: dict[int, list[Instruction]],
    cost: CostModel,
    stage: Stage,
    group: tuple[int, ...],
    layer_counts: tuple[int, ...] | None,
    overlapped: dict[int, Instruction],
) -> None:
    """The all-reduces of a stage in buckets of so many layers, None: all at once.

    Of a stage in cells every shard is summed over the ranks that hold it, one in each cell.
    """
    layers, cell = len(layers_of(stage)), cell_of(stage) or 1
    shards = [replicas(member, cell, group) for member in range(cell)]
    for bucket in _buckets(stage, layer_counts):
        size = round((gradient_bytes(stage) if bucket is None else bucket.size) / cell)
        times = [Quantity(cost.reduce_time(stage, same, size), "ms") for same in shards]
        lines: dict[Instruction, Instruction] = {}  # one for all ranks that have the same
        for rank in group:
            same, time = shards[rank % cell], times[rank % cell]
            attrs = Attributes.of(bytes=size, time=time, cell=own_cell(rank, cell) if cell_of(stage) else None)
            attrs = attrs.updated(**dict(reduce_copies(stage, same, size).pairs))
            if bucket is not None:
                attrs = attrs.updated(layers=bucket.layers, rest=bucket.rest or None)
            backward = overlapped.get(rank)
            if bucket is not None and not bucket.rest and backward is not None:
                early = quantity(backward.attrs["time"]) * remaining_backward(bucket, layers)
                attrs = attrs.updated(early=Quantity(early, "ms"))
            line = Instruction("reduce", stage.name, same, attrs)
            ends[rank].append(lines.setdefault(line, line))


def _buckets(stage: Stage, layer_counts: tuple[int, ...] | None) -> Sequence[Bucket | None]:
    """Raises UserError where the counts do not make up the stage's layers."""
    if layer_counts is None:
        return [None]
    counts, layers = layer_counts, len(layers_of(stage))
    if not counts or sum(counts) != layers or any(count < 1 for count in counts[:-1]) or counts[-1] < 0:
        raise user_error(
            f"the buckets {list(counts)} of `reduce @{stage.name}` do not make up the stage's {layers} layers",
            label=f"has {layers} layers",
            help="each number is a run of layers, from the last layer on, and only the last may be 0",
            span=stage.span,
        )
    return buckets_of(stage, counts)


Lists = Mapping[int, Sequence[Instruction]]

_OTHER_END = {"send": "receive", "receive": "send"}


def overlapped_backwards(lists: Lists, stage_of: Mapping[str, str]) -> dict[int, Instruction]:
    """Per rank, the backward or weight inside which its reduces may start; ranks without one are absent.

    It must be the last collective of every rank of its group. Then no other rank waits for one that is held up in an
    all-reduce, however little the links and the device can overlap (docs/check.md). Only what it hands on may come
    behind it: the gradient of a stage's input goes to an earlier stage. Where replicas of a stage share the stages
    before, one of those may be waiting for it that another replica's last backward waits for, with a value for it or
    a gradient to take: then its reduces come behind the backward. Where reduces stand between cascades, of ranks with
    several stages, nothing comes behind it but those of its own stage. ``stage_of`` is the stage of every cascade.
    """
    tails = _last_backwards(lists, stage_of)
    while (tail := _holding_up(lists, tails, stage_of)) is not None:
        for rank in tail.peers:
            del tails[rank]
    return {rank: tail.backward for rank, tail in tails.items()}


@dataclass(frozen=True)
class _Tail:
    """The last backward or weight of a rank, and its index; behind it are at most sends of gradients."""

    rank: int
    backward: Instruction
    index: int

    @property
    def peers(self) -> tuple[int, ...]:
        return self.backward.peers or (self.rank,)


def _last_backwards(lists: Lists, stage_of: Mapping[str, str]) -> dict[int, _Tail]:
    last: dict[int, _Tail] = {}
    for rank, items in lists.items():
        handed_on = {item.target for item in items if item.op == "backward"}
        behind: set[tuple[str, str]] = set()
        for index in range(len(items) - 1, -1, -1):
            item = items[index]
            if item.op in BACKWARDS:
                if not behind or behind == {("reduce", stage_of[item.target])} or {op for op, _ in behind} == {"send"}:
                    last[rank] = _Tail(rank, item, index)
                break
            if item.op == "reduce" or (item.op == "send" and item.target in handed_on):
                behind.add((item.op, item.target))
            elif item.op != "free":
                break
    return {
        rank: tail
        for rank, tail in last.items()
        if all(peer in last and last[peer].backward.target == tail.backward.target for peer in tail.peers)
    }


def _holding_up(lists: Lists, tails: Mapping[int, _Tail], stage_of: Mapping[str, str]) -> _Tail | None:
    """A last backward behind which something comes that another waits for, where both start the same reduces."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, tail in tails.items():
        ranks_of[stage_of[tail.backward.target]].append(rank)
    for ranks in ranks_of.values():
        for tail in {tails[rank].backward.target: tails[rank] for rank in ranks}.values():
            others = [rank for rank in ranks if rank not in tail.peers]
            if others:
                behind = _behind(lists, tails, ranks_of, stage_of, tail.peers)
                if any(behind.get(rank, len(lists[rank])) <= tails[rank].index for rank in others):
                    return tail
    return None


def _behind(
    lists: Lists,
    tails: Mapping[int, _Tail],
    ranks_of: Mapping[str, Sequence[int]],
    stage_of: Mapping[str, str],
    begun: Sequence[int],
) -> dict[int, int]:
    """By rank, the index from which on everything comes behind the last backwards of the ranks ``begun``."""
    first_behind: dict[int, int] = {}
    coming = [(rank, tails[rank].index + 1) for rank in begun]
    while coming:
        rank, first = coming.pop()
        until = first_behind.get(rank, len(lists[rank]))
        first_behind[rank] = min(first, until)
        for index in range(first, until):
            coming += _met(lists, rank, lists[rank][index])
        if rank in tails and first <= tails[rank].index:  # and so the reduces that start inside it
            stage = stage_of[tails[rank].backward.target]
            coming += [(other, tails[other].index + 1) for other in ranks_of[stage]]
    return first_behind


def _met(lists: Lists, rank: int, item: Instruction) -> Iterator[tuple[int, int]]:
    """Where ranks come to what happens on several at once."""
    if item.op in _OTHER_END:
        yield item.peers[0], _last(lists[item.peers[0]], _OTHER_END[item.op], item.target, (rank,))
        return
    for peer in item.peers:
        yield peer, _last(lists[peer], item.op, item.target, item.peers)


def _last(items: Sequence[Instruction], op: str, target: str, peers: tuple[int, ...]) -> int:
    """What is asked for stands near the end."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if item.target == target and item.op == op and item.peers == peers:
            return index
    return len(items)
