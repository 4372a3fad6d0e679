"""Stages, cells, unequal degrees and host memory together: what the planner makes of them never stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.analysis.communicators import DEVICE_HANDOFFS, HOST_HANDOFFS
from arachnec.driver import plan_iteration, plan_model
from arachnec.ir.nodes import Module
from arachnec.ir.values import Quantity
from arachnec.passes.check import find_problems
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import pipeline_of, traced
from tests.emulator.test_programs import emulate

CLIPS = tuple(clip(name, tokens) for name, tokens in zip("abcdef", (3, 3, 5, 2, 4, 4), strict=True))
PRODUCTS = {
    "cells-zb-v": (4, "p=4", "schedule=zb-v", 2, "none", False),
    "cells-interleaved-host": (4, "p=4", "schedule=interleaved-1f1b", 2, "parameters", False),
    "cells-degree-4-zb-h1": (8, "p=2", "schedule=zb-h1,degree=4", 2, "none", False),
    "degrees-1-3": (4, "p=2", "schedule=zb-h1,degrees=[1,3]", 1, "none", True),
    "degrees-6-2-dealt-out": (8, "p=2", "schedule=1f1b,degrees=[6,2]", 1, "none", True),
    "degrees-2-1-1-kfkb": (8, "p=3", "schedule=kfkb,k=2,degrees=[2,1,1]", 1, "inputs", False),
    "cells-degrees-2-6": (8, "p=2", "schedule=gpipe,degrees=[2,6]", 2, "none", False),
    "dapple-host": (8, "p=2", "schedule=dapple,degree=2", 1, "optimizer", False),
}


def program(world: int, stages: str, schedule: str, cell: int, host: str, crowded: bool) -> Module:
    """Lowered, with an encoder; where ``crowded`` the optimizer's state is dealt out."""
    module = traced(world, [CLIPS], encoder=True)
    if crowded:
        attrs = module.stages[-1].attrs.updated(state=Quantity(6.0, "GiB"), optimizer=Quantity(4.0, "GiB"))
        module = replace(module, stages=(module.stages[0], replace(module.stages[-1], attrs=attrs)))
    pipeline = Pipeline.parse(pipeline_of(stages, schedule, "single", cell, host))
    return plan_iteration(plan_model(module, pipeline)[0], pipeline, 0)[0]


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_stages_go_through(product: tuple[int, str, str, int, str, bool]) -> None:
    module = program(*product)
    for model in (HOST_HANDOFFS, DEVICE_HANDOFFS):
        assert not find_problems(module, model)
        for pool, waits in ((1, 1.0), (8, 0.05)):
            circle = emulate(module, model, pool, waits, seed=5)
            assert circle is None, str(circle)


def test_a_part_that_never_leaves_stands_still() -> None:
    """Of a value that a rank gets in parts, each is waited for."""
    module = program(*PRODUCTS["degrees-1-3"])
    name = next(s.target for p in module.programs for s in p.instructions if s.op == "receive" and s.peers[0] == 3)
    cut = tuple(
        replace(p, instructions=tuple(s for s in p.instructions if (p.rank, s.op, s.target) != (3, "send", name)))
        for p in module.programs
    )
    for model in (HOST_HANDOFFS, DEVICE_HANDOFFS):
        assert emulate(replace(module, programs=cut), model, 8, 0.3, seed=5) is not None
