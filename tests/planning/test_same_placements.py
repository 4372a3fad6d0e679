"""The same schedule is placed on the same ranks, from version to version.

Which of several equal ranks a placement takes, and what counts as equal, shows in few plans. Here all that the ways of
placing make of small drawn schedules is written down. ``pytest tests/planning --update-golden`` writes it anew: read
what starts later, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module, Phase
from arachnec.ir.values import Quantity
from arachnec.planning.family_placement import family_placements, markup, placed_on_few_groups, priced_placement
from arachnec.planning.placement import best_placements, cell_placements, in_cells, placements
from arachnec.planning.rank_choice import ranks_from_the_end, ranks_from_the_start
from tests.planning.costed_modules import module

EXPECTED = Path(__file__).parent / "same_placements.json"
CLUSTERS = ("1x4:h100-80g", "2x4:h100-80g", "4x2:l20", "6x2:l20", "1x4:h100-80g+1x4:a100-80g", "8:cpu")
TOKENS = (60, 60, 500, 900, 900, 4000, 9000)
GAPS = (0.0, 0.0, 0.0, 2.0, 9.0, 40.0)  # ms
Place = Callable[[Sequence[Cascade], CostModel], list[Cascade]]


def drawn(seed: int) -> tuple[str, Module, list[Cascade]]:
    rng = Random(seed)
    name = CLUSTERS[seed % len(CLUSTERS)]
    racks, cells = name.endswith("l20") and rng.random() < 0.7, rng.random() < 0.25 and "+" not in name
    tokens = rng.choices(TOKENS, k=rng.randint(3, 9))
    costed = module(name, tokens, encoders=rng.choice((0, 1, 1, 2)))
    assert costed.cluster is not None
    if racks:
        size, uplink = rng.choice((2, 3)) if name == "6x2:l20" else 2, rng.choice((0.05, 1.0, 20.0))
        attrs = costed.cluster.attrs.updated(rack=size, uplink=Quantity(uplink, "GB/s"))
        costed = replace(costed, cluster=replace(costed.cluster, attrs=attrs))
    if cells:
        *others, dit = costed.stages
        costed = replace(costed, stages=(*others, replace(dit, attrs=dit.attrs.updated(cell=2))))
    said = f"{seed} {name}{', racks' * racks}{', cells' * cells}"
    return said, costed, scheduled(costed, rng, (2, 4) if cells else (1, 1, 2, 3, 4))


def scheduled(costed: Module, rng: Random, degrees: Sequence[int]) -> list[Cascade]:
    """Cascades of drawn degrees, each as soon as its inputs are there and so many ranks free, or some ms later.

    Some schedules take what runs to be shorter than it is, so that no placement is as long as scheduled.
    """
    share = rng.choice((1.0, 0.8))
    cost, done = CostModel(costed), dict[str, Cascade]()
    free = [0.0] * cost.cluster.world
    for cascade in costed.cascades:
        degree = rng.choice(degrees) if cascade.phase is Phase.TRAIN else 1
        free.sort()
        begin = max(free[degree - 1], *(done[name].end for name in cascade.inputs), 0.0) + rng.choice(GAPS)
        end = begin + cost.time(cascade, degree) * share
        times = {"start": Quantity(begin, "ms"), "end": Quantity(end, "ms")}
        done[cascade.name] = cascade.with_attrs(degree=degree, **times)
        free[:degree] = [end] * degree
    return list(done.values())


def ways(cost: CostModel, cascades: Sequence[Cascade]) -> Iterator[tuple[str, Place]]:
    if in_cells(cost):
        yield "cells", cell_placements
    else:
        yield "free", placements
        yield "free, spread", lambda cascades, cost: placements(cascades, cost, topology=False)
        yield "family", lambda cascades, cost: family_placements(cascades, cost, math.inf)
        yield "family, worth nothing", lambda cascades, cost: family_placements(cascades, cost, 0.0)
        yield "family, worth 2 ms", lambda cascades, cost: family_placements(cascades, cost, 2.0)
        yield "priced", priced_placement
        yield "few groups", placed_on_few_groups
    yield "best", best_placements


def placed(cascades: Sequence[Cascade], cost: CostModel) -> str:
    price = "" if in_cells(cost) else f", x {markup(cascades, cost):.6g}"
    return "; ".join(f"{' '.join(map(str, one.ranks))} from {one.start:.6g}" for one in cascades) + price


def answers(seed: int) -> tuple[str, dict[str, str]]:
    said, costed, cascades = drawn(seed)
    cost = CostModel(costed)
    told: dict[str, str] = {}
    for name, place in ways(cost, cascades):
        try:
            told[name] = placed(place(cascades, cost), cost)
        except UserError as error:
            told[name] = type(error.diagnostics[0]).__name__
    if not cost.devices.kinds and not in_cells(cost):
        for choose in (ranks_from_the_end, ranks_from_the_start):
            told[choose.__name__] = str(sorted(choose(cascades, cost.cluster).items()))
    return said, told


def test_every_schedule_is_placed_as_was_written_down(request: pytest.FixtureRequest) -> None:
    told = dict(map(answers, range(48)))
    if request.config.getoption("--update-golden"):
        EXPECTED.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    for name, answer in told.items():
        assert answer == expected.get(name), name
    assert told.keys() == expected.keys()
