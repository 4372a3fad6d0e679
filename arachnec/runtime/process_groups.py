"""The process groups that a program's instructions need, and those that stay from plan to plan."""

from __future__ import annotations

from arachnec.analysis.communicators import cascade_groups, family, heads_of
from arachnec.analysis.stage_ranks import learning_ranks
from arachnec.ir.nodes import Module, integers


def family_groups(module: Module) -> tuple[tuple[int, ...], ...]:
    """The family of groups on which plans for this module's models and cluster mostly run."""
    assert module.cluster is not None
    return family(module.cluster, heads_of(module.stages))


def wanted_groups(module: Module) -> list[tuple[int, ...]]:
    """Every process group that collectives of cascades use; the same list on every rank."""
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(group for step in steps for group in cascade_groups(step)))


def wanted_gradient_groups(module: Module) -> list[tuple[int, ...]]:
    """The ranks of every gradient all-reduce, gather of updates, and norm but of cells; where layers have predictors
    all ranks, and those of each stage. The same list on every rank."""
    steps = [step for program in module.programs for step in program.instructions]
    cells = {integers(step.attrs["cell"]) for step in steps if "cell" in step.attrs}
    norms = [step.peers for step in steps if step.op == "norm" and step.peers not in cells]
    learning = [] if module.cluster is None else learning_ranks(module, module.cluster)
    reduced = (step.peers for step in steps if step.op in ("gather", "reduce"))
    return list(dict.fromkeys([*reduced, *norms, *learning]))
