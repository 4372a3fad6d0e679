"""Rule 6, of stages that lie in their hosts' memory in part: what comes from there comes, and the hosts hold it.

That no layer is read before it is brought in is rule 5: a layer from the host is gathered and released like another.
Instructions claim to copy as much as follows from the stage, the cascade and their own lists, or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.stage_handoffs import forward_of
from arachnec.analysis.stage_ranks import resident_ranks
from arachnec.analysis.uses import Values, gib, rank_list, written
from arachnec.cluster.device_specs import stated_for, usable_host_memory
from arachnec.cluster.topology import node_of
from arachnec.cost.host_memory import reduce_copies, step_copies, with_host_copies
from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.host_placement import HOST, in_host, inputs_in_host, layers_in_host
from arachnec.ir.nodes import Cascade, Instruction, Program, Stage, integer, quantity
from arachnec.ir.stage_sizes import gib as gib_of
from arachnec.ir.stage_sizes import recomputed_blocks
from arachnec.ir.values import Attributes, Quantity

OPS = ("forward", "backward", "weight")
TOLERANCE_GIB = 1e-9
TOLERANCE = 1e-6  # of a sum that was printed


def check_host_memory(values: Values) -> Iterator[Diagnostic]:
    in_hosts = {stage.name: (layers_in_host(stage), inputs_in_host(stage)) for stage in values.module.stages}
    forwards = {cascade.name: forward_of(cascade, values.cascades).name for cascade in values.module.cascades}
    for program in values.module.programs:
        yield from _copies(values, program, in_hosts, forwards)
    yield from _claims(values)
    yield from _bounds(values)


def _copies(
    values: Values, program: Program, in_hosts: Mapping[str, tuple[bool, bool]], forwards: Mapping[str, str]
) -> Iterator[Diagnostic]:
    """``in_hosts``: whether a stage's layers lie there, and inputs of its blocks; ``forwards``: of each cascade."""
    gone: dict[str, tuple[int, ...]] = {}  # by cascade, the blocks that run again and whose inputs are in the host
    for step in program.instructions:
        if step.op not in OPS:
            continue
        cascade = values.cascades[step.target]
        there, inputs_there = in_hosts[cascade.stage]
        if there != (step.attrs.get("place") == HOST):
            reason = "lie in the host" if there else "do not lie in the host"
            yield Mistake(
                step.span,
                f"rank {program.rank} has `{written(step)}`, and layers of @{cascade.stage} {reason}",
                kind="wrong place",
                label="from another place",
                help='`place = "host"` stands where a stage has "parameters" in its `host`, and nowhere else',
            )
        if step.op == "weight":
            continue
        if step.op == "forward":
            stage = values.module.stage(cascade.stage) if inputs_there else None
            again = recomputed_blocks(step.attrs.get("recompute"), stage) if stage else 0
            gone[step.target] = tuple(range(again))
        blocks, word = gone.get(forwards[step.target], ()), "offload" if step.op == "forward" else "reload"
        listed = layers_listed(step, word)
        if listed != blocks:
            found, expected = (rank_list(run) if run else "nothing" for run in (listed, blocks))
            yield Mistake(
                step.span,
                f"rank {program.rank} has `{written(step)}` with {word} = {found}, and it is {expected}",
                kind="wrong inputs",
                label="other blocks",
                help=(
                    "inputs of blocks that run again go to the host once, and come back once: `offload` of the "
                    "forward and `reload` of the backward name these blocks"
                ),
            )


def host_peak(program: Program, cascades: Mapping[str, Cascade]) -> tuple[float, float]:
    """GiB that a rank keeps in its host's memory: throughout, and of blocks' inputs at most. ``cascades`` by name."""
    state = quantity(program.attrs["host_state"]) if "host_state" in program.attrs else 0.0
    kept: dict[str, float] = {}
    most = 0.0
    for step in program.instructions:
        if step.op == "forward":
            kept[step.target] = gib(step, "host")
            most = max(most, sum(kept.values()))
        elif step.op == "backward":
            kept.pop(forward_of(cascades[step.target], cascades).name, None)
    return state, most


