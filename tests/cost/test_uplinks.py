"""What ranks in several racks take to send each other things, held against counting what cards and uplinks carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import penalty
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term

INTER, LATENCY, RACK = 4.0, 0.02, 2  # GB/s of a card, ms, machines
BS = (("B", 1), ("S", 1))
STAGE = Stage(
    "dit",
    False,
    Attributes.of(
        heads=24, attentions=5, hidden=64, dtype="bf16", traffic=Formula((Term(1e-4, BS),), "GiB"),
        halo=Formula((Term(1e-5, BS),), "GiB"), exchanges=3,
    ),
)  # fmt: skip
CASCADE = Cascade("c", Phase.FORWARD, "dit", (0,), 1, 24_000, 0)


def racks(uplink: float) -> Cluster:
    """Eight machines of one device, two in a rack."""
    flat = parse_cluster("8x1:h100-80g")
    attrs = flat.attrs.updated(
        rack=RACK, uplink=Quantity(uplink, "GB/s"), inter=Quantity(INTER, "GB/s"),
        inter_latency=Quantity(LATENCY * 1e3, "us"), nics=None,
    )  # fmt: skip
    return replace(flat, attrs=attrs)


def carried(sends: Iterable[tuple[int, int, float]], uplink: float, contention: float) -> float:
    """ms of messages (from, to, bytes) at once: the busiest card's or the busiest uplink's."""
    cards: Counter[int] = Counter()
    uplinks: Counter[int] = Counter()
    for source, target, size in sends:
        cards[source] += size  # type: ignore[assignment]
        if source // RACK != target // RACK:
            uplinks[source // RACK] += size  # type: ignore[assignment]
    return max(max(cards.values()) / INTER * contention, max(uplinks.values(), default=0) / uplink) / 1e6


def doublings(ranks: int) -> int:
    return next(steps for steps in range(64) if 2**steps >= ranks)


@given(
    st.sampled_from([(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8)]),
    st.permutations(range(8)), st.sampled_from([0.5, 3.0, 20.0, 1e4]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_messages_take_what_the_busiest_card_or_uplink_does(
    grid: tuple[int, int], order: list[int], uplink: float
) -> None:
    """Gathers and what all ranks deal out go round once; an all-to-all between all; a ring to the next."""
    (ulysses, ring), cluster = grid, racks(uplink)
    ranks = tuple(order[: ulysses * ring])
    cost = CostModel(Module("m", Level.COSTED, cluster, stages=(STAGE,), cascades=(CASCADE,)))
    sent, contention = cost.volumes(CASCADE, Attention(ulysses, ring)), penalty(cluster, ranks)
    assert sent.gathers == 1 and sent.deals == 3
    others = (len(ranks) - 1) / len(ranks)
    crosses = len({rank // RACK for rank in ranks}) > 1
    took = LATENCY * (doublings(len(ranks)) * 4 + doublings(ulysses) * sent.trades + sent.hops)
    for size in (sent.gathered, sent.dealt):
        took += others * size * max(contention / INTER, crosses / uplink) / 1e6
    groups = [ranks[first : first + ulysses] for first in range(0, len(ranks), ulysses)]
    if ulysses > 1:
        pairs = [(a, b, sent.traded / ulysses) for group in groups for a in group for b in group if a != b]
        took += carried(pairs, uplink, contention)
    if ring > 1:
        following = [*ranks[ulysses:], *ranks[:ulysses]]
        took += carried([(a, b, sent.passed) for a, b in zip(ranks, following, strict=True)], uplink, contention)
    assert cost.communication(CASCADE, Attention(ulysses, ring), ranks) == pytest.approx(took)


@pytest.mark.parametrize("ranks", [None, (0, 1), (1, 2, 5, 6)])
def test_branches_on_ranks_of_their_own_gather_what_each_predicts_in_every_step(ranks: tuple[int, ...] | None) -> None:
    """Over the links of all these ranks, in as many doublings as branches: four steps of two branches."""
    cluster, output = racks(0.5), Formula((Term(1e-5, BS),), "GiB")
    stage = replace(STAGE, attrs=STAGE.attrs.updated(output=output))
    sampled = Attributes.of(branches=2, steps=(2, 5))
    cascade = replace(CASCADE, phase=Phase.DENOISE, attrs=sampled)
    exchange = CostModel(Module("m", Level.COSTED, cluster, stages=(stage,), cascades=(cascade,))).table.communication
    group = ranks or (0, 1)
    size, others = 1e-5 * 24_000 * 2**30 * 2 * 4, (len(group) - 1) / len(group)
    crosses = len({rank // RACK for rank in group}) > 1
    right = others * size * max(penalty(cluster, group) / INTER, crosses / 0.5) / 1e6 + 4 * 1 * LATENCY
    assert exchange.exchange(cascade, len(group), ranks) == pytest.approx(right)
    for phase in (Phase.FORWARD, Phase.TRAIN):
        assert exchange.exchange(replace(cascade, phase=phase), len(group), ranks) == 0.0
