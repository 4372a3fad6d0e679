"""How many stages a model needs to fit its devices."""

from __future__ import annotations

from arachnec.cost.memory import RESERVE
from arachnec.ir.nodes import Clip, Module, Stage
from arachnec.ir.stage_sizes import formula_in, gib, layers_of
from arachnec.planning.stage_cuts import balanced_cuts, parts_of


def fitting_stages(module: Module, stage: Stage) -> int:
    """The fewest stages, two or more, that divide the cluster's ranks and leave room for the longest clip.

    The first stage holds as many micro-batches at once as there are stages, blocks recomputed. Where none fits, the
    most that there can be.
    """
    assert module.cluster is not None
    world, layers = module.cluster.world, len(layers_of(stage))
    counts = [p for p in range(2, min(world, layers) + 1) if world % p == 0] or [1]
    others = sum(gib(other.attrs.get("state")) for other in module.stages if other.name != stage.name)
    room = (1 - RESERVE) * module.cluster.memory - others
    longest = max(module.clips, key=lambda clip: clip.tokens)
    for p in counts:
        parts = parts_of(stage, balanced_cuts(stage, p, module.clips))
        needed = 0.0
        for number, part in enumerate(parts):
            kept, again, work = (_gib(part, name, longest) for name in ("saved_recompute", "recomputing", "workspace"))
            needed = max(needed, gib(part.attrs.get("state")) + (kept - again) * (p - number) + again + work)
        if needed <= room:
            return p
    return counts[-1]


def _gib(stage: Stage, name: str, clip: Clip) -> float:
    formula = formula_in(stage, name)
    return formula(B=1, S=clip.tokens, T=clip.text) if formula else 0.0
