"""The simulator against hand-computed times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given

from arachnec.backends.simulator import simulate
from arachnec.cluster.topology import handoff_time
from arachnec.ir.nodes import Clip, Level, Module, Phase
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Formula, Quantity, Term
from arachnec.ir.verify import verify
from arachnec.lowering.programs import lower
from arachnec.passes.check import find_problems
from tests.passes.plans import VAE, cluster, equal_clips, linear, module_of, placed_modules, timed

GOLDEN = Path(__file__).parents[1] / "golden"
MS_OF_GIB = 2**30 / 450e6  # over a link within a node


def golden(case: str) -> Module:
    module = parse_module((GOLDEN / f"{case}.cascade").read_text(encoding="utf-8"), case)
    assert not verify(module)
    return module


def with_output(module: Module, gib_per_token: float) -> Module:
    vae = replace(VAE, attrs=VAE.attrs.updated(output=linear(gib_per_token, "GiB")))
    return replace(module, stages=(vae, *module.stages[1:]))


def one_clip(encoder: int, ranks: tuple[int, ...], nodes: int = 1, gib: float = 1.0) -> Module:
    """Encoded from 0 to 1 ms, trained in 30 ms; the encoder's output has ``gib`` GiB."""
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (encoder,)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (1.0, 31.0), ranks),
    ]
    placed = module_of(cluster(nodes=nodes), equal_clips(), cascades)
    return lower(with_output(placed, gib / 1000))


@given(placed_modules())
def test_no_iteration_is_shorter_than_its_plan_or_longer_than_all_of_it_in_a_row(module: Module) -> None:
    lowered = lower(module)
    simulation = simulate(lowered)
    planned = max(cascade.end for cascade in module.cascades)
    in_a_row = sum(cascade.end - cascade.start for cascade in module.cascades)
    transfers = sum(t.end - t.start for t in simulation.timeline.transfers)
    assert planned <= simulation.makespan_ms + 1e-6
    assert simulation.makespan_ms <= in_a_row + transfers + 1e-6


@given(placed_modules())
def test_no_rank_does_two_things_at_once_and_busy_and_idle_make_the_iteration(module: Module) -> None:
    simulation = simulate(lower(module))
    for lane in simulation.timeline.lanes.values():
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(lane))
    for rank, (busy, idle) in enumerate(zip(simulation.busy_ms, simulation.idle_ms, strict=True)):
        synchronising = sum(i.end - i.start for i in simulation.timeline.lanes[rank] if i.op in ("reduce", "step"))
        assert busy + idle + synchronising == pytest.approx(simulation.iteration_ms)


def test_a_handoff_within_a_node_takes_latency_and_bytes_over_bandwidth() -> None:
    simulation = simulate(one_clip(0, (1,)))
    (transfer,) = simulation.timeline.transfers
    assert transfer.end - transfer.start == pytest.approx(0.010 + MS_OF_GIB)
    assert simulation.makespan_ms == pytest.approx(31 + 0.010 + MS_OF_GIB)


def test_a_handoff_between_nodes_takes_the_slower_link() -> None:
    simulation = simulate(one_clip(0, (4,), nodes=2))
    (transfer,) = simulation.timeline.transfers
    assert transfer.end - transfer.start == pytest.approx(0.020 + 9 * MS_OF_GIB)


@pytest.mark.parametrize(("ranks", "latency"), [((1,), 0.01), ((4,), 0.02)])
def test_a_handoff_takes_the_hosts_link_where_that_is_known(ranks: tuple[int, ...], latency: float) -> None:
    module = one_clip(0, ranks, nodes=2)
    assert module.cluster is not None
    slow = replace(module.cluster, attrs=module.cluster.attrs.updated(host_link=Quantity(2.0, "GB/s")))
    (transfer,) = simulate(replace(module, cluster=slow)).timeline.transfers
    assert transfer.end - transfer.start == pytest.approx(2**30 / 2e6 + latency)
    assert handoff_time(slow, 0, ranks[0], 2**30) == pytest.approx(transfer.end - transfer.start)