def _claims(values: Values) -> Iterator[Diagnostic]:
    """What a program says to keep in its host is what its stages do, whatever it claims."""
    module = values.module
    assert module.cluster is not None
    kept = [(stage, resident_ranks(module, module.cluster, stage)) for stage in module.stages if in_host(stage)]
    for program in module.programs:
        right = sum(gib_of(stage.attrs.get("host_state")) for stage, ranks in kept if program.rank in ranks)
        claimed = gib_of(program.attrs.get("host_state"))
        if claimed < right * (1 - TOLERANCE):
            yield Mistake(
                program.span,
                f"program rank {program.rank} claims {claimed:.3f} GiB of its host, its stages keep {right:.3f} there",
                kind="host state too low",
                label=f"host_state = {claimed:.3f} GiB",
                help=f"`host_state` is the sum over the stages on the rank: write `host_state = {right:.6g} GiB`",
            )


def _bounds(values: Values) -> Iterator[Diagnostic]:
    cluster = values.module.cluster
    assert cluster is not None
    nodes: dict[int, list[tuple[Program, float, float]]] = defaultdict(list)
    for program in values.module.programs:
        nodes[node_of(cluster, program.rank)].append((program, *host_peak(program, values.cascades)))
    usable = usable_host_memory(cluster)
    for node, ranks in nodes.items():
        state, inputs = (sum(sizes) for sizes in list(zip(*ranks, strict=True))[1:])
        need = state + inputs
        if need > usable + TOLERANCE_GIB:
            first, *own = max(ranks, key=lambda rank: rank[1] + rank[2])
            here, stated = sum(own), stated_for(need)
            yield Mistake(
                first.span,
                f"node {node} keeps {need:.2f} GiB in its host's memory, there are {usable:.2f}",
                kind="host out of memory",
                label=f"{here:.2f} GiB of them on this rank",
                help=(
                    f"{state:.2f} GiB are parameters, gradients and optimizer of its ranks, {inputs:.2f} inputs of "
                    f"blocks; give the cluster `host_memory = {stated:.0f} GiB`, of which a tenth stays free, or "
                    "put less there"
                ),
            )


WORDS = {"host": " GiB", "from_host": "", "to_host": ""}  # with their units as they are written


def check_host_copies(values: Values) -> Iterator[Diagnostic]:
    stages = {stage.name: stage for stage in values.module.stages if in_host(stage)}
    if not stages:
        return
    for program in values.module.programs:
        copying = with_host_copies(program.instructions, values.cascades, stages)
        for step, right in zip(program.instructions, copying, strict=True):
            cascade = values.cascades.get(step.target)
            stage = stages.get(step.target if cascade is None else cascade.stage)
            if stage is None:
                continue
            least = right.attrs if cascade is not None else _of_gradients(step, stage)
            for word, unit in WORDS.items():
                claimed, size = _size(step.attrs, word), _size(least, word)
                if claimed < size * (1 - TOLERANCE):
                    found, expected = f"{claimed:.10g}{unit}", f"{size:.10g}{unit}"
                    yield Mistake(
                        step.span,
                        f"rank {program.rank} has `{written(step)}` with {word} = {found}, and it is {expected}",
                        kind="host copy too small",
                        label=f"{word} = {found}",
                        help=(
                            f"that follows from what @{stage.name} has in its `host`: write at least `{word} = "
                            f"{expected}`"
                        ),
                    )


def _of_gradients(step: Instruction, stage: Stage) -> Attributes:
    """What a reduce or an optimizer step of the stage copies."""
    if step.op == "step":
        return step_copies(stage)
    if step.op == "reduce" and "tied" not in step.attrs:
        return reduce_copies(stage, step.peers, integer(step.attrs["bytes"]))
    return Attributes()


def _size(attrs: Attributes, word: str) -> float:
    size = attrs.get(word, 0)
    return size.value if isinstance(size, Quantity) else float(integer(size))
