"""What a rank keeps from plan to plan: the process groups that instructions need, and threads beside the training."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from arachnec.analysis.communicators import cascade_groups, family, heads_of
from arachnec.analysis.stage_ranks import learning_ranks
from arachnec.ir.nodes import Module, integers
from arachnec.runtime.handoffs import HandoffThreads
from arachnec.solver.budget import usable_cores


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


MOST_LOADERS = 4


@dataclass(frozen=True)
class RankThreads:
    """One that makes batches, those that load clips for encoders, and those of handoffs."""

    batches: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "batches"))
    loads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(loaders(), "loads"))
    handoffs: HandoffThreads = field(default_factory=HandoffThreads)

    def close(self) -> None:
        self.batches.shutdown(wait=False, cancel_futures=True)
        self.loads.shutdown(wait=False, cancel_futures=True)
        self.handoffs.close()


def spare_cores() -> int:
    """Cores of this rank beside the one that trains."""
    return max(0, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)


def loaders() -> int:
    """Threads that load clips: of this rank's cores all but one, and one where it has no more."""
    return min(MOST_LOADERS, max(1, spare_cores()))