def test_handoffs_between_hosts_share_their_link_and_leave_the_devices_to_cascades() -> None:
    """Two ranks of node 0 hand over at one time, each at half the speed."""
    cascades = [
        timed("e0", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("e1", Phase.ENCODE, 1, 1000, (), (0.0, 1.0), (1,)),
        timed("t0", Phase.TRAIN, 0, 1000, ("e0",), (1.0, 31.0), (4,)),
        timed("t1", Phase.TRAIN, 1, 1000, ("e1",), (1.0, 31.0), (5,)),
    ]
    pod = cluster(nodes=2)
    pod = replace(pod, attrs=pod.attrs.updated(host_link=Quantity(2.0, "GB/s")))
    module = lower(with_output(module_of(pod, equal_clips(2), cascades), 1 / 1000))
    transfers = simulate(module).timeline.transfers
    assert [t.end - t.start for t in transfers] == pytest.approx([2 * 2**30 / 2e6 + 0.02] * 2)


def test_transfers_out_of_one_device_share_its_port() -> None:
    simulation = simulate(one_clip(0, (1, 2, 3)))
    ends = [t.end - t.start for t in simulation.timeline.transfers]
    assert ends == pytest.approx([0.010 + 3 * MS_OF_GIB] * 3)


def test_a_rank_that_computes_is_sent_what_it_reads_next_if_it_has_room() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("s", Phase.TRAIN, 1, 1000, (), (0.0, 30.0), (1,)),
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (30.0, 60.0), (1,)),
    ]

    def starts(memory: float) -> float:
        lowered = lower(with_output(module_of(cluster(memory=memory), clips, cascades), 1 / 1000))
        return next(i.start for i in simulate(lowered).timeline.intervals if (i.op, i.target) == ("forward", "t"))

    assert starts(80.0) == pytest.approx(30.0)
    # 13 of the stages, 20 for the backward, 1 to receive and 1/16 for each of five communicators
    assert starts(34.3125) == pytest.approx(30.0)
    assert starts(33.5) == pytest.approx(30.0 + 0.010 + MS_OF_GIB)


def test_a_transfer_speeds_up_when_another_one_ends() -> None:
    clips = [Clip(number, 17, 480, 832, 0, tokens) for number, tokens in enumerate((1000, 3000))]
    cascades = [
        timed("a", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("b", Phase.ENCODE, 1, 3000, (), (0.0, 1.0), (1,)),
        timed("s", Phase.TRAIN, 0, 1000, ("a",), (1.0, 31.0), (4,)),
        timed("t", Phase.TRAIN, 1, 3000, ("b",), (1.0, 91.0), (5,)),
    ]
    # one NIC a node: 1 and 3 GiB share it until the small one has left after 2, then 2 GiB run alone
    lowered = lower(with_output(module_of(cluster(nodes=2), clips, cascades), 1 / 1000))
    took = {t.cascade: t.end - t.start for t in simulate(lowered).timeline.transfers}
    assert took == pytest.approx({"a": 0.020 + 2 * 9 * MS_OF_GIB, "b": 0.020 + 4 * 9 * MS_OF_GIB})


def test_devices_on_different_nics_do_not_slow_each_other() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("a", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("b", Phase.ENCODE, 1, 1000, (), (0.0, 1.0), (2,)),
        timed("s", Phase.TRAIN, 0, 1000, ("a",), (1.0, 31.0), (4,)),
        timed("t", Phase.TRAIN, 1, 1000, ("b",), (1.0, 31.0), (6,)),
    ]
    pod = cluster(nodes=2)
    pod = replace(pod, attrs=pod.attrs.updated(nics="AABB"))
    lowered = lower(with_output(module_of(pod, clips, cascades), 1 / 1000))
    took = [t.end - t.start for t in simulate(lowered).timeline.transfers]
    assert took == pytest.approx([0.020 + 9 * MS_OF_GIB] * 2)


def test_nobody_waits_at_a_receive_before_the_value_is_read() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 1.0), (0,)),
        timed("own", Phase.TRAIN, 1, 1000, (), (1.0, 31.0), (1,)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (31.0, 61.0), (1,)),
    ]
    lowered = lower(with_output(module_of(cluster(), clips, cascades), 1 / 1000))
    lane = simulate(lowered).timeline.lanes[1]
    assert [(i.op, i.target) for i in lane][:3] == [("forward", "own"), ("backward", "own"), ("forward", "t")]
    assert lane[0].start == 0.0  # the receive stands before it and is not waited for
    assert lane[2].start == pytest.approx(30.0)


