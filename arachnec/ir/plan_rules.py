"""Rules about plans: degrees, times and ranks of cascades, and one reduce and step per trained stage.

In: a ``ModuleIndex`` whose names are right. Out: a diagnostic per mistake. The pass ``check`` proves the per-rank
programs of a lowered module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeAlias

from arachnec.ir.diagnostic import Diagnostic, Mistake, Span, counted
from arachnec.ir.figure_rules import FIGURE_RULES
from arachnec.ir.host_placement import PLACED, in_host, layers_in_host
from arachnec.ir.names import ModuleIndex, label
from arachnec.ir.nodes import Cascade, Instruction, Level, Module, Phase, Reduce, Step, integer, integers, quantity
from arachnec.ir.parameter_cells import cell_fits, cell_of, whole_cells
from arachnec.ir.printer import number, symbol, value_text
from arachnec.ir.sampling import branches_of
from arachnec.ir.sampling_rules import SAMPLING_RULES
from arachnec.ir.sparse_rules import SPARSE_RULES
from arachnec.ir.stage_sizes import layers_of, most_clips, saved_by_recomputing
from arachnec.ir.tensor_parallel import ranks_together

Problems: TypeAlias = Iterator[Diagnostic]
GRADIENT = (Phase.TRAIN, Phase.BACKWARD, Phase.WEIGHT)


def tolerance_of(module: Module) -> float:
    """Tolerance of planned times in ms, for rounding."""
    return 1e-6 + 1e-9 * max((cascade.end for cascade in module.cascades), default=0.0)


def cascades_fit_their_stage(index: ModuleIndex) -> Problems:
    for cascade in index.module.cascades:
        if cascade.clips and len(cascade.clips) != cascade.batch:
            listed = len(cascade.clips)
            yield Mistake(
                cascade.span,
                f"{label(cascade)} lists {listed} clips and says {cascade.batch}",
                label=f"`{cascade.batch} x` should be `{listed} x`",
            )
        stage = index.stages.get(cascade.stage)
        if stage is None:
            continue
        most, clips = most_clips(stage), cascade.batch // max(1, cascade.side)
        if most is not None and clips > most:
            yield Mistake(
                cascade.span,
                f"{label(cascade)} has {clips} clips in a forward, stage `{symbol(stage.name)}` takes {most}",
                help="partition the clips again; the model's graph was captured for that many",
            )
        if cascade.phase in GRADIENT and not stage.trained:
            yield Mistake(
                cascade.span,
                f"{label(cascade)} would train stage `@{stage.name}`, which is frozen",
                label="needs gradients",
                help=f"use `encode` or `forward`, or write `stage @{stage.name} trained`",
            )
        elif index.module.level >= Level.COSTED and not cascade.attrs.get("times"):
            wanted = {Phase.TRAIN: ("forward", "backward"), Phase.BACKWARD: ("backward",), Phase.WEIGHT: ("backward",)}
            for name in wanted.get(cascade.phase, ("forward",)):
                if name not in stage.attrs:
                    yield Mistake(
                        cascade.span,
                        f"nothing says how long {label(cascade)} takes",
                        label=f"no `times`, and stage `@{stage.name}` has no `{name}`",
                        help=f"give the stage `{name}`, a formula in ms, or the cascade `times`",
                    )


def graphs_are_known(index: ModuleIndex) -> Problems:
    for stage in index.module.stages:
        graphs = stage.attrs.get("graphs")
        if graphs not in (None, "shapes", "none"):
            yield Mistake(
                stage.attrs.span("graphs") or stage.span,
                f"{label(stage)} has graphs = {value_text(graphs)}",
                help='write "shapes", "none", or nothing: one graph for all shapes',
            )


def degrees_are_legal(index: ModuleIndex) -> Problems:
    cluster = index.module.cluster
    if index.module.level < Level.SCHEDULED or cluster is None:
        return
    for cascade in index.module.cascades:
        degree = cascade.degree
        stage = index.stages.get(cascade.stage)
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
            yield Mistake(_at(cascade, "degree"), f"{label(cascade)} has degree {degree}", label=reason)


def times_are_in_order(index: ModuleIndex) -> Problems:
    module = index.module
    if module.level < Level.SCHEDULED:
        return
    makespan, tolerance = quantity(module.attrs["makespan"]), tolerance_of(module)
    for cascade in module.cascades:
        start, end = cascade.start, cascade.end
        if end < start - tolerance:
            yield Mistake(
                _at(cascade, "end"),
                f"{label(cascade)} ends at {number(end)} ms and starts at {number(start)} ms",
                label="ends before it starts",
            )
        if end > makespan + tolerance:
            yield Mistake(
                _at(cascade, "end"),
                f"the makespan is {number(makespan)} ms, and {label(cascade)} ends at {number(end)} ms",
                label="ends after the makespan",
            )


def inputs_end_first(index: ModuleIndex) -> Problems:
    """Of plans; what the programs of a lowered module do is proved by ``check``."""
    if index.module.level not in (Level.SCHEDULED, Level.PLACED):
        return
    tolerance = tolerance_of(index.module)
    for cascade in index.module.cascades:
        for name in cascade.inputs:
            source = index.cascades.get(name)
            if source is not None and cascade.start < source.end - tolerance:
                start, end = number(cascade.start), number(source.end)
                yield Mistake(
                    _at(cascade, "start"),
                    f"{label(cascade)} starts at {start} ms, before its input `%{name}` ends at {end} ms",
                    label="starts too early",
                    help=f"start it at {end} ms or later",
                )


def ranks_are_there(index: ModuleIndex) -> Problems:
    cluster = index.module.cluster
    if cluster is None:
        return
    nodes: tuple[Cascade | Reduce | Step, ...] = (
        *index.module.cascades,
        *index.module.reductions,
        *index.module.steps,
    )
    for node in nodes:
        ranks = integers(node.attrs.get("ranks", ()))
        if not ranks and "ranks" in node.attrs and not isinstance(node, Cascade):
            yield Mistake(
                _at(node, "ranks"),
                f"{label(node)} names no ranks",
                label="an empty list",
                help="name the ranks that take part, or leave `ranks` out",
            )
        outside = next((rank for rank in ranks if not 0 <= rank < cluster.world), None)
        span = _at(node, "ranks")
        if outside is not None:
            last = cluster.world - 1
            yield Mistake(
                span,
                f"{label(node)} names rank {outside}, and the cluster ends at rank {last}",
                label="no such rank",
                help=f"the cluster has {cluster.nodes} x {cluster.gpus} ranks, 0 to {last}",
            )
        twice = next((rank for rank, count in Counter(ranks).items() if count > 1), None)
        if twice is not None:
            yield Mistake(span, f"{label(node)} names rank {twice} twice", label="each rank once")


def groups_fit_the_degree(index: ModuleIndex) -> Problems:
    if index.module.level < Level.PLACED:
        return
    for cascade in index.module.cascades:
        problem = _unconditional(cascade)
        if problem is not None:
            yield problem
            continue
        degree, ranks = cascade.degree, cascade.ranks
        deals = branches_of(cascade) if cascade.phase is Phase.DENOISE else cascade.batch
        if cascade.side < 1 or deals % cascade.side:
            yield Mistake(
                _at(cascade, "side"),
                f"{label(cascade)} runs {cascade.side} clips side by side and has {deals}",
                label="does not divide its clips",
                help=f"clips side by side are equally many on all ranks: write a divisor of {deals}",
            )
        elif len(ranks) != cascade.width:
            yield Mistake(
                _at(cascade, "ranks"),
                f"{label(cascade)} has degree {degree} and {counted(len(ranks), 'rank')}",
                label="one rank for each of its degree",
            )
        if "ulysses" in cascade.attrs or "ring" in cascade.attrs:
            ulysses, ring = (integer(cascade.attrs.get(name, 1)) for name in ("ulysses", "ring"))
            if ulysses * ring != degree or ulysses < 1:
                yield Mistake(
                    _at(cascade, "ulysses"),
                    f"{label(cascade)} has ulysses {ulysses} x ring {ring}, and degree {degree}",
                    label="the product is the degree",
                )
        yield from _shards(cascade)


def _unconditional(cascade: Cascade) -> Diagnostic | None:
    """What is wrong with the ranks of an unconditional branch of their own number."""
    if "unconditional" not in cascade.attrs:
        return None
    grid = integers(cascade.attrs["unconditional"])
    if cascade.phase is not Phase.DENOISE:
        reason = "and is no denoise"
    elif len(grid) != 2 or min(grid) < 1:
        reason = "which is no product of ranks"
    elif cascade.side != 2 or branches_of(cascade) != 2:
        reason = f"and has {branches_of(cascade)} branches, {cascade.side} side by side"
    elif "shards" in cascade.attrs or cascade.attrs.get("heads"):
        reason = "and lists what each rank has"
    elif grid[0] * grid[1] > cascade.tokens:
        reason = f"more ranks than its {cascade.tokens} tokens"
    else:
        return None
    shown = value_text(cascade.attrs["unconditional"])
    return Mistake(
        _at(cascade, "unconditional"),
        f"{label(cascade)} says unconditional = {shown}, {reason}",
        label="the ranks of its unconditional branch",
        help=(
            "write `[ulysses, ring]` of the unconditional branch where both branches lie side by side, `side = 2`, "
            "and share tokens evenly; or leave it out"
        ),
    )


def cells_are_whole(index: ModuleIndex) -> Problems:
    """A cell fits the cluster, and the cascades of its stage take whole cells."""
    cluster = index.module.cluster
    sizes = {
        stage.name: ranks_together(stage)
        for stage in index.module.stages
        if {"cell", "tensor_parallel"} & set(stage.attrs)
    }
    for name, size in sizes.items() if cluster else ():
        assert cluster is not None
        if not cell_fits(size, cluster.nodes, cluster.gpus):
            stage = index.stages[name]
            span = stage.attrs.span("cell") or stage.attrs.span("tensor_parallel") or stage.span
            yield Mistake(
                span,
                f"{label(stage)} is dealt out over cells of {size} ranks, and there are {cluster.nodes} x "
                f"{cluster.gpus}",
                label=f"cells of {size}",
                help="a cell divides the ranks of a machine, or holds whole machines and divides all ranks",
            )
            return
    for cascade in index.module.cascades if index.module.level >= Level.PLACED else ():
        size = sizes.get(cascade.stage, 1)
        if size > 1 and not whole_cells(cascade.ranks, size):
            ranks = value_text(cascade.ranks)
            yield Mistake(
                _at(cascade, "ranks"),
                f"{label(cascade)} takes ranks {ranks}, which are no whole cells of {size}",
                label="no whole cells",
                help=(
                    f"the members of a cell hold the parameters of `{symbol(cascade.stage)}` together, so they run its "
                    f"cascades together: name ranks {size} by {size}, from a multiple of {size} on"
                ),
            )


def host_parts_are_known(index: ModuleIndex) -> Problems:
    """What lies in host memory is a known part, with those before it; layers that come and go have a cell."""
    for stage in index.module.stages:
        listed = in_host(stage)
        if "host" not in stage.attrs:
            continue
        if not listed or listed != PLACED[: len(listed)] or (layers_in_host(stage) and cell_of(stage) is None):
            span = stage.attrs.span("host") or stage.span
            listed_text = ", ".join(f"`{name}`" for name in listed) or "nothing"
            yield Mistake(
                span,
                f"{label(stage)} has {listed_text} in host memory",
                label="no such list",
                help=(
                    '`host` is ["optimizer"], ["optimizer", "parameters"] or ["optimizer", "parameters", '
                    '"inputs"]; with parameters the stage has a `cell`, of one rank or more'
                ),
            )


def recomputed_blocks_are_there(index: ModuleIndex) -> Problems:
    """Of cascades and of their forward instructions."""
    stages = {cascade.name: index.stages.get(cascade.stage) for cascade in index.module.cascades}
    nodes: list[tuple[str, Cascade | Instruction]] = [(cascade.name, cascade) for cascade in index.module.cascades]
    for program in index.module.programs:
        nodes += [(step.target, step) for step in program.instructions if step.op == "forward"]
    for name, node in nodes:
        count, stage = node.attrs.get("recompute"), stages.get(name)
        if isinstance(count, bool) or not isinstance(count, int) or not count or stage is None:
            continue
        blocks, span = len(layers_of(stage)), node.attrs.span("recompute") or node.span
        if not blocks:
            stage_symbol = symbol(stage.name)
            yield Mistake(
                span,
                f"{label(node)} recomputes {count} blocks of `{stage_symbol}`, which does not say how many it has",
                label="no part of its blocks can be named",
                help=f"write `true` for all of them, or say of `{stage_symbol}` what its `layers` are",
            )
        elif not 0 < count <= blocks:
            yield Mistake(
                span,
                f"{label(node)} recomputes {count} of the {blocks} blocks of `{symbol(stage.name)}`",
                label="not a number of its blocks",
                help=f"write 0 to {blocks}, or `true` for all of them",
            )


def all_layers_say_what_they_spare(index: ModuleIndex) -> Problems:
    """What recomputing a layer saves is said of all of a stage's layers, or of none."""
    for stage in index.module.stages:
        if not stage.attrs.get("spared"):
            continue
        counts, layers = [count for count, _ in saved_by_recomputing(stage)], len(layers_of(stage))
        if sum(counts) != layers or min(counts) < 1:
            total = sum(counts)
            yield Mistake(
                stage.attrs.span("spared") or stage.span,
                f"{label(stage)} says of {total} layers what recomputing them saves, and has {layers}",
                label=f"runs of {total} layers together",
                help="every layer is in one run, in the order of `layers`",
            )


