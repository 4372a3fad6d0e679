"""Costs of sparse attention: by density and heaviest rank, dense where that is faster, the same in every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import Values
from arachnec.cluster.file import parse_cluster
from arachnec.cost.communication import volumes
from arachnec.cost.compute import Load
from arachnec.cost.model import CostModel
from arachnec.cost.sparse_attention import (
    SparseLoads,
    faster_sparse,
    with_sparse_layers,
)
from arachnec.cost.strategy import Attention
from arachnec.ir.head_density import layer_densities, parts_by_layer
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value
from arachnec.lowering.head_division import with_heads
from arachnec.lowering.order import forward_share
from arachnec.sparsity.head_shares import DENSE_EVERY, SPARSE_EVERY, keys_sent, share_inside
from arachnec.verification.sparse import check_heads

TOKENS = 40_000
PAIRS, EACH = (("B", 1), ("S", 2)), (("B", 1), ("S", 1))
EVEN = ((0.1,) * 4,) * 2


def formula(unit: str, pairs: float, linear: float = 0.0, fixed: float = 0.0) -> Formula:
    return Formula((Term(pairs, PAIRS), Term(linear, EACH), Term(fixed)), unit)


def stage(densities: tuple[tuple[float, ...], ...] = EVEN, **changed: Value | None) -> Stage:
    """Two layers of four heads; of a dense forward each layer's pairs take 800 ms at 40,000 tokens."""
    values: dict[str, Value | None] = {
        "layers": (("blocks.0", 1), ("blocks.1", 1)),
        "heads": 4,
        "attentions": 2,
        "flops": formula("TFLOP", 1e-6),
        "forward": formula("ms", 1e-6, 1e-3, 2.0),
        "backward": formula("ms", 2e-6, 2e-3, 4.0),
        "traffic": Formula((Term(1e-4, EACH),), "GiB"),
        "state": Quantity(1.0, "GiB"),
        "density": tuple(((layer,), 0.5, heads) for layer, heads in enumerate(densities)),
        "query_group": 256,
        "key_block": 64,
        "sparse_speed": (1.0, 1.0, 1.0),
        **changed,
    }
    return Stage("dit", True, Attributes.of(**values))


def clip(tokens: int = TOKENS, **attrs: Value) -> Cascade:
    return Cascade("0", Phase.TRAIN, "dit", (0,), 1, tokens, 0, attrs=Attributes.of(**attrs))


def model(of: Stage, cluster: str = "2x8:h100-80g") -> CostModel:
    return CostModel(Module("m", Level.COSTED, parse_cluster(cluster), stages=(of,), cascades=(clip(),)))


def test_the_pairs_of_sparse_layers_take_their_density() -> None:
    cost = model(stage())
    linear = 3 * (1e-3 * TOKENS + 2)
    assert cost.time(clip(), 1) == pytest.approx(3 * 1600 + linear)
    assert cost.time(clip(sparse=(1,)), 1) == pytest.approx(3 * (800 + 80) + linear)
    assert cost.time(clip(sparse=(0, 1)), 1) == pytest.approx(3 * 160 + linear)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("recompute", [None, 1])
def test_the_forward_of_a_sparse_cascade_ends_after_its_part_of_what_the_cost_model_says(
    degree: int, recompute: int | None
) -> None:
    """One of two layers is sparse, so the dense one's pairs are divided by heads, and a block may run again."""
    of = stage(backward=formula("ms", 5e-6, 1e-3))
    attrs: dict[str, Value] = {} if recompute is None else {"recompute": recompute}
    cascade = clip(sparse=(0,), degree=degree, **attrs)
    compute = model(of).table.compute
    forward, backward = compute.halves(cascade, degree, Attention(degree, 1), recompute or 0, (Load(),))
    assert forward_share(cascade, of) == pytest.approx(forward / (forward + backward))


