"""The ranks of stages: which hold parameters, and over which gradients are shared or clipped.

``stages`` are those of a module, ``places`` the ranks of every trained one by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from arachnec.ir.head_density import sparse_stages
from arachnec.ir.nodes import Cluster, Module, Phase, Stage, integers
from arachnec.ir.parameter_cells import cell_of, own_cell
from arachnec.ir.sampling import is_sampling
from arachnec.ir.stage_sizes import gib
from arachnec.ir.state_placement import GIB, held_twice


def resident_ranks(module: Module, cluster: Cluster, stage: Stage) -> frozenset[int]:
    """The ranks that hold a stage's parameters.

    Encoders and stages of ``train`` cascades are on every rank, so that the next iteration may place its cascades
    anywhere. Stages of a pipeline, and all that sample, are where their cascades run. ``ranks`` on the stage's reduce
    overrides both.
    """
    for reduce in module.reductions:
        if reduce.stage == stage.name and "ranks" in reduce.attrs:
            return frozenset(integers(reduce.attrs["ranks"]))
    own = [cascade for cascade in module.cascades if cascade.stage == stage.name]
    if any(cascade.phase in (Phase.TRAIN, Phase.ENCODE) for cascade in own) and not is_sampling(module):
        return frozenset(range(cluster.world))
    return frozenset(rank for cascade in own for rank in cascade.ranks)


def resident_gib(stages: Sequence[Stage], name: str) -> float:
    """GiB of ``state`` or ``host_state`` of these stages on one rank, what several of them hold counted once."""
    twice = held_twice(stages)
    both = twice.device if name == "state" else twice.host
    return math.fsum(gib(stage.attrs.get(name)) for stage in stages) - both / GIB


def learning_ranks(module: Module, cluster: Cluster) -> list[tuple[int, ...]]:
    """The groups of the all-reduces of ``learn``: of every stage with predictors the ranks that hold it, then all."""
    stages = sparse_stages(module).values()
    everyone = [tuple(range(cluster.world))] if stages else []
    return list(dict.fromkeys([*(tuple(sorted(resident_ranks(module, cluster, s))) for s in stages), *everyone]))


Ranks = tuple[int, ...]
Places = Mapping[str, Set[int]]


def tied_ranks(tied: Ranks, stages: Sequence[Stage], places: Places) -> Ranks:
    """The ranks that have a part of the gradient of what these parts of a model share, by their numbers.

    None where all lie on the same ranks: the all-reduce of one of them has it. But where they lie in cells or in host
    memory, what they share is whole on all ranks, and a cell's reduce-scatters leave it out.
    """
    parts = tied_parts(tied, stages)
    owned = [frozenset(places.get(part.name, ())) for part in parts]
    apart = len(set(owned)) > 1 or any(cell_of(part) is not None for part in parts)
    return tuple(sorted(frozenset().union(*owned))) if apart else ()


def tied_parts(tied: Ranks, stages: Sequence[Stage]) -> list[Stage]:
    """The stages with these numbers among the parts of a model."""
    parts = [stage for stage in stages if "part_of" in stage.attrs]
    return [parts[number] for number in tied if number < len(parts)]


def norm_ranks(stage: Stage, rank: int, stages: Sequence[Stage], places: Places) -> Ranks:
    """The ranks over which ``rank`` adds up the norm of its gradients; none where it has all gradients itself.

    A rank of a pipeline has those of its stages, one of a cell its shards, and one whose optimizer is dealt out its
    parts.
    """
    if whole := stage.attrs.get("part_of"):
        owned = (places.get(part.name, ()) for part in stages if part.attrs.get("part_of") == whole)
        ranks = tuple(sorted(frozenset().union(*owned)))
    elif (cell := cell_of(stage) or 1) > 1 and "sharded" not in stage.attrs:
        ranks = own_cell(rank, cell)
    else:
        ranks = tuple(sorted(places[stage.name])) if "sharded" in stage.attrs else ()
    return ranks if len(ranks) > 1 else ()
