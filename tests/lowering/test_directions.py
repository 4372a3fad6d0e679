"""Which direction of a plan is taken where several stages are summed, and what a stage says of its heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.ir.nodes import Module, Phase, Reduce, Stage, Step
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.lowering.buckets import time_reversed, with_buckets
from arachnec.lowering.programs import head_size
from tests.passes.plans import DIT, cluster, equal_clips, module_of, timed

LAYERS = tuple((f"blocks.{number}", 2**30) for number in range(4))


def two_models(early: bool) -> Module:
    """On ranks 0 and 1 one cascade of a model, on 2 and 3 two of another: a long and a short one."""
    large = DIT.attrs.updated(params=4 * 2**30, layers=LAYERS)
    small = DIT.attrs.updated(params=4 * 2**16, layers=tuple((name, 2**16) for name, _ in LAYERS))
    stages = (Stage("one", True, small), Stage("two", True, large))
    when = ((0.0, 300.0), (300.0, 310.0)) if early else ((10.0, 310.0), (0.0, 10.0))
    cascades = [
        replace(timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 10.0), (0, 1)), stage="one"),
        replace(timed("b", Phase.TRAIN, 1, 1000, (), when[0], (2, 3)), stage="two"),
        replace(timed("c", Phase.TRAIN, 2, 1000, (), when[1], (2, 3)), stage="two"),
    ]
    reductions = (
        Reduce("one", ("a",), Attributes.of(ranks=(0, 1))),
        Reduce("two", ("b", "c"), Attributes.of(ranks=(2, 3))),
    )
    module = module_of(cluster(), equal_clips(3), cascades)
    return replace(module, stages=stages, reductions=reductions, steps=(Step("one"), Step("two")))


@pytest.mark.parametrize("early", [True, False])
def test_the_direction_is_that_in_which_the_last_bucket_of_all_stages_ends_first(early: bool) -> None:
    """A long last backward hides more. The other model's only cascade ends first as it stands, or last."""
    planned = with_buckets(two_models(early))
    starts = {cascade.name: cascade.start for cascade in planned.cascades}
    assert starts == {"a": 300.0 if early else 0.0, "b": 10.0, "c": 0.0}
    assert "buckets" in planned.reductions[1].attrs


def test_a_stage_that_is_not_cut_says_nothing_of_the_direction() -> None:
    """Of a plan of microseconds, too."""
    module = two_models(early=False)
    (one, two), short = module.stages, 1e-3
    stages = (replace(one, attrs=one.attrs.updated(layers=None)), replace(two, attrs=one.attrs))
    cascades = tuple(
        c.with_attrs(start=Quantity(c.start * short, "ms"), end=Quantity(c.end * short, "ms")) for c in module.cascades
    )
    planned = with_buckets(replace(module, stages=stages, cascades=cascades))
    assert {c.name: c.start for c in planned.cascades} == {c.name: c.start for c in cascades}
    turned = time_reversed(replace(module, stages=stages, cascades=cascades))
    again = with_buckets(turned)
    assert [c.start for c in again.cascades] == pytest.approx([c.start for c in cascades])


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ({"hidden": 96, "heads": 3}, 32),
        ({"hidden": 96, "heads": 1}, 96),
        ({"hidden": 96, "heads": 0}, None),
        ({"hidden": 96}, None),
        ({"heads": 3}, None),
        ({"hidden": 96, "heads": 3, "attentions": 0}, None),
        ({"hidden": 96, "heads": 3, "attentions": 1}, 32),
    ],
)
def test_a_stage_has_a_head_size_where_it_says_width_and_heads_and_attends(
    said: dict[str, Value], size: int | None
) -> None:
    assert head_size(Stage("dit", True, Attributes.of(**said))) == size