def test_slower_kernels_and_the_choice_of_keys_are_terms_of_their_own() -> None:
    linear = 3 * (1e-3 * TOKENS + 2)
    cost = model(stage(sparse_speed=(0.5, 0.25, 0.1), choice=formula("TFLOP", 1e-9)))
    ahead, back = 160 / 0.5, 320 / 0.25
    chosen = 2 * 1e-9 * TOKENS**2 / 0.1  # a TFLOP takes 1 ms here
    assert cost.time(clip(sparse=(0, 1)), 1) == pytest.approx(ahead + back + chosen + linear)
    again = cost.time(clip(sparse=(0, 1)), 1, recompute=2) - cost.time(clip(sparse=(0, 1)), 1)
    assert again == pytest.approx(ahead + linear / 3), "lists are never chosen again"


def test_a_cascade_waits_for_the_rank_with_the_heaviest_heads() -> None:
    uneven = ((0.7, 0.1, 0.1, 0.1), (0.7, 0.1, 0.1, 0.1))
    whole = model(stage(uneven, division="heads", traffic=None)).time(clip(sparse=(0, 1)), 4, ulysses=4)
    cut = model(stage(uneven, division="groups", traffic=None)).time(clip(sparse=(0, 1)), 4, ulysses=4)
    assert whole - cut == pytest.approx(3 * 1600 * (0.7 / 4 - 0.25 / 4), rel=0.01)


def test_heads_that_are_given_cost_what_they_weigh_now() -> None:
    """Heads that were divided by other densities, or by hand."""
    even = model(stage(traffic=None)).module
    (planned,) = with_heads(replace(even, cascades=(clip(sparse=(0, 1), degree=4),)))
    now = model(stage(((0.7, 0.1, 0.1, 0.1),) * 2, traffic=None))
    stale, again = (now.time(cascade, 4, ulysses=4) for cascade in (planned, clip(sparse=(0, 1), degree=4)))
    assert stale - again == pytest.approx(3 * 1600 * (0.7 / 4 - 0.25 / 4), rel=0.01)


def test_a_clip_costs_what_the_densities_of_its_class_of_length_do() -> None:
    """Its path, its heads' division, its times and what it sends; clips of other lengths cost what they did."""
    heavy = (0.9, 0.5, 0.3, 0.2)
    rows = (((0, 1), 0.5, EVEN[0]), ((0, 1), 0.5, heavy, 32768))
    by_class, alone, even = (stage(), stage((heavy,) * 2), stage())
    by_class = replace(by_class, attrs=by_class.attrs.updated(density=rows))
    for tokens, other in ((TOKENS, alone), (32768, alone), (65535, alone), (32767, even), (65536, even)):
        own, same = (SparseLoads({"dit": of}, node=2).of(clip(tokens, sparse=(0, 1)), 4) for of in (by_class, other))
        assert own == same
        slow = {"sparse_speed": (0.3, 0.3, 1.0)}
        known = (faster_sparse(replace(of, attrs=of.attrs.updated(**slow)), tokens, 0) for of in (by_class, other))
        assert len(set(known)) == 1
    both = SparseLoads({"dit": by_class})
    loads = [both.of(clip(tokens, sparse=(0, 1)), 4) for tokens in (33_000, 32_700, 33_000)]
    assert loads[0] == loads[2] != loads[1], "what is kept of one class is not taken for another"


def test_ranks_that_get_keys_of_more_heads_receive_more() -> None:
    dense = volumes(ulysses=4, ring=1, heads=4, attentions=2, traffic=1.0, forward=1, backward=1)
    loads = SparseLoads({"dit": stage()})
    even = volumes(
        ulysses=4, ring=1, heads=4, attentions=2, traffic=1.0, forward=1, backward=1,
        sparse=loads.of(clip(sparse=(0, 1)), 4),
    )  # fmt: skip
    assert even.traded == 0
    assert even.dealt == pytest.approx(dense.traded, rel=1e-3), "whole heads by number send the same"
    # all four ranks take keys of the one heavy head
    heavy = SparseLoads({"dit": stage(((0.9, 0.01, 0.01, 0.01),) * 2)}).of(clip(sparse=(0, 1)), 4)
    assert heavy.received > loads.of(clip(sparse=(0, 1)), 4).received


