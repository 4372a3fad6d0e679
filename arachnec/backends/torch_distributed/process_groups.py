"""The process groups that a program's instructions need, and those that stay from plan to plan."""

from __future__ import annotations

from collections.abc import Mapping

from arachnec.analysis.group_family import family, heads_of
from arachnec.backends.torch_distributed.interpreter import grid_of
from arachnec.backends.torch_distributed.side_by_side import parts_of
from arachnec.ir.nodes import Cascade, Instruction, Module
from arachnec.kernels.attention.process_groups import subgroups


def family_groups(module: Module) -> tuple[tuple[int, ...], ...]:
    """The family of groups on which plans for this module's models and cluster mostly run."""
    assert module.cluster is not None
    return family(module.cluster, heads_of(module.stages))


def wanted_groups(module: Module) -> list[tuple[int, ...]]:
    """Every process group that collectives of cascades use; the same list on every rank."""
    cascades = {cascade.name: cascade for cascade in module.cascades}
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(group for step in steps for group in _groups_of(step, cascades)))


def wanted_gradient_groups(module: Module) -> list[tuple[int, ...]]:
    """The ranks of every gradient all-reduce; the same list on every rank."""
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(step.peers for step in steps if step.op == "reduce"))


def _groups_of(step: Instruction, cascades: Mapping[str, Cascade]) -> tuple[tuple[int, ...], ...]:
    if len(step.peers) < 2:
        return ()
    if step.op == "encode":
        return (step.peers,)
    if step.op == "forward":
        grids = [(part.peers, grid_of(part, cascades[step.target])) for part in parts_of(step)]
        return tuple(group for ranks, (_, ulysses, ring) in grids for group in subgroups(ranks, ulysses, ring))
    return ()
