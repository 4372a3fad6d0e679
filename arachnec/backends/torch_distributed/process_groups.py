"""The process groups that a program's instructions need, and those that stay from plan to plan."""

from __future__ import annotations

from arachnec.analysis.communicators import cascade_groups
from arachnec.analysis.group_family import family, heads_of
from arachnec.ir.nodes import Module
from arachnec.ir.parameter_cells import cell_of, replicas
from arachnec.lowering.programs import resident_ranks


def family_groups(module: Module) -> tuple[tuple[int, ...], ...]:
    """The family of groups on which plans for this module's models and cluster mostly run."""
    assert module.cluster is not None
    return family(module.cluster, heads_of(module.stages))


def wanted_groups(module: Module) -> list[tuple[int, ...]]:
    """Every process group that collectives of cascades use; the same list on every rank."""
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(group for step in steps for group in cascade_groups(step)))


def wanted_gradient_groups(module: Module) -> list[tuple[int, ...]]:
    """The ranks of every gradient all-reduce; the same list on every rank."""
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(step.peers for step in steps if step.op == "reduce"))


def ranks_with_equal_parameters(module: Module) -> list[tuple[int, ...]]:
    """The ranks over which each optimizer is dealt out: between cells those of a shard, else those of a stage; the same
    list on every rank."""
    assert module.cluster is not None
    groups: list[tuple[int, ...]] = []
    for stage in module.stages:
        cell = cell_of(stage) or 1
        if not stage.trained or "sharded" not in stage.attrs:
            continue
        if cell > 1:
            groups += [replicas(first, cell, module.cluster.world) for first in range(cell)]
        else:
            groups.append(tuple(sorted(resident_ranks(module, module.cluster, stage))))
    return list(dict.fromkeys(groups))