def test_between_machines_a_part_of_a_head_gets_the_blocks_that_its_groups_chose() -> None:
    assert keys_sent(0.1, 10) == 1.0, "inside a machine all keys travel"
    assert keys_sent(0.1, 1, 0.0) == pytest.approx(0.125 + 0.875 * 0.15), "all in every eighth step"
    assert keys_sent(0.1, 100, 0.0) == keys_sent(1.0, 1, 0.0) == 1.0
    assert keys_sent(0.1, 1, 0.5) == pytest.approx(0.5 + 0.5 * keys_sent(0.1, 1, 0.0))
    assert (share_inside(4, 8), share_inside(16, 8)) == (1.0, pytest.approx(7 / 15))


def test_short_clips_stay_dense_where_choosing_takes_longer_than_it_saves() -> None:
    slow = stage(choice=formula("TFLOP", 1e-9, 1e-3))
    assert faster_sparse(slow, TOKENS, 0) == (0, 1)
    assert faster_sparse(slow, 200, 0) == ()
    launches = stage(choice_overhead=Quantity(0.05, "ms"))
    assert (faster_sparse(launches, 1000, 0), faster_sparse(launches, 150, 0)) == ((0, 1), ())
    cost, chosen = model(launches), clip(sparse=(0, 1))
    assert cost.time(chosen, 4) - model(stage()).time(chosen, 4) == pytest.approx(0.1)
    mixed = stage(((0.1,) * 4, (1.0,) * 4))
    assert faster_sparse(mixed, TOKENS, 0) == (0,), "a layer that needs all keys stays dense"


def test_learning_counts_by_the_share_of_the_steps_in_which_it_is_done() -> None:
    """A sparse layer learns in every eighth step, one that is dense in every sixteenth, on any cluster."""
    learning = formula("TFLOP", 1e-8, 0.0)  # 16 ms of a clip and layer
    of = stage(learning=learning, learning_overhead=Quantity(2.0, "ms"))
    for cluster in ("8:h100-80g", "2x8:h100-80g"):
        took = model(of, cluster).time(clip(sparse=(0, 1)), 1) - model(stage(), cluster).time(clip(sparse=(0, 1)), 1)
        assert took == pytest.approx(2 * (16 + 2) / SPARSE_EVERY)
    one = ((0,), 0.5, (0.1,) * 4)
    late, without = (replace(s, attrs=s.attrs.updated(measured=(one,))) for s in (of, stage()))
    took = model(late).time(clip(sparse=(0, 1)), 1) - model(without).time(clip(sparse=(0, 1)), 1)
    assert took == pytest.approx(18 / SPARSE_EVERY + 18 / DENSE_EVERY)


def test_a_layer_that_would_gain_less_than_it_learns_stays_dense_and_learns_nothing() -> None:
    dear = stage(learning=formula("TFLOP", 16e-6))  # an eighth of it takes longer than attention saves
    assert faster_sparse(dear, TOKENS, 0) == ()
    assert faster_sparse(dear, TOKENS, 0, layer_densities(dear)) == (0, 1), "one that is listed learns on either path"


def test_a_scheduled_cascade_keeps_its_path() -> None:
    short, kept = with_sparse_layers((clip(), clip(degree=2)), [stage()])
    assert short.attrs["sparse"] == (0, 1)
    assert "sparse" not in kept.attrs


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(tuple), min_size=2, max_size=2),
    st.integers(2, 8),
    st.integers(300, 50_000),
    st.sampled_from(["groups", "heads"]),
)
@settings(max_examples=60, deadline=None)
def test_what_lower_divides_check_proves(
    densities: list[tuple[float, ...]], degree: int, tokens: int, division: str
) -> None:
    of = stage(tuple(densities), division=division)
    cascade = clip(tokens, sparse=(0, 1), degree=degree)
    module = Module("m", Level.LOWERED, parse_cluster("1x8:h100-80g"), stages=(of,), cascades=(cascade,))
    (divided,) = with_heads(module)
    module = replace(module, cascades=(divided,))
    assert not list(check_heads(Values(module)))
    assert set(parts_by_layer(divided)) == {0, 1}
    moved = replace(divided, attrs=divided.attrs.updated(groups=int(divided.attrs["groups"]) + 1))  # type: ignore[arg-type]
    whole = all(not row[2] for row in divided.attrs["heads"])  # type: ignore[union-attr, index]
    assert whole or list(check_heads(Values(replace(module, cascades=(moved,)))))
