"""What ranks of a cascade send each other, held against counting it: which rank has which tokens, heads and links."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import nic_of, penalty
from arachnec.cost.communication import (
    Volumes,
    gather_time,
    host_update_time,
    norm_time,
    reduce_time,
    step_time,
    volumes,
)
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value

GIB = 2**30
GRIDS = ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8), (3, 2))
GROUPS = {  # over two machines of 8
    2: ((0, 1), (2, 6), (0, 8), (7, 8)),
    4: ((0, 1, 2, 3), (0, 1, 8, 9), (0, 4, 8, 12)),
    6: ((2, 3, 4, 5, 6, 7), (0, 2, 4, 8, 10, 12)),
    8: ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 8, 9, 10, 11), (0, 2, 4, 6, 8, 10, 12, 14)),
}
BS = (("B", 1), ("S", 1))
POD = parse_cluster("2x8:h100-80g")


def doublings(ranks: int) -> int:
    return next(steps for steps in range(64) if 2**steps >= ranks)


@given(st.sampled_from(GRIDS), st.integers(8, 24), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_bytes_and_messages_are_those_of_every_token_and_head(
    grid: tuple[int, int], heads: int, attentions: int, forward: int, backward: int
) -> None:
    """240 tokens, 16 bytes for a head of a token of each of q, k, v and the output."""
    (ulysses, ring), tokens, size, output = grid, 240, 16, 7777.0
    degree, passes = ulysses * ring, forward + backward
    whole = 4 * tokens * heads * size  # of one attention
    sent = volumes(
        ulysses=ulysses, ring=ring, heads=heads, attentions=attentions, traffic=whole * attentions / GIB,
        forward=forward, backward=backward, output=output,
    )  # fmt: skip
    own_heads = [heads // ulysses + (place < heads % ulysses) for place in range(ulysses)]
    together = tokens // ring  # of the ranks that exchange heads
    exchanged = max(4 * together * own * size for own in own_heads)  # q, k and v come, the output goes
    assert sent.traded == pytest.approx(attentions * passes * exchanged if ulysses > 1 else 0.0)
    assert sent.trades == (2 * attentions * passes if ulysses > 1 else 0)
    # each rank hands on keys and values of the others' tokens, for as many heads on average; in backward gradients too
    handed = sum(2 * together * sum(own_heads) / ulysses * size for step in range(1, ring))
    assert sent.passed == pytest.approx(attentions * (forward + 2 * backward) * handed)
    assert sent.hops == attentions * (forward + 2 * backward) * (ring - 1)
    assert (sent.gathered, sent.gathers) == (pytest.approx(output * passes), passes)
    assert sent.degree == degree
    leaves = sent.traded * (1 - 1 / ulysses) + sent.passed + output * passes * (1 - 1 / degree)
    assert sent.moved == pytest.approx(leaves)
    after_another = sent.trades * doublings(ulysses) + sent.hops + passes * doublings(degree)
    assert sent.messages == after_another


def test_without_hidden_size_the_output_is_a_quarter_of_an_attentions_traffic() -> None:
    sent = volumes(ulysses=2, ring=1, heads=4, attentions=3, traffic=6.0, forward=2, backward=1)
    assert sent.gathered == pytest.approx(3 * 6.0 * GIB / 3 / 4)


def test_one_rank_and_a_model_without_attention_send_nothing() -> None:
    for ulysses, ring, attentions in ((1, 1, 3), (2, 2, 0)):
        sent = volumes(ulysses=ulysses, ring=ring, heads=4, attentions=attentions, traffic=6.0, forward=1, backward=1)
        assert sent == Volumes(ulysses, ring)
        assert (sent.moved, sent.messages) == (0, 0)


def test_tokens_dealt_anew_are_exchanges_of_all_ranks() -> None:
    sent = volumes(
        ulysses=2, ring=2, heads=4, attentions=0, traffic=0.0, forward=2, backward=1, output=0.0,
        exchanged=1.5, exchanges=5,
    )  # fmt: skip
    assert sent.dealt == pytest.approx(3 * 1.5 * GIB / 4)
    assert (sent.deals, sent.trades, sent.hops) == (15, 0, 0)
    assert sent.moved == pytest.approx(sent.dealt * 3 / 4)
    assert sent.messages == 2 * (15 + 3)


def dit(**changed: Value | None) -> Stage:
    attrs = {
        "heads": 24, "attentions": 5, "hidden": 64, "dtype": "bf16", "params": 10**9, "state": Quantity(8.0, "GiB"),
        "traffic": Formula((Term(1e-4, BS),), "GiB"),
        "forward": Formula((Term(1e-2, BS),), "ms"), "backward": Formula((Term(2e-2, BS),), "ms"),
    }  # fmt: skip
    return Stage("dit", True, Attributes.of(**{**attrs, **changed}))


@given(st.sampled_from(GRIDS), st.data(), st.sampled_from([Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD]))
@settings(max_examples=80, deadline=None)
def test_time_is_that_of_the_busiest_port_and_network_card(
    grid: tuple[int, int], data: st.DataObject, phase: Phase
) -> None:
    """Groups with as many ranks on each machine that they are on."""
    ulysses, ring = grid
    ranks = data.draw(st.sampled_from(GROUPS[ulysses * ring]))
    cascade = Cascade("c", phase, "dit", (0,), 1, 24_000, 0)
    cost = CostModel(Module("m", Level.COSTED, POD, stages=(dit(),), cascades=(cascade,)))
    sent = cost.volumes(cascade, Attention(ulysses, ring))
    took = cost.communication(cascade, Attention(ulysses, ring), ranks)
    exchanges = [ranks[first : first + ulysses] for first in range(0, len(ranks), ulysses)] if ulysses > 1 else []
    rings = [ranks[first::ulysses] for first in range(ulysses)] if ring > 1 else []
    right = all_to_all([ranks], sent.gathered, sent.gathers, ranks, alone=True)
    right += all_to_all(exchanges, sent.traded, sent.trades, ranks)
    right += around(rings, sent.passed, sent.hops, ranks)
    assert took == pytest.approx(right)
    assert cost.communication(cascade, Attention(ulysses, ring), ranks, recompute=1) > took or phase is Phase.FORWARD
    assert (penalty(POD, ranks) == 1) == (len({rank // 8 for rank in ranks}) == 1)


def speed(name: str) -> float:
    """Bytes in a ms, or ms."""
    return quantity(POD.attrs[name]) * (1e-3 if name.endswith("latency") else 1e6)


def all_to_all(
    groups: list[tuple[int, ...]], size: float, calls: float, ranks: tuple[int, ...], alone: bool = False
) -> float:
    """ms in which every member sends a part of ``size`` to each other one. A gather passes every byte through a card
    once (``alone``), however many ranks share it."""
    if not groups:
        return 0.0
    cards: Counter[tuple[int, str]] = Counter()
    ports: Counter[int] = Counter()
    crossing = False
    for group in groups:
        for rank in group:
            for peer in group:
                if peer == rank:
                    continue
                if peer // 8 == rank // 8:
                    ports[rank] += 1
                else:
                    crossing = True
                    cards[rank // 8, nic_of(POD, rank) if not alone else str(rank)] += 1
    part = size / len(groups[0])
    inside = max(ports.values(), default=0) * part / speed("intra")
    outside = max(cards.values(), default=0) * part / speed("inter") * penalty(POD, ranks)
    latency = speed("inter_latency") if crossing else speed("latency")
    return inside + outside + calls * doublings(len(groups[0])) * latency


def around(rings: list[tuple[int, ...]], size: float, hops: float, ranks: tuple[int, ...]) -> float:
    """ms in which every rank hands so many bytes on to the next of its ring; the slowest hop sets the pace."""
    if not rings:
        return 0.0
    cards: Counter[tuple[int, str]] = Counter()
    for ring in rings:
        for rank, following in zip(ring, (*ring[1:], ring[0]), strict=True):
            if rank // 8 != following // 8:
                cards[rank // 8, nic_of(POD, rank)] += 1
    if not cards:
        return size / speed("intra") + hops * speed("latency")
    return max(cards.values()) * size / speed("inter") * penalty(POD, ranks) + hops * speed("inter_latency")


# -- the end of an iteration -------------------------------------------------------------------------------------------


def ring_of(size: float, ranks: tuple[int, ...], passes: int) -> float:
    """ms of a ring in which every rank passes on (n-1)/n of ``size`` bytes so often."""
    return passes * all_to_all([ranks], size, 1, ranks, alone=True)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 1, 2, 3, 4), (0, 1, 8, 9), tuple(range(16))])
def test_gradients_go_round_twice_and_where_the_optimizer_is_dealt_out_once(ranks: tuple[int, ...]) -> None:
    alone = len(ranks) == 1
    whole = 10**9 * 2
    assert reduce_time(POD, dit(), ranks) == pytest.approx(0.0 if alone else ring_of(whole, ranks, 2))
    assert reduce_time(POD, dit(gradients="f32"), ranks, 5e6) == pytest.approx(0.0 if alone else ring_of(5e6, ranks, 2))
    dealt = reduce_time(POD, dit(sharded=len(ranks)), ranks)
    assert dealt == pytest.approx(0.0 if alone else ring_of(whole, ranks, 1))
    in_cells = reduce_time(POD, dit(cell=4, sharded=4), ranks)
    assert in_cells == pytest.approx(0.0 if alone else ring_of(whole / 4, ranks, 2)), "shards of cells are all-reduced"
    pod = replace(POD, attrs=POD.attrs.updated(pcie=Quantity(20.0, "GB/s")))
    host = reduce_time(pod, dit(host=("optimizer", "parameters")), ranks)
    copied = 2 * whole / 10e6  # in and out, over a switch that two devices share
    assert host == pytest.approx(0.0 if alone else ring_of(whole, ranks, 2) + copied)
    assert norm_time(POD, ranks) == pytest.approx(0.0 if alone else ring_of(8, ranks, 2))
    assert reduce_time(POD, replace(dit(), trained=False), ranks) == 0.0


def test_a_measured_all_reduce_stands_for_the_links_inside_a_machine() -> None:
    measured = replace(POD, attrs=POD.attrs.updated(all_reduce=Quantity(100.0, "GB/s")))
    slower = reduce_time(measured, dit(), (0, 1, 2, 3)) - reduce_time(POD, dit(), (0, 1, 2, 3))
    passed = 2 * 2e9 * 3 / 4
    assert slower == pytest.approx(passed / 100e6 - passed / speed("intra"))


def test_updated_layers_are_gathered_one_after_another_those_that_train() -> None:
    layers = (("blocks.0", 10**8), ("blocks.1", 0), ("blocks.2", 3 * 10**8))
    stage, ranks = dit(layers=layers, params=10**9, trained=5 * 10**8), (0, 1, 2, 3)
    sizes = [2e8, 0.0, 6e8, 2e8]  # bytes; the last holds what lies in no block
    for chosen in ((0,), (1,), (2, 3), (0, 1, 2, 3)):
        right = sum(ring_of(sizes[layer], ranks, 1) for layer in chosen if sizes[layer])
        assert gather_time(POD, stage, ranks, chosen) == pytest.approx(right)
        assert gather_time(POD, stage, (0,), chosen) == 0.0
        shards = replace(stage, attrs=stage.attrs.updated(cell=2))
        halves = sum(ring_of(sizes[layer] / 2, ranks, 1) for layer in chosen if sizes[layer])
        assert gather_time(POD, shards, ranks, chosen) == pytest.approx(halves)


def test_an_optimizer_reads_and_writes_its_state_once_or_takes_what_was_measured() -> None:
    assert step_time(POD, dit()) == pytest.approx(2 * 8 * GIB / 3.35e12 * 1e3)
    mixed = parse_cluster("1x8:h100-80g+1x8:a100-80g")
    assert step_time(mixed, dit()) == pytest.approx(2 * 8 * GIB / 2.0e12 * 1e3, rel=0.05), "the slowest device"
    unknown = parse_cluster("2:cpu")
    assert step_time(unknown, dit()) > step_time(POD, dit())
    measured = dit(update=Quantity(96.0, "ms"))
    assert step_time(POD, measured) == 96.0
    parts = replace(measured, attrs=measured.attrs.updated(sharded=4, cell=3))
    assert step_time(POD, parts) == 96.0 / 4 / 3


def test_an_optimizer_in_the_host_is_bound_by_its_memory_and_by_what_comes_and_goes() -> None:
    """28 bytes of a parameter for all 8 devices of a node at 100 GB/s; the rest over a switch that two share."""
    pod = replace(POD, attrs=POD.attrs.updated(pcie=Quantity(20.0, "GB/s")))
    own = 10**9 / 4 / 2
    update = own * 28 * 8 / 100e6
    outside = dit(host=("optimizer",), sharded=4, cell=2, gradients="f32")
    assert step_time(pod, outside) == host_update_time(pod, outside) == pytest.approx(update + own * (4 + 2) / 10e6)
    inside = replace(outside, attrs=outside.attrs.updated(host=("optimizer", "parameters")))
    assert step_time(pod, inside) == pytest.approx(update), "the gradients are there"
    fewer = replace(inside, attrs=inside.attrs.updated(trained=10**8))
    assert step_time(pod, fewer) == pytest.approx(update / 10)
