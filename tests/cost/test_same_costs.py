"""The same module costs the same, from version to version.

What a formula gives for degrees, ranks and shares that no other test asks for shows in few plans. Here the sums of all
that the cost model says of the modules in ``tests/golden`` are written down, each number with a weight of its own.
``pytest tests/cost --update-golden`` writes them anew: read what became longer, and why.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from arachnec.cost.communication import encoder_volumes
from arachnec.cost.gathering import Gathering
from arachnec.cost.host_copies import step_copies
from arachnec.cost.model import CostModel
from arachnec.cost.sparse_attention import faster_sparse
from arachnec.cost.strategy import Attention
from arachnec.ir.diagnostic import UserError
from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.ir.parser import parse_module

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = Path(__file__).parent / "same_costs.json"
COSTED = (Level.COSTED, Level.SCHEDULED, Level.PLACED, Level.LOWERED)
MOST = 12  # cascades of a module, and ranks of a group that are asked for
Value = tuple[str, float]


def modules() -> Iterator[tuple[str, Module]]:
    for path in sorted(GOLDEN.glob("*/*.expect")):
        text = path.read_text(encoding="utf-8")
        if not text.startswith("module") or path.parent.name in ("parse_errors", "verify"):
            continue
        module = parse_module(text)
        if module.cluster is not None and module.level in COSTED and module.cascades:
            yield f"{path.parent.name}/{path.stem}", module


def of_cascade(cost: CostModel, cascade: Cascade) -> Iterator[Value]:
    cluster, stage = cost.cluster, cost.stages[cascade.stage]
    yield "received", cost.received(cascade)
    yield "output", cost.output(cascade)
    yield "blocks", cost.blocks(cascade)
    if {"ranks", "start"} <= set(cascade.attrs):
        yield "placed", cost.placed_time(cascade)
        yield "copies", cost.shown_copies(cascade, cascade.ranks)
    for degree, ms in cost.options(cascade).items():
        yield "options", ms
        yield "side", cost.side_at(cascade, degree)
        ranks, last = tuple(range(degree)), tuple(range(cluster.world - degree, cluster.world))
        split = cost.best_attention(cascade, degree)
        yield "ulysses", split.ulysses
        for blocks in {0, 1, cost.blocks(cascade)} if cost.can_recompute(cascade) else {0}:
            yield "time", cost.time(cascade, degree, ranks=last, recompute=blocks)
            yield "memory", cost.memory(cascade, degree, blocks)
            yield "kept", cost.kept(cascade, degree, blocks)
            yield "in host", cost.host_inputs(cascade, degree, blocks)
            yield "least", cost.least_compute(cascade, degree, 1.5, recompute=blocks)
            sent = cost.volumes(cascade, split, blocks)
            yield "messages", sent.messages
            yield "moved", sent.moved
            for group in (ranks, last):
                yield "communication", cost.communication(cascade, split, group, blocks)
        for side in cost.sides(cascade, degree):
            yield "time side by side", cost.time(cascade, degree, side=side)
            yield "memory side by side", cost.memory(cascade, degree, 0, side)
            yield "kept side by side", cost.kept(cascade, degree, 0, side)
        if cascade.phase in (Phase.ENCODE, Phase.DECODE) and degree > 1:
            volumes = encoder_volumes(cascade, stage, Attention(degree, 1))
            yield "encoder", volumes.moved + volumes.messages


def of_stage(cost: CostModel, stage: Stage) -> Iterator[Value]:
    world, layers = cost.cluster.world, len(layers_of(stage))
    yield "room", cost.room_on(range(world), world, stage.name)
    if not stage.trained:
        return
    yield "step", cost.step_time(stage)
    yield "step copies", sum(value for _, value in step_copies(stage).pairs if isinstance(value, int))
    for size in range(1, min(world, MOST) + 1):
        ranks = tuple(range(world - size, world))
        yield "reduce", cost.reduce_time(stage, ranks)
        yield "bucket", cost.reduce_time(stage, ranks, 1e7)
        yield "norm", cost.norm_time(ranks)
        yield "learn", cost.all_reduce_time(ranks, 12345)
        if layers:
            yield "gather", cost.gather_time(stage, ranks, range(layers))
    if layers and "cell" in stage.attrs:
        times = Gathering(cost.stages, cost.cluster).layer_times(stage)
        yield "layer", times.gather + 2 * times.scatter + 3 * times.last_gather + 5 * times.last_scatter
    for tokens in (64, 1000, 32760) if "density" in stage.attrs else ():
        yield "sparse", len(faster_sparse(stage, tokens, 64))


def values(module: Module) -> Iterator[Value]:
    cost = CostModel(module)
    for name in ("state", "resident", "prepared", "room", "communicators", "largest_memory"):
        yield name, getattr(cost, name)
    yield "spare", cost.spare(1.0)
    for stage in module.stages:
        yield from of_stage(cost, stage)
    for cascade in module.cascades[:MOST]:
        yield from of_cascade(cost, cascade)
    named = {cascade.name: cascade for cascade in module.cascades}
    for consumer in module.cascades[:MOST]:
        for producer in consumer.inputs:
            yield "handed", cost.handed(named[producer], consumer)


def summed(module: Module) -> dict[str, float]:
    """Each number times its place: two that change places show."""
    sums: dict[str, float] = defaultdict(float)
    places: dict[str, count[int]] = defaultdict(lambda: count(1))
    for name, value in values(module):
        sums[name] += value * next(places[name])
    return {name: float(f"{value:.8g}") for name, value in sorted(sums.items())}


def test_every_module_costs_what_was_written_down(request: pytest.FixtureRequest) -> None:
    costs: dict[str, dict[str, float]] = {}
    for name, module in modules():
        try:
            costs[name] = summed(module)
        except UserError as error:
            costs[name] = {type(error.diagnostics[0]).__name__: 1.0}
    if request.config.getoption("--update-golden"):
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in costs.items())
        EXPECTED.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    assert costs.keys() == expected.keys()
    for name, row in costs.items():
        assert row == pytest.approx(expected[name], rel=1e-6), name
