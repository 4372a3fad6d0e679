"""Lowered modules and timelines for the tests of what shows them."""

from __future__ import annotations

from arachnec.ir.nodes import Clip, Module, Phase
from arachnec.ir.values import Attributes
from arachnec.lowering.programs import lower
from arachnec.views.timeline import Interval, Timeline, planned
from tests.passes.plans import cluster, module_of, timed


def small(names: tuple[str, str, str] = ("a", "b", "c")) -> Module:
    """Four ranks: a clip is encoded on rank 0 and trained on 0 and 1, another trained on 2, a third on 2 and 3."""
    clips = [Clip(i, 17, 480, 832, 40, 1000 * (i + 1), Attributes.of(name=name)) for i, name in enumerate(names)]
    cascades = [
        timed("e0", Phase.ENCODE, 0, 1000, (), (0.0, 20.0), (0,)),
        timed("t0", Phase.TRAIN, 0, 1000, ("e0",), (20.0, 80.0), (0, 1)),
        timed("t1", Phase.TRAIN, 1, 2000, (), (0.0, 50.0), (2,)),
        timed("t2", Phase.TRAIN, 2, 3000, (), (50.0, 100.0), (2, 3)),
    ]
    return lower(module_of(cluster(gpus=4), clips, cascades))


def slower(module: Module, factor: float = 1.5) -> Timeline:
    """What a run of it might have measured."""
    late = (Interval(i.rank, i.op, i.target, i.start * factor, i.end * factor) for i in planned(module).intervals)
    return Timeline("measured, step 3", tuple(late))


def large(ranks: int, clips: int) -> Module:
    """Cascades of degree 4, 2, 1 and 2, one after another on every four ranks."""
    rows = [Clip(i, 81, 480, 832, 226, 1000 + i, Attributes.of(name=f"videos/{i:06}.mp4")) for i in range(clips)]
    quads = ranks // 4
    free = [0.0] * quads
    cascades = []
    for i in range(clips):
        quad, degree = i % quads, (4, 2, 1, 2)[i // quads % 4]
        start, free[quad] = free[quad], free[quad] + 100.0 / degree + i % 7
        where = tuple(range(4 * quad, 4 * quad + degree))
        cascades.append(timed(f"t{i}", Phase.TRAIN, i, 1000 + i, (), (start, free[quad]), where))
    return lower(module_of(cluster(nodes=ranks // 8, gpus=8), rows, cascades))
