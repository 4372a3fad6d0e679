"""What comes first in the lists of all ranks, and which gradients are cut into buckets at all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module, Phase, Stage
from arachnec.ir.values import Attributes, Quantity
from arachnec.lowering.buckets import with_buckets
from arachnec.lowering.order import TOLERANCE_MS, depths, global_order
from tests.passes.plans import DIT, cluster, equal_clips, module_of, timed

LAYERS = (("blocks.0", 1000), ("blocks.1", 1000))


def test_a_cascade_is_as_deep_as_the_longest_chain_below_it() -> None:
    chain = tuple(
        timed(name, Phase.ENCODE, 0, 1000, inputs, (0.0, 1.0), (0,))
        for name, inputs in (("a", ()), ("b", ("a",)), ("c", ("a", "b")), ("d", ("c", "a")))
    )
    assert depths(chain) == {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.mark.parametrize("late", [0.0, 0.5 * TOLERANCE_MS, TOLERANCE_MS])
def test_an_input_that_is_later_by_rounding_comes_first(late: float) -> None:
    reader = timed("a", Phase.TRAIN, 0, 1000, ("e",), (0.0, 1.0), (0,))
    encoder = timed("e", Phase.ENCODE, 0, 1000, (), (late, 1.0), (0,))
    assert [cascade.name for cascade in global_order((reader, encoder))] == ["e", "a"]


@given(st.integers(2, 6), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_what_starts_at_once_but_for_rounding_comes_in_order_of_what_it_reads_and_else_as_it_starts(
    count: int, rng: random.Random
) -> None:
    """Every cascade reads some of those before it by number, each starts a part of the tolerance late."""
    late = [rng.randint(0, 4) * TOLERANCE_MS / 4 for _ in range(count)]
    inputs = [tuple(f"c{n}" for n in range(at) if rng.random() < 0.4) for at in range(count)]
    cascades = [timed(f"c{at}", Phase.ENCODE, 0, 1000, inputs[at], (late[at], 1.0), (0,)) for at in range(count)]
    rng.shuffle(cascades)
    first = sorted(cascades, key=lambda c: (c.start, c.end, depths(tuple(cascades))[c.name], cascades.index(c)))
    right: list[str] = []
    while len(right) < count:
        right.append(next(c.name for c in first if c.name not in right and {*c.inputs} <= {*right}))
    assert [cascade.name for cascade in global_order(tuple(cascades))] == right


def test_an_input_that_is_later_than_rounding_is_refused() -> None:
    reader = timed("a", Phase.TRAIN, 0, 1000, ("e",), (0.0, 1.0), (0,))
    encoder = timed("e", Phase.ENCODE, 0, 1000, (), (1.5 * TOLERANCE_MS, 1.0), (0,))
    with pytest.raises(UserError, match="before its input %"):
        global_order((reader, encoder))


def trained_on(gpus: int, **reduce: Quantity | int) -> Module:
    """A clip on each rank, of a stage of two layers, its all-reduce with these attributes."""
    cascades = [timed(f"t{n}", Phase.TRAIN, n, 1000, (), (0.0, 30.0), (n,)) for n in range(gpus)]
    module = module_of(cluster(gpus=gpus), equal_clips(gpus), cascades)
    stage = replace(DIT, attrs=DIT.attrs.updated(layers=LAYERS))
    node = replace(module.reductions[0], attrs=Attributes.of(**reduce))
    return replace(module, stages=(stage,), reductions=(node,))


@pytest.mark.parametrize(
    ("module", "buckets"),
    [
        (trained_on(2), (1, 1, 0)),
        (trained_on(1), None),  # nobody to all-reduce with
        (trained_on(2, time=Quantity(1.0, "ms")), None),  # somebody has said already how long all of it takes
        (trained_on(2, bytes=8000), None),
    ],
    ids=["two ranks", "one rank", "with its time", "with its bytes"],
)
def test_only_a_sum_over_ranks_that_nobody_has_measured_is_cut(module: Module, buckets: tuple[int, ...] | None) -> None:
    (node,) = with_buckets(module, mib=0, reverse=False).reductions
    assert node.attrs.get("buckets") == buckets


@pytest.mark.parametrize(("parameters", "buckets"), [(2**18, (1, 1, 0)), (2**18 - 1, (2, 0)), (2**17 - 1, None)])
def test_buckets_hold_as_many_mib_as_they_are_said_to(parameters: int, buckets: tuple[int, ...] | None) -> None:
    """A parameter's gradient has 4 bytes."""
    module = trained_on(2)
    layers = tuple((name, parameters) for name, _ in LAYERS)
    stage = replace(DIT, attrs=DIT.attrs.updated(layers=layers, params=2 * parameters))
    (node,) = with_buckets(replace(module, stages=(stage,)), mib=1, reverse=False).reductions
    assert node.attrs.get("buckets") == buckets


@pytest.mark.parametrize("parameters", [10**5, 10**6, 10**7, 10**8])
def test_a_stage_in_cells_is_cut_as_one_of_which_every_rank_sums_a_part(parameters: int) -> None:
    """Over two ranks of four, each with half of every layer: by what half of it takes."""
    layers = tuple((f"blocks.{number}", parameters) for number in range(6))
    whole = Stage("dit", True, DIT.attrs.updated(layers=layers, params=7 * parameters))
    parts = tuple((name, count // 2) for name, count in layers)
    half = Stage("dit", True, DIT.attrs.updated(layers=parts, params=7 * parameters // 2))
    in_cells = replace(whole, attrs=whole.attrs.updated(cell=2))

    def cut(stage: Stage, gpus: int, ranks: tuple[int, ...]) -> object:
        cascade = timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 3.0), ranks)
        module = replace(module_of(cluster(gpus=gpus), equal_clips(), [cascade]), stages=(stage,))
        return with_buckets(module, reverse=False).reductions[0].attrs.get("buckets")

    assert cut(in_cells, 4, (0, 1, 2, 3)) == cut(half, 2, (0, 1))
