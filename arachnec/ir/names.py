"""The names of a module: nodes by name, what messages call them, and the rules that names are unique and known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.ir.diagnostic import Diagnostic, Mistake, Span, close_to
from arachnec.ir.limits import MOST_GPUS
from arachnec.ir.nodes import (
    Cascade,
    Clip,
    Cluster,
    Fused,
    Graph,
    Instruction,
    Level,
    Module,
    Program,
    Reduce,
    Stage,
    Step,
    integer,
)
from arachnec.ir.printer import percent, symbol
from arachnec.ir.values import Symbol


@dataclass(frozen=True)
class ModuleIndex:
    """A module and its nodes by name."""

    module: Module
    stages: dict[str, Stage]
    clips: dict[int, Clip]
    cascades: dict[str, Cascade]
    graphs: dict[str, Graph]


def index_of(module: Module) -> ModuleIndex:
    return ModuleIndex(
        module,
        {stage.name: stage for stage in module.stages},
        {clip.id: clip for clip in module.clips},
        {cascade.name: cascade for cascade in module.cascades},
        {graph.name: graph for graph in module.graphs},
    )


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


Problems: TypeAlias = Iterator[Diagnostic]


def nodes_fit_the_level(index: ModuleIndex) -> Problems:
    module, level = index.module, index.module.level
    groups: tuple[tuple[Level, tuple[Cascade | Reduce | Step | Program, ...]], ...] = (
        (Level.PARTITIONED, module.cascades),
        (Level.SCHEDULED, module.reductions),
        (Level.SCHEDULED, module.steps),
        (Level.LOWERED, module.programs),
    )
    for since, nodes in groups:
        if nodes and level < since:
            yield Mistake(
                nodes[0].span,
                f"{label(nodes[0])} cannot stand in a {level.word} module",
                label=f"only from level {since.word} on",
                help=f'remove it, or say `level = "{since.word}"`',
            )
    only_graphs = level is Level.TRACED and not (module.clips or module.stages)
    if module.cluster is None and not only_graphs:
        yield Mistake(
            module.span,
            "the module has no cluster",
            label=f"a {level.word} module needs it",
            help="write `cluster @name { nodes = 1, gpus = 8, ... }`",
        )


def sizes_are_positive(index: ModuleIndex) -> Problems:
    if index.module.cluster:
        cluster = index.module.cluster
        rack = integer(cluster.attrs.get("rack", 1))
        yield from _at_least(cluster, 1, nodes=cluster.nodes, gpus=cluster.gpus, rack=rack)
        if cluster.nodes * cluster.gpus > MOST_GPUS:
            place = cluster.attrs.span("nodes" if cluster.nodes > cluster.gpus else "gpus") or cluster.span
            yield Mistake(
                place,
                f"the cluster has {cluster.nodes} nodes of {cluster.gpus}, more than {MOST_GPUS} GPUs",
                label="more than is planned for",
            )
        mixed = cluster.attrs.get("mixed")
        if isinstance(mixed, tuple):
            listed = sum(integer(row[0]) for row in mixed if isinstance(row, tuple))
            if listed != cluster.nodes:
                yield Mistake(
                    cluster.attrs.span("mixed") or cluster.span,
                    f"`mixed` lists {listed} nodes, the cluster has {cluster.nodes}",
                    label="the first number of each row counts nodes",
                    help="list every node once, in order",
                )
    for clip in index.module.clips:
        yield from _at_least(clip, 1, frames=clip.frames, height=clip.height, width=clip.width, tokens=clip.tokens)
    for cascade in index.module.cascades:
        yield from _at_least(cascade, 1, batch=cascade.batch)


def _at_least(node: Cluster | Clip | Cascade, least: int, **values: int) -> Problems:
    for what, value in values.items():
        if value < least:
            yield Mistake(
                node.attrs.span(what) or node.span,
                f"{label(node)} has {what} = {value}",
                label=f"expected {least} or more",
            )


def names_are_unique(index: ModuleIndex) -> Problems:
    module = index.module
    yield from _duplicates((clip.id, clip) for clip in module.clips)
    yield from _duplicates((stage.name, stage) for stage in module.stages)
    yield from _duplicates((graph.name, graph) for graph in module.graphs)
    yield from _duplicates((cascade.name, cascade) for cascade in module.cascades)
    yield from _duplicates((program.rank, program) for program in module.programs)


def _duplicates(nodes: Iterable[tuple[object, Clip | Stage | Graph | Cascade | Program]]) -> Problems:
    seen = set()
    for name, node in nodes:
        if name in seen:
            yield duplicate_name_error(node.span, label(node))
        seen.add(name)


def references_resolve(index: ModuleIndex) -> Problems:
    module = index.module
    for stage in module.stages if module.graphs else ():  # graphs may be kept in a file of their own
        for pair in stage.attrs.get("blocks", ()):  # type: ignore[union-attr]
            graph = pair[0]  # type: ignore[index]
            if isinstance(graph, Symbol) and graph.name not in index.graphs:
                yield _unknown(stage, f"graph `{symbol(graph.name)}`", graph.name, index.graphs, "blocks")
    models, decoder = module.attrs.get("models", ()), module.attrs.get("decoder")
    for name in (*(models if isinstance(models, tuple) else ()), *((decoder,) if decoder is not None else ())):
        if name not in index.stages:
            attribute = "decoder" if name == decoder else "models"
            yield _unknown(module, f"stage `{symbol(str(name))}`", str(name), index.stages, attribute)
    for cascade in module.cascades:
        if cascade.stage not in index.stages:
            yield _unknown(cascade, f"stage `{symbol(cascade.stage)}`", cascade.stage, index.stages)
        for clip in cascade.clips if module.clips else ():
            if clip not in index.clips:
                yield _unknown(cascade, f"clip {clip}", str(clip), map(str, index.clips))
    ends: tuple[Reduce | Step, ...] = (*module.reductions, *module.steps)
    for node in ends:
        if node.stage not in index.stages:
            yield _unknown(node, f"stage `{symbol(node.stage)}`", node.stage, index.stages)
    readers: tuple[Cascade | Reduce, ...] = (*module.cascades, *module.reductions)
    for reader in readers:
        for name in reader.inputs:
            if name not in index.cascades:
                yield _unknown(reader, f"cascade `{percent(name)}`", name, index.cascades)


def _unknown(
    node: Module | Stage | Cascade | Reduce | Step, what: str, name: str, known: Iterable[str], attribute: str = ""
) -> Diagnostic:
    names = list(known)
    close = close_to(name, names, 0.5)
    mark = what.partition("`")[2][:1]
    shown = ", ".join(f"{mark}{item}" for item in names[:8]) + (", ..." if len(names) > 8 else "")
    remedy = f"did you mean `{mark}{close[0]}`?" if close else f"the module has {shown or 'none'}"
    return Mistake(
        node.attrs.span(attribute) or node.span,
        f"{label(node)} speaks of {what}, which is not in the module",
        label=f"there is no {what}",
        help=remedy,
    )


def inputs_come_first(index: ModuleIndex) -> Problems:
    defined = set()
    for cascade in index.module.cascades:
        for name in cascade.inputs:
            if name not in defined:
                path = _path_back(index, name, cascade.name)
                if path:
                    shown = " -> ".join(map(percent, [cascade.name, *path]))
                    yield Mistake(
                        cascade.span,
                        f"{label(cascade)} waits for itself: {shown}",
                        label="in a cycle",
                        help="remove one of these inputs",
                    )
                elif name in index.cascades:
                    yield Mistake(
                        cascade.span,
                        f"{label(cascade)} reads `%{name}`, which stands after it",
                        label=f"reads `%{name}`",
                        help=f"move `%{name}` above: inputs come before their use",
                    )
        defined.add(cascade.name)


def _path_back(index: ModuleIndex, start: str, goal: str) -> list[str]:
    """Cascades from ``start`` along inputs to ``goal``; empty where there is no way."""
    previous: dict[str, str | None] = {start: None}
    queue = [start]
    for name in queue:
        if name == goal:
            path = [name]
            while (before := previous[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for other in index.cascades[name].inputs if name in index.cascades else ():
            if other not in previous:
                previous[other] = name
                queue.append(other)
    return []


def graphs_are_ordered(index: ModuleIndex) -> Problems:
    for graph in index.module.graphs:
        defined = {item.name for item in graph.inputs}
        for op in graph.ops:
            for operand in op.operands:
                if operand not in defined:
                    yield _operand(f"`{percent(op.name)}` of {label(graph)}", op.span, operand, defined)
            if op.name in defined:
                yield duplicate_name_error(op.span, f"`{percent(op.name)}` in {label(graph)}")
            defined.add(op.name)
        for name in graph.outputs:
            if name not in defined:
                yield _operand(f"the result of {label(graph)}", graph.span, name, defined)


def fused_regions_are_apart(index: ModuleIndex) -> Problems:
    """Regions name operations of their graph, each operation is in one region, and no region waits for itself."""
    for graph in index.module.graphs:
        ops = {op.name for op in graph.ops}
        owner: dict[str, str] = {}
        names: set[str] = set()
        for region in graph.fused:
            if region.name in names:
                yield duplicate_name_error(region.span, f"{label(region)} in {label(graph)}")
            names.add(region.name)
            for name in region.ops:
                if name not in ops:
                    close = close_to(name, sorted(ops))
                    remedy = f"did you mean `{percent(close[0])}`?" if close else f"name operations of {label(graph)}"
                    yield Mistake(
                        region.span,
                        f"{label(region)} fuses `%{name}`, which its graph does not have",
                        label=f"no operation `%{name}`",
                        help=remedy,
                    )
                elif name in owner:
                    yield Mistake(
                        region.span,
                        f"{label(region)} fuses `%{name}`, which is in `@{owner[name]}`",
                        label=f"the second region with `%{name}`",
                        help="an operation runs once: leave it out of one of them",
                    )
                else:
                    owner[name] = region.name
        if cycle := _waits_for_itself(graph, owner):
            span = next(region.span for region in graph.fused if region.name == cycle)
            yield Mistake(
                span,
                f"fused `{symbol(cycle)}` waits for itself: something outside it reads what it makes, and it reads "
                "that",
                label="neither can run first",
                help="split the region where its value leaves it",
            )


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
        unblocked = ready.pop()
        edges.pop(unblocked)
        for name in after[unblocked]:
            edges[name].discard(unblocked)
            if not edges[name]:
                ready.append(name)
    return next((name[1:] for name in edges if name.startswith("@")), None)


def _operand(node: str, span: Span | None, operand: str, defined: set[str]) -> Diagnostic:
    close = close_to(operand, sorted(defined))
    remedy = f"did you mean `{percent(close[0])}`?" if close else "make it an input of the graph, or move its op above"
    return Mistake(
        span,
        f"{node} reads `%{operand}`, which nothing before it makes",
        label=f"no `%{operand}` above",
        help=remedy,
    )


NAME_RULES: tuple[Callable[[ModuleIndex], Problems], ...] = (
    nodes_fit_the_level,
    sizes_are_positive,
    names_are_unique,
    references_resolve,
    inputs_come_first,
    graphs_are_ordered,
    fused_regions_are_apart,
)


def duplicate_name_error(span: Span | None, node: str) -> Mistake:
    return Mistake(span, f"there are two of {node}", label="the second", help="give each its own name")