def _shards(cascade: Cascade) -> Problems:
    if "shards" not in cascade.attrs:
        return
    shards, span = integers(cascade.attrs["shards"]), _at(cascade, "shards")
    if len(shards) != cascade.degree:
        yield wrong_shards_error(
            span, label(cascade), f"for {counted(len(shards), 'rank')}", f"{cascade.degree}, its degree"
        )
    elif min(shards) < 0:
        yield wrong_shards_error(span, label(cascade), "below zero", "zero or more tokens")
    elif sum(shards) != cascade.tokens:
        expected = f"{cascade.tokens}, its tokens"
        yield wrong_shards_error(span, label(cascade), f"of {sum(shards)} tokens together", expected)


def a_rank_does_one_thing(index: ModuleIndex) -> Problems:
    """Of plans; what the programs of a lowered module do is proved by ``check``."""
    if index.module.level != Level.PLACED:
        return
    tolerance = tolerance_of(index.module)
    busy: dict[int, list[Cascade]] = {}
    for cascade in index.module.cascades:
        if cascade.end - cascade.start > tolerance:
            for rank in set(cascade.ranks):
                busy.setdefault(rank, []).append(cascade)
    reported = set()
    for rank, cascades in sorted(busy.items()):
        for first, second in pairwise(sorted(cascades, key=lambda c: (c.start, c.end))):
            if second.start < first.end - tolerance and (first.name, second.name) not in reported:
                reported.add((first.name, second.name))
                time = number(second.start)
                yield Mistake(
                    _at(second, "start"),
                    f"rank {rank} is in {label(second)} and in `%{first.name}` at once, at {time} ms",
                    label=f"starts while `%{first.name}` runs",
                    help="start it later, or on other ranks",
                )


