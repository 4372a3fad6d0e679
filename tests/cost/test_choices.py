"""Which ways are tried, and what stands where times were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Phase
from arachnec.ir.values import Quantity
from tests.cost.test_strategies import cascade, model, stage
from tests.planning.test_uneven_branches import costed

MEASURED = ((2, Quantity(7.0, "ms")), (4, Quantity(4.0, "ms")))


@pytest.mark.parametrize("degree", [2, 3, 6, 17, 18, 40])
def test_where_devices_differ_branches_may_have_any_uneven_numbers_of_ranks(degree: int) -> None:
    """1 to 16 ranks for the second branch, but for half, which is the even way."""
    _, module = costed(((1, 4.0), (2, 4.0)))
    assert module.cluster is not None
    wide = replace(module.cluster, attrs=module.cluster.attrs.updated(gpus=48))
    cost = CostModel(replace(module, cluster=wide))
    guided = next(c for c in module.cascades if c.phase is Phase.DENOISE and c.attrs.get("branches") == 2)
    ways = cost.table.ways(guided, degree)
    grids = [way.unconditional for way in ways if way.unconditional is not None]
    assert [grid.ulysses * grid.ring for grid in grids] == [
        count for count in range(1, 17) if count < degree and count != degree / 2
    ]
    assert all(way.side == 2 for way in ways if way.unconditional is not None)
    assert [way.side for way in ways if way.unconditional is None] == ([1, 2] if degree % 2 == 0 else [1])


def test_measured_times_stand_as_they_were_measured() -> None:
    timed = cascade(times=MEASURED)
    own = model(stage(host=("optimizer", "parameters"), cell=2), timed)
    assert own.least_compute(timed, 2, 3.0) == 21.0
    assert own.shown_copies(timed, (0, 1)) == 0.0
    assert own.communication(timed, Attention(2, 1), (0, 1)) == 0.0
    volumes = own.volumes(timed, Attention(2, 1))
    assert (volumes.ulysses, volumes.ring, volumes.traded, volumes.passed) == (2, 1, 0.0, 0.0)
    alone = cascade()
    assert own.communication(alone, Attention(2, 1), (0, 1)) > 0.0
    assert own.volumes(alone, Attention(2, 1)).traded > 0.0


def test_only_a_stage_with_attention_is_split_over_heads() -> None:
    assert model(stage()).has_attention(cascade())
    assert not model(stage(attentions=0)).has_attention(cascade())
    assert not model(stage(attentions=None)).has_attention(cascade())


def test_a_group_without_ranks_is_the_best_kinds() -> None:
    cost: CostModel = costed(((1, 4.0), (2, 4.0)))[0]
    _, module = costed(())
    guided = next(c for c in module.cascades if c.phase is Phase.DENOISE)
    fast = cost.table.entry(guided, 1).time
    assert fast == cost.table.entry(guided, 1, (0,)).time < cost.table.entry(guided, 1, (1,)).time
