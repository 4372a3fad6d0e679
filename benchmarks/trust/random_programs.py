"""Small random programs that are right: clips, encoders, degrees, grids, uneven shards, recomputation, buckets.

Every instruction claims exactly the memory that its stage says."""

from __future__ import annotations

import random
from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Module, Phase, Reduce
from arachnec.ir.stage_sizes import recomputed_blocks
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.lowering.programs import lower
from tests.passes.plans import DIT, cluster, linear, module_of, timed

TOKENS = (400, 1560, 7800, 32760)
LAYERS = 3
SAVED: dict[str, Value] = {"saved": linear(2e-4, "GiB"), "saved_recompute": linear(5e-5, "GiB")}


def random_program(rng: random.Random, ranks: int = 4, most: int = 6) -> Module:
    """A lowered module on at most so many ranks, of at most so many clips. Every clip is encoded on some rank, or
    none is, and trained on some others, each as early as they are free."""
    pod = cluster(nodes=1, gpus=rng.randint(1, ranks))
    free = [0.0] * pod.world
    clips: list[Clip] = []
    cascades: list[Cascade] = []
    encoded = rng.random() < 0.6
    for number in range(rng.randint(1, most)):
        tokens = rng.choice(TOKENS)
        clips.append(Clip(number, 17, 480, 832, 0, tokens))
        inputs: tuple[str, ...] = ()
        ready = 0.0
        if encoded:
            rank = rng.randrange(pod.world)
            start, free[rank] = free[rank], free[rank] + tokens * 1e-3
            ready = free[rank]
            cascades.append(timed(f"e{number}", Phase.ENCODE, number, tokens, (), (start, ready), (rank,)))
            inputs = (f"e{number}",)
        own = tuple(rng.sample(range(pod.world), rng.randint(1, pod.world)))
        start = max(ready, *(free[rank] for rank in own))
        end = start + tokens * 3e-2 / len(own)
        for rank in own:
            free[rank] = end
        train = timed(f"t{number}", Phase.TRAIN, number, tokens, inputs, (start, end), own)
        cascades.append(train.with_attrs(**_split(rng, len(own), tokens)))
    module = _with_layers(module_of(pod, clips, cascades), rng)
    stages = tuple(replace(s, attrs=s.attrs.updated(**SAVED)) if s.trained else s for s in module.stages)
    cost = CostModel(replace(module, stages=stages))
    exact = tuple(_holding_what_it_needs(cost, cascade) for cascade in module.cascades)
    return lower(replace(module, stages=stages, cascades=exact))


def _holding_what_it_needs(cost: CostModel, cascade: Cascade) -> Cascade:
    blocks = recomputed_blocks(cascade.attrs.get("recompute"), cost.stages[cascade.stage])
    return cascade.with_attrs(memory=Quantity(cost.memory(cascade, cascade.width, blocks, cascade.side), "GiB"))


def _split(rng: random.Random, degree: int, tokens: int) -> dict[str, Value]:
    split: dict[str, Value] = {}
    if degree > 1:
        ulysses = rng.choice([n for n in range(1, degree + 1) if degree % n == 0])
        split = {"ulysses": ulysses, "ring": degree // ulysses}
        if rng.random() < 0.3:
            first = rng.randint(1, tokens // degree)
            rest = (tokens - first) // (degree - 1)
            split["shards"] = (first, *(rest,) * (degree - 2), tokens - first - rest * (degree - 2))
    if rng.random() < 0.3:
        split["recompute"] = True
    return split


def _with_layers(module: Module, rng: random.Random) -> Module:
    """Half of them with gradients in buckets."""
    if rng.random() < 0.5:
        return module
    layers = tuple((f"blocks.{number}", 1000) for number in range(LAYERS))
    stages = tuple(
        replace(stage, attrs=stage.attrs.updated(layers=layers)) if stage.name == DIT.name else stage
        for stage in module.stages
    )
    first = rng.randint(1, LAYERS - 1)
    reductions = tuple(
        Reduce(one.stage, one.inputs, Attributes.of(buckets=(first, LAYERS - first), time=Quantity(1.0, "ms")))
        for one in module.reductions
    )
    return replace(module, stages=stages, reductions=reductions)