def test_a_group_starts_when_its_last_rank_has_come() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0,)),
        timed("b", Phase.TRAIN, 1, 1000, (), (30.0, 45.0), (0, 1)),
    ]
    lanes = simulate(lower(module_of(cluster(), clips, cascades))).timeline.lanes
    assert lanes[1][0].start == lanes[0][2].start == pytest.approx(30.0)


def test_ranks_that_wait_for_each_other_are_an_error_of_whoever_did_not_check() -> None:
    lowered = golden("check/collectives_in_two_orders")
    with pytest.raises(RuntimeError, match="stands still"):
        simulate(lowered)


def test_imbalance_is_the_mean_distance_to_the_busiest_rank() -> None:
    clips = equal_clips(2)
    cascades = [
        timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 40.0), (0,)),
        timed("b", Phase.TRAIN, 1, 1000, (), (0.0, 10.0), (1,)),
    ]
    simulation = simulate(lower(module_of(cluster(gpus=2), clips, cascades)))
    assert simulation.imbalance == pytest.approx((0 + 0.75) / 2)


def test_mfu_counts_three_forwards_a_training_clip_over_the_devices_peak() -> None:
    module = one_clip(0, (0,), gib=0.0)
    assert simulate(module).mfu is None
    flops = Formula((Term(1.0, ()),), "TFLOP")
    dit = replace(module.stages[1], attrs=module.stages[1].attrs.updated(flops=flops))
    simulation = simulate(replace(module, stages=(module.stages[0], dit)))
    assert simulation.mfu == pytest.approx(3.0 / (simulation.iteration_ms / 1e3 * 4 * 989))


@pytest.mark.parametrize("case", ["check/pipeline_1f1b", "lower/pipeline_1f1b"])
def test_1f1b_over_two_stages_has_the_bubble_of_p_minus_1_over_m_plus_p_minus_1(case: str) -> None:
    simulation = simulate(lowered_golden(case))
    stages, micro_batches = 2, 4
    bubble = (stages - 1) / (micro_batches + stages - 1)
    for busy in simulation.busy_ms:
        assert 1 - busy / simulation.makespan_ms == pytest.approx(bubble, abs=0.005)  # the handoffs take 0.4 %


@pytest.mark.parametrize("case", ["check/pipeline_zero_bubble", "lower/pipeline_zero_bubble"])
def test_splitting_the_backward_leaves_a_third_of_the_bubble(case: str) -> None:
    simulation = simulate(lowered_golden(case))
    of_1f1b = (2 - 1) * (10 + 20)  # (p - 1) (T_F + T_B + T_W)
    for busy in simulation.busy_ms:
        assert simulation.makespan_ms - busy == pytest.approx(of_1f1b / 3, abs=0.5)


@pytest.mark.parametrize("case", ["check/two_model_sampling", "lower/two_model_sampling"])
def test_two_models_sample_one_after_the_other_and_side_by_side(case: str) -> None:
    lanes = simulate(lowered_golden(case)).timeline.lanes
    large = {i.target: i for i in lanes[0] if i.op == "denoise"}
    small = {i.target: i for i in lanes[4] if i.op == "denoise"}
    for clip in range(3):
        assert small[f"b{clip}"].start >= large[f"a{clip}"].end
    assert small["b0"].start < large["a1"].end


def test_only_a_pipelines_own_ranks_hold_its_stages_and_reduce_them() -> None:
    lowered = lower(golden("lower/pipeline_1f1b"))
    assert [(i.target, i.peers) for p in lowered.programs for i in p.instructions if i.op == "reduce"] == [
        ("front", (0,)),
        ("back", (1,)),
    ]
    assert [p.attrs["state"] for p in lowered.programs] == [Quantity(20.0, "GiB")] * 2


@pytest.mark.parametrize("case", sorted(p.stem for p in (GOLDEN / "future").glob("*.cascade")))
def test_what_comes_can_be_said_at_the_scheduled_level(case: str) -> None:
    assert golden(f"future/{case}").level is Level.SCHEDULED


def lowered_golden(case: str) -> Module:
    module = golden(case)
    lowered = lower(module) if module.level is Level.PLACED else module
    assert not verify(lowered)
    assert not find_problems(lowered)
    return lowered
