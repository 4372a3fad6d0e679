"""Placed plans of mixed clips with encoders, as the planner makes them."""

from __future__ import annotations

import random

from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.lowering.programs import lower
from arachnec.passes.infra.pipeline import Pipeline
from tests.passes.plans import cluster

FRAMES = (17, 33, 49, 65, 81)
LATENT = ((0.35, 0), (0.60, 400), (0.90, 1560), (1.00, 3600))  # share of clips up to here, tokens of a latent frame
PIPELINES = ("schedule-z3{steps=5},place", "schedule-static{degree=2},place")


def formula(unit: str, *terms: tuple[float, int]) -> Formula:
    return Formula(tuple(Term(value, (("B", 1), *((("S", power),) if power else ()))) for value, power in terms), unit)


def costed(nodes: int, gpus: int, clips: int, seed: int) -> Module:
    """Clips of the bucketed video mix, each encoded and then trained."""
    rng = random.Random(seed)
    tokens = [_tokens(rng) for _ in range(clips)]
    videos = tuple(Clip(n, 17, 480, 832, 0, s) for n, s in enumerate(tokens))
    vae = Attributes.of(
        state=Quantity(0.5, "GiB"),
        output=formula("GiB", (1.2e-7, 1)),
        forward=formula("ms", (0.004, 1)),
        costs="device specs",
    )
    dit = Attributes.of(
        params=1_400_000_000,
        dtype="bf16",
        hidden=1536,
        heads=12,
        attentions=30,
        state=Quantity(20.0, "GiB"),
        flops=formula("TFLOP", (1.8432e-07, 2), (0.00283, 1)),
        saved=formula("GiB", (0.0012, 1)),
        forward=formula("ms", (5.83e-07, 2), (0.009, 1)),
        backward=formula("ms", (1.166e-06, 2), (0.018, 1)),
        traffic=formula("GiB", (0.00034, 1)),
        costs="device specs",
    )
    cascades = [
        cascade
        for n, s in enumerate(tokens)
        for cascade in (
            Cascade(f"e{n}", Phase.ENCODE, "vae", (n,), 1, s, 0),
            Cascade(f"t{n}", Phase.TRAIN, "dit", (n,), 1, s, 0, (f"e{n}",)),
        )
    ]
    return Module(
        "plan",
        Level.COSTED,
        cluster(nodes, gpus),
        videos,
        (Stage("vae", False, vae), Stage("dit", True, dit)),
        (),
        tuple(cascades),
    )


def plan(nodes: int, gpus: int, clips: int, seed: int, pipeline: str = PIPELINES[0]) -> Module:
    """Scheduled, placed and lowered."""
    return lower(Pipeline.parse(pipeline).run(costed(nodes, gpus, clips, seed)))


def _tokens(rng: random.Random) -> int:
    share = rng.random()
    per_frame = next(tokens for limit, tokens in LATENT if share < limit)
    return per_frame * ((rng.choice(FRAMES) - 1) // 4 + 1) if per_frame else rng.choice((1024, 1560, 3600))
