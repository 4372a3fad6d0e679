"""Small random programs of a model that does not lie whole on every rank: stages, cells, host memory, all together.

The passes of the compiler make them: of a model in float64 whose layers share a weight, with an encoder or without.
"""

from __future__ import annotations

import random

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import planned

PIPELINED = ("gpipe", "1f1b", "kfkb", "dapple", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b")
HOSTS = ("none", "none", "none", "optimizer", "parameters", "inputs")
SHARED = (
    "schedule-static{degree=1}", "schedule-static{degree=2}", "schedule-z3{steps=10}", "schedule-dynamic-cp",
    "schedule-knapformer", "schedule-genetic{generations=2,population=4}",
)  # fmt: skip
TRIES = 200


def random_layout(rng: random.Random, ranks: int = 4) -> tuple[str, Module]:
    """The passes, and what they make of a random batch: a lowered program that ``check`` accepts."""
    for _ in range(TRIES):
        passes = staged_passes(rng) if rng.random() < 0.6 else whole_passes(rng)
        world, batch = rng.choice((2, ranks)), random_batch(rng)
        try:
            return passes, planned(world, batch, passes, encoder=rng.random() < 0.5)
        except UserError:  # a layout that this model or so many ranks do not have
            continue
    raise AssertionError(f"no layout in {TRIES} tries")


def random_batch(rng: random.Random) -> list[VideoClip]:
    return [clip(f"c{number}", rng.choice((2, 3, 3, 5))) for number in range(rng.randint(1, 6))]


def staged_passes(rng: random.Random) -> str:
    """A pipeline of stages, replicated or not, its stages in cells or not."""
    schedule = rng.choice(PIPELINED)
    twice = schedule in ("zb-v", "interleaved-1f1b")  # two stages a rank
    stages = 4 if twice else rng.choice((2, 2, 4))
    options = [f"schedule={schedule}"]
    options += ["k=2"] if schedule == "kfkb" and rng.random() < 0.5 else []
    options += [f"degree={rng.choice((1, 2))}"] if rng.random() < 0.5 else []
    options += [f"recompute={rng.choice(('true', 'false'))}"] if rng.random() < 0.6 else []
    if not twice and stages == 2 and rng.random() < 0.2:
        degrees = f"degrees=[{rng.choice(('1,3', '2,2', '3,1'))}]"
        options = [*(option for option in options if not option.startswith("degree=")), degrees]
    policy = rng.choice(("single", "dual"))
    return (
        f"stages{{p={stages}}},shard-parameters{{cell={rng.choice((1, 1, 2))}}},shard-optimizer,"
        f"offload{{what={rng.choice(HOSTS)}}},partition{{policy={policy}}},annotate,"
        f"schedule-pipeline{{{','.join(options)}}},bucket{{mib=0}},lower,check"
    )


def whole_passes(rng: random.Random) -> str:
    """The model whole on each rank or cell, each clip on some of them."""
    cell = rng.choice((1, 2, 2, 4))
    bucket = rng.choice(("bucket{mib=0}", "bucket", "bucket{reverse=false}"))
    return (
        f"shard-parameters{{cell={cell}}},shard-optimizer,offload{{what={rng.choice(HOSTS)}}},"
        f"partition{{policy={rng.choice(('single', 'dual', 'equal-token'))}}},annotate,"
        f"{rng.choice(SHARED)},place,{bucket},lower,check"
    )