def trained_stages_step(index: ModuleIndex) -> Problems:
    """A stage that gets gradients has one reduce and one step; several models may take turns, each with its own."""
    module = index.module
    if module.level < Level.SCHEDULED:
        return
    with_gradient = {cascade.stage for cascade in module.cascades if cascade.phase in GRADIENT}
    nodes: tuple[tuple[str, tuple[Reduce | Step, ...]], ...] = (("reduce", module.reductions), ("step", module.steps))
    for what, group in nodes:
        counts = Counter(node.stage for node in group)
        for stage in module.stages:
            count = counts[stage.name]
            if count > 1 or (count == 0 and stage.trained and stage.name in with_gradient):
                yield Mistake(
                    stage.span,
                    f"stage `@{stage.name}` is trained, and has {'no' if count == 0 else str(count)} `{what}`",
                    label="expected exactly one",
                    help=f"write `{what} @{stage.name}` once, after the cascades",
                )


def _at(node: Cascade | Reduce | Step, attribute: str) -> Span | None:
    return node.attrs.span(attribute) or node.span


PLAN_RULES: tuple[Callable[[ModuleIndex], Problems], ...] = (
    *FIGURE_RULES,
    cascades_fit_their_stage,
    graphs_are_known,
    degrees_are_legal,
    times_are_in_order,
    inputs_end_first,
    ranks_are_there,
    groups_fit_the_degree,
    cells_are_whole,
    host_parts_are_known,
    recomputed_blocks_are_there,
    all_layers_say_what_they_spare,
    a_rank_does_one_thing,
    trained_stages_step,
    *SAMPLING_RULES,
    *SPARSE_RULES,
)


def wrong_shards_error(span: Span | None, node: str, what: str, expected: str) -> Mistake:
    return Mistake(span, f"{node} has shards {what}", label=f"expected {expected}")
