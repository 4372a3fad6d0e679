"""Over which ranks gradients are more than a stage's own: what stages share, and the norm they are clipped by.

``stages`` are those of a module, ``places`` the ranks of every trained one by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from arachnec.ir.nodes import Stage
from arachnec.ir.parameter_cells import cell_of, own_cell

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
