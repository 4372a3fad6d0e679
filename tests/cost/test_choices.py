"""What stands where times were measured."""

from __future__ import annotations

from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Phase
from arachnec.ir.values import Quantity
from tests.cost.test_strategies import cascade, model, stage
from tests.planning.test_uneven_branches import costed

MEASURED = ((2, Quantity(7.0, "ms")), (4, Quantity(4.0, "ms")))


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
