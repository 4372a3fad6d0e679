"""The structural rules of a module, one function each, over one index of its names.

What the per-rank programs of a lowered module must hold (no deadlock, every input there, memory) is proved by the
pass ``check``; here are the rules that need no proof.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from arachnec.ir import errors
from arachnec.ir.diagnostic import Diagnostic, counted
from arachnec.ir.nodes import (
    Cascade,
    Clip,
    Cluster,
    Fused,
    Graph,
    Instruction,
    Level,
    Module,
    Phase,
    Program,
    Reduce,
    Stage,
    Step,
    integer,
    integers,
    quantity,
)
from arachnec.ir.printer import number, percent, symbol
from arachnec.ir.span import Span
from arachnec.ir.values import Symbol

Found: TypeAlias = Iterator[Diagnostic]
GRADIENT = (Phase.TRAIN, Phase.BACKWARD, Phase.WEIGHT)


@dataclass(frozen=True)
class World:
    """A module and its names."""

    module: Module
    stages: dict[str, Stage]
    clips: dict[int, Clip]
    cascades: dict[str, Cascade]
    graphs: dict[str, Graph]


def world_of(module: Module) -> World:
    return World(
        module,
        {stage.name: stage for stage in module.stages},
        {clip.id: clip for clip in module.clips},
        {cascade.name: cascade for cascade in module.cascades},
        {graph.name: graph for graph in module.graphs},
    )


def slack_of(module: Module) -> float:
    """ms by which times may miss each other: what rounding does."""
    return 1e-6 + 1e-9 * max((cascade.end for cascade in module.cascades), default=0.0)


def label(node: object) -> str:
    """A node as messages call it: ``stage `@dit```, ``cascade `%1```."""
    if isinstance(node, Cascade):
        return f"cascade `{percent(node.name)}`"
    if isinstance(node, Clip):
        return f"clip {node.id}"
    if isinstance(node, Program):
        return f"the program of rank {node.rank}"
    if isinstance(node, Instruction):
        return f"`{node.op} {symbol(node.target) if node.op in ('reduce', 'step') else percent(node.target)}`"
    if isinstance(node, Reduce | Step):
        return f"`{type(node).__name__.lower()} {symbol(node.stage)}`"
    if isinstance(node, Module | Cluster | Stage | Graph | Fused):
        return f"{type(node).__name__.lower()} `{symbol(node.name)}`"
    raise TypeError(f"not a node: {node!r}")


def nodes_fit_the_level(world: World) -> Found:
    module, level = world.module, world.module.level
    groups: tuple[tuple[Level, tuple[Cascade | Reduce | Step | Program, ...]], ...] = (
        (Level.PARTITIONED, module.cascades),
        (Level.SCHEDULED, module.reductions),
        (Level.SCHEDULED, module.steps),
        (Level.LOWERED, module.programs),
    )
    for since, nodes in groups:
        if nodes and level < since:
            yield errors.EarlyNode(nodes[0].span, label(nodes[0]), level.word, since.word)
    only_graphs = level is Level.TRACED and not (module.clips or module.stages)
    if module.cluster is None and not only_graphs:
        yield errors.MissingNode(module.span, "cluster", level.word, "cluster @name { nodes = 1, gpus = 8, ... }")


def sizes_count(world: World) -> Found:
    if world.module.cluster:
        cluster = world.module.cluster
        rack = integer(cluster.attrs.get("rack", 1))
        yield from _at_least(cluster, 1, nodes=cluster.nodes, gpus=cluster.gpus, rack=rack)
        mixed = cluster.attrs.get("mixed")
        if isinstance(mixed, tuple):
            listed = sum(integer(row[0]) for row in mixed if isinstance(row, tuple))
            if listed != cluster.nodes:
                yield errors.WrongMix(cluster.attrs.span("mixed") or cluster.span, listed, cluster.nodes)
    for clip in world.module.clips:
        yield from _at_least(clip, 1, frames=clip.frames, height=clip.height, width=clip.width, tokens=clip.tokens)
    for cascade in world.module.cascades:
        yield from _at_least(cascade, 1, batch=cascade.batch)


def _at_least(node: Cluster | Clip | Cascade, least: int, **values: int) -> Found:
    for what, value in values.items():
        if value < least:
            yield errors.BadSize(node.attrs.span(what) or node.span, label(node), what, value, least)


def names_are_unique(world: World) -> Found:
    module = world.module
    yield from _duplicates((clip.id, clip) for clip in module.clips)
    yield from _duplicates((stage.name, stage) for stage in module.stages)
    yield from _duplicates((graph.name, graph) for graph in module.graphs)
    yield from _duplicates((cascade.name, cascade) for cascade in module.cascades)
    yield from _duplicates((program.rank, program) for program in module.programs)


def _duplicates(nodes: Iterable[tuple[object, Clip | Stage | Graph | Cascade | Program]]) -> Found:
    seen = set()
    for name, node in nodes:
        if name in seen:
            yield errors.DuplicateName(node.span, label(node))
        seen.add(name)


def references_resolve(world: World) -> Found:
    module = world.module
    for stage in module.stages if module.graphs else ():  # graphs may be kept in a file of their own
        for pair in stage.attrs.get("blocks", ()):  # type: ignore[union-attr]
            graph = pair[0]  # type: ignore[index]
            if isinstance(graph, Symbol) and graph.name not in world.graphs:
                yield _unknown(stage, f"graph `{symbol(graph.name)}`", graph.name, world.graphs, "blocks")
    for cascade in module.cascades:
        if cascade.stage not in world.stages:
            yield _unknown(cascade, f"stage `{symbol(cascade.stage)}`", cascade.stage, world.stages)
        for clip in cascade.clips if module.clips else ():
            if clip not in world.clips:
                yield _unknown(cascade, f"clip {clip}", str(clip), map(str, world.clips))
    ends: tuple[Reduce | Step, ...] = (*module.reductions, *module.steps)
    for node in ends:
        if node.stage not in world.stages:
            yield _unknown(node, f"stage `{symbol(node.stage)}`", node.stage, world.stages)
    readers: tuple[Cascade | Reduce, ...] = (*module.cascades, *module.reductions)
    for reader in readers:
        for name in reader.inputs:
            if name not in world.cascades:
                yield _unknown(reader, f"cascade `{percent(name)}`", name, world.cascades)


def _unknown(
    node: Stage | Cascade | Reduce | Step, what: str, name: str, known: Iterable[str], attribute: str = ""
) -> Diagnostic:
    names = list(known)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    mark = what.partition("`")[2][:1]
    shown = ", ".join(f"{mark}{item}" for item in names[:8]) + (", ..." if len(names) > 8 else "")
    remedy = f"did you mean `{mark}{close[0]}`?" if close else f"the module has {shown or 'none'}"
    return errors.UnknownReference(node.attrs.span(attribute) or node.span, label(node), what, remedy)


def inputs_come_first(world: World) -> Found:
    made = set()
    for cascade in world.module.cascades:
        for name in cascade.inputs:
            if name not in made:
                path = _path_back(world, name, cascade.name)
                if path:
                    shown = " -> ".join(map(percent, [cascade.name, *path]))
                    yield errors.Cycle(cascade.span, label(cascade), shown)
                elif name in world.cascades:
                    yield errors.UsedBeforeMade(cascade.span, label(cascade), name)
        made.add(cascade.name)


def _path_back(world: World, start: str, goal: str) -> list[str]:
    """Cascades from ``start`` along inputs to ``goal``; empty where there is no way."""
    came: dict[str, str | None] = {start: None}
    queue = [start]
    for name in queue:
        if name == goal:
            path = [name]
            while (before := came[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for other in world.cascades[name].inputs if name in world.cascades else ():
            if other not in came:
                came[other] = name
                queue.append(other)
    return []


def cascades_fit_their_stage(world: World) -> Found:
    for cascade in world.module.cascades:
        if cascade.clips and len(cascade.clips) != cascade.batch:
            yield errors.WrongBatch(cascade.span, label(cascade), len(cascade.clips), cascade.batch)
        stage = world.stages.get(cascade.stage)
        if stage is None:
            continue
        if cascade.phase in GRADIENT and not stage.trained:
            yield errors.FrozenStage(cascade.span, label(cascade), stage.name)
        elif world.module.level >= Level.COSTED and "times" not in cascade.attrs:
            wanted = {Phase.TRAIN: ("forward", "backward"), Phase.BACKWARD: ("backward",), Phase.WEIGHT: ("backward",)}
            for name in wanted.get(cascade.phase, ("forward",)):
                if name not in stage.attrs:
                    yield errors.NoCost(cascade.span, label(cascade), stage.name, name)


def degrees_are_legal(world: World) -> Found:
    cluster = world.module.cluster
    if world.module.level < Level.SCHEDULED or cluster is None:
        return
    for cascade in world.module.cascades:
        degree = cascade.degree
        stage = world.stages.get(cascade.stage)
        listed = integers(stage.attrs["degrees"]) if stage and "degrees" in stage.attrs else None
        timed = [integer(pair[0]) for pair in cascade.attrs.get("times", ())]  # type: ignore[index, union-attr]
        reason = None
        if not 1 <= degree <= cluster.world:
            reason = f"the cluster has {counted(cluster.world, 'rank')}"
        elif listed is not None and degree not in listed:
            reason = f"stage `{symbol(cascade.stage)}` allows {', '.join(map(str, listed))}"
        elif timed and degree not in timed:
            reason = f"its `times` list {', '.join(map(str, timed))}"
        if reason:
            yield errors.IllegalDegree(_at(cascade, "degree"), label(cascade), degree, reason)


def times_are_in_order(world: World) -> Found:
    module = world.module
    if module.level < Level.SCHEDULED:
        return
    makespan, slack = quantity(module.attrs["makespan"]), slack_of(module)
    for cascade in module.cascades:
        start, end = cascade.start, cascade.end
        if end < start - slack:
            yield errors.EndsBeforeStart(_at(cascade, "end"), label(cascade), number(start), number(end))
        if end > makespan + slack:
            yield errors.WrongMakespan(_at(cascade, "end"), label(cascade), number(makespan), number(end))


def inputs_end_first(world: World) -> Found:
    """Of plans; what the programs of a lowered module do is proved by ``check``."""
    if world.module.level not in (Level.SCHEDULED, Level.PLACED):
        return
    slack = slack_of(world.module)
    for cascade in world.module.cascades:
        for name in cascade.inputs:
            source = world.cascades.get(name)
            if source is not None and cascade.start < source.end - slack:
                start, end = number(cascade.start), number(source.end)
                yield errors.StartsTooEarly(_at(cascade, "start"), label(cascade), start, name, end)


def ranks_are_there(world: World) -> Found:
    cluster = world.module.cluster
    if cluster is None:
        return
    nodes: tuple[Cascade | Reduce | Step, ...] = (
        *world.module.cascades,
        *world.module.reductions,
        *world.module.steps,
    )
    for node in nodes:
        ranks = integers(node.attrs.get("ranks", ()))
        outside = next((rank for rank in ranks if not 0 <= rank < cluster.world), None)
        span = _at(node, "ranks")
        if outside is not None:
            last = cluster.world - 1
            yield errors.RankOutside(span, label(node), outside, last, cluster.nodes, cluster.gpus)
        twice = next((rank for rank, count in Counter(ranks).items() if count > 1), None)
        if twice is not None:
            yield errors.RepeatedRank(span, label(node), twice)


def groups_fit_the_degree(world: World) -> Found:
    if world.module.level < Level.PLACED:
        return
    for cascade in world.module.cascades:
        degree, ranks = cascade.degree, cascade.ranks
        if len(ranks) != degree:
            yield errors.WrongRankCount(_at(cascade, "ranks"), label(cascade), degree, counted(len(ranks), "rank"))
        if "ulysses" in cascade.attrs or "ring" in cascade.attrs:
            ulysses, ring = (integer(cascade.attrs.get(name, 1)) for name in ("ulysses", "ring"))
            if ulysses * ring != degree or ulysses < 1:
                yield errors.WrongProduct(_at(cascade, "ulysses"), label(cascade), ulysses, ring, degree)
        yield from _shards(cascade)


def _shards(cascade: Cascade) -> Found:
    if "shards" not in cascade.attrs:
        return
    shards, span = integers(cascade.attrs["shards"]), _at(cascade, "shards")
    if len(shards) != cascade.degree:
        yield errors.WrongShards(
            span, label(cascade), f"for {counted(len(shards), 'rank')}", f"{cascade.degree}, its degree"
        )
    elif min(shards) < 0:
        yield errors.WrongShards(span, label(cascade), "below zero", "zero or more tokens")
    elif sum(shards) != cascade.tokens:
        expected = f"{cascade.tokens}, its tokens"
        yield errors.WrongShards(span, label(cascade), f"of {sum(shards)} tokens together", expected)


def a_rank_does_one_thing(world: World) -> Found:
    """Of plans; what the programs of a lowered module do is proved by ``check``."""
    if world.module.level != Level.PLACED:
        return
    slack = slack_of(world.module)
    busy: dict[int, list[Cascade]] = {}
    for cascade in world.module.cascades:
        if cascade.end - cascade.start > slack:
            for rank in set(cascade.ranks):
                busy.setdefault(rank, []).append(cascade)
    told = set()
    for rank, cascades in sorted(busy.items()):
        for first, second in pairwise(sorted(cascades, key=lambda c: (c.start, c.end))):
            if second.start < first.end - slack and (first.name, second.name) not in told:
                told.add((first.name, second.name))
                time = number(second.start)
                yield errors.TwoAtOnce(_at(second, "start"), rank, label(second), first.name, time)


def trained_stages_step(world: World) -> Found:
    """A stage that gets gradients has one reduce and one step; several models may take turns, each with its own."""
    module = world.module
    if module.level < Level.SCHEDULED:
        return
    with_gradient = {cascade.stage for cascade in module.cascades if cascade.phase in GRADIENT}
    nodes: tuple[tuple[str, tuple[Reduce | Step, ...]], ...] = (("reduce", module.reductions), ("step", module.steps))
    for what, found in nodes:
        counts = Counter(node.stage for node in found)
        for stage in module.stages:
            count = counts[stage.name]
            if count > 1 or (count == 0 and stage.trained and stage.name in with_gradient):
                yield errors.NotReduced(stage.span, stage.name, "no" if count == 0 else str(count), what)


def graphs_are_ordered(world: World) -> Found:
    for graph in world.module.graphs:
        made = {item.name for item in graph.inputs}
        for op in graph.ops:
            for operand in op.operands:
                if operand not in made:
                    yield _operand(f"`{percent(op.name)}` of {label(graph)}", op.span, operand, made)
            if op.name in made:
                yield errors.DuplicateName(op.span, f"`{percent(op.name)}` in {label(graph)}")
            made.add(op.name)
        for name in graph.outputs:
            if name not in made:
                yield _operand(f"the result of {label(graph)}", graph.span, name, made)


def fused_regions_are_apart(world: World) -> Found:
    """Regions name operations of their graph, each operation is in one region, and no region waits for itself."""
    for graph in world.module.graphs:
        ops = {op.name for op in graph.ops}
        owner: dict[str, str] = {}
        names: set[str] = set()
        for region in graph.fused:
            if region.name in names:
                yield errors.DuplicateName(region.span, f"{label(region)} in {label(graph)}")
            names.add(region.name)
            for name in region.ops:
                if name not in ops:
                    close = difflib.get_close_matches(name, sorted(ops), 1)
                    remedy = f"did you mean `{percent(close[0])}`?" if close else f"name operations of {label(graph)}"
                    yield errors.UnknownFusedOp(region.span, label(region), name, remedy)
                elif name in owner:
                    yield errors.FusedTwice(region.span, label(region), name, owner[name])
                else:
                    owner[name] = region.name
        if cycle := _waits_for_itself(graph, owner):
            span = next(region.span for region in graph.fused if region.name == cycle)
            yield errors.FusedCycle(span, f"fused `{symbol(cycle)}`")


def _waits_for_itself(graph: Graph, owner: dict[str, str]) -> str | None:
    """A region that reads, through operations outside it, what it makes itself."""
    unit = {op.name: "@" + owner[op.name] if op.name in owner else op.name for op in graph.ops}
    edges: dict[str, set[str]] = {name: set() for name in unit.values()}
    for op in graph.ops:
        edges[unit[op.name]] |= {unit[x] for x in op.operands if x in unit} - {unit[op.name]}
    ready = [name for name, before in edges.items() if not before]
    after: dict[str, list[str]] = {name: [] for name in edges}
    for name, before in edges.items():
        for other in before:
            after[other].append(name)
    while ready:
        done = ready.pop()
        edges.pop(done)
        for name in after[done]:
            edges[name].discard(done)
            if not edges[name]:
                ready.append(name)
    return next((name[1:] for name in edges if name.startswith("@")), None)


def _operand(node: str, span: Span | None, operand: str, made: set[str]) -> Diagnostic:
    close = difflib.get_close_matches(operand, sorted(made), 1)
    remedy = f"did you mean `{percent(close[0])}`?" if close else "make it an input of the graph, or move its op above"
    return errors.UnknownOperand(span, node, operand, remedy)


def _at(node: Cascade | Reduce | Step, attribute: str) -> Span | None:
    return node.attrs.span(attribute) or node.span


NAMES: tuple[Callable[[World], Found], ...] = (
    nodes_fit_the_level,
    sizes_count,
    names_are_unique,
    references_resolve,
    inputs_come_first,
    graphs_are_ordered,
    fused_regions_are_apart,
)
"""Asked first; where one finds a mistake, the others would only repeat it."""

PLANS: tuple[Callable[[World], Found], ...] = (
    cascades_fit_their_stage,
    degrees_are_legal,
    times_are_in_order,
    inputs_end_first,
    ranks_are_there,
    groups_fit_the_degree,
    a_rank_does_one_thing,
    trained_stages_step,
)
