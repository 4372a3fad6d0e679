"""What gathering shows: nothing that compute covers but the ends of each pass, and all of it where nothing computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import intra_of
from arachnec.cost.gathering import Gathering, LayerTimes
from arachnec.cost.profile import OVERLAPPED
from arachnec.ir.nodes import Cascade, Phase, Stage, quantity
from arachnec.ir.parameter_cells import gathered_gib
from arachnec.ir.values import Attributes, Quantity

LAYERS = tuple((f"blocks.{number}", 100_000_000) for number in range(10))
CASCADE = Cascade("c", Phase.TRAIN, "dit", (0,), 1, 1000, 0)


def stage(cell: int | None) -> Stage:
    return Stage("dit", True, Attributes.of(params=1_100_000_000, dtype="bf16", layers=LAYERS, cell=cell))


def gathering(cell: int | None) -> Gathering:
    return Gathering({"dit": stage(cell)}, parse_cluster("2x8:h100-80g"))


def test_a_stage_that_is_whole_everywhere_gathers_nothing() -> None:
    assert gathering(None).exposed(CASCADE, 1.0, 1.0) == 0
    assert gathered_gib(stage(None)) == 0


def test_a_cell_of_one_rank_gathers_nothing() -> None:
    """Its layers may come and go from its host, and between ranks nothing does."""
    assert gathering(1).exposed(CASCADE, 0.0, 0.0) == 0
    assert gathering(1).layer_times(stage(1), 3) == LayerTimes(0.0, 0.0, 0.0, 0.0)


def test_a_stage_without_blocks_gathers_what_it_has_in_every_pass_that_needs_it() -> None:
    """A forward; a backward, which finds it where the forward was the same cascade's; its gradients."""
    own = replace(stage(8), attrs=stage(8).attrs.updated(layers=None))
    model = replace(gathering(8), stages={"dit": own})
    times = model.layer_times(own)
    assert times.gather == times.scatter == 0
    phases = {
        Phase.FORWARD: times.last_gather, Phase.BACKWARD: times.last_gather + times.last_scatter,
        Phase.WEIGHT: times.last_scatter, Phase.TRAIN: times.last_gather + times.last_scatter,
    }  # fmt: skip
    for phase, shown in phases.items():
        for compute in (0.0, 1e6):
            assert model.exposed(replace(CASCADE, phase=phase), compute, compute) == pytest.approx(shown)


def test_every_cell_has_the_times_of_its_own_links() -> None:
    mixed = parse_cluster("1x8:h100-80g+1x8:a100-80g")
    both, sizes = Gathering({"dit": stage(4)}, mixed), (2e8, 2e8)
    for rank in (0, 5, 8, 15, 3, 10):
        speed = intra_of(mixed, rank)
        moving = [size * 3 / 4 / (speed * 1e6) for size in sizes]
        times = both.layer_times(stage(4), rank)
        latency = 2 * quantity(mixed.attrs["latency"]) * 1e-3
        assert (times.gather, times.scatter) == pytest.approx([ms + latency for ms in moving])


def test_long_compute_leaves_the_ends_of_each_pass() -> None:
    model = gathering(8)
    times = model.layer_times(stage(8))
    ends = times.last_gather + 2 * times.gather + times.scatter + times.last_scatter
    assert model.exposed(CASCADE, 1e6, 1e6) == pytest.approx(ends)


def test_a_layer_without_parameters_that_train_scatters_none_and_takes_no_time_for_it() -> None:
    """Not a latency either: nothing is sent."""
    frozen = replace(stage(8), attrs=stage(8).attrs.updated(layers=tuple((name, 0) for name, _ in LAYERS)))
    frozen = replace(frozen, attrs=frozen.attrs.updated(trained=0))
    times = gathering(8).layer_times(frozen)
    assert times.gather > 0
    assert times.scatter == times.last_scatter == 0


def test_without_compute_two_gathers_and_a_scatter_of_every_layer_show() -> None:
    model = gathering(8)
    times = model.layer_times(stage(8))
    everything = 10 * (2 * times.gather + times.scatter) + times.last_gather + times.last_scatter
    assert model.exposed(CASCADE, 0.0, 0.0) == pytest.approx(everything)


def test_cores_that_gather_do_not_compute_so_all_of_it_shows_on_cpu_ranks_of_one_machine() -> None:
    model = Gathering({"dit": stage(2)}, parse_cluster("2:cpu"))
    assert model.exposed(CASCADE, 1e6, 1e6) == model.exposed(CASCADE, 0.0, 0.0) > 0


def test_between_machines_cpu_ranks_compute_while_the_network_carries() -> None:
    model = Gathering({"dit": stage(4)}, parse_cluster("2x2:cpu"))
    assert model.exposed(CASCADE, 1e6, 1e6) < model.exposed(CASCADE, 0.0, 0.0)


def test_a_cell_within_a_machine_takes_what_its_collectives_were_measured_to_take() -> None:
    """A gather of 200 MB on 8 ranks: one latency in three steps, 7/8 of the bytes."""
    pod = parse_cluster("2x8:h100-80g")
    rows = (("all-gather", Quantity(10.0, "us"), Quantity(70.0, "GB/s")),)
    model = replace(gathering(8), cluster=replace(pod, attrs=pod.attrs.updated(collectives=rows)))
    assert model.layer_times(stage(8)).gather == pytest.approx(3 * 0.010 + 200e6 * 7 / 8 / 70e6)
    assert model.layer_times(stage(8)).scatter == gathering(8).layer_times(stage(8)).scatter
    across = replace(gathering(16), cluster=model.cluster)
    assert across.layer_times(stage(16)) == gathering(16).layer_times(stage(16))


def test_a_cell_of_two_machines_gathers_over_the_slower_link() -> None:
    assert gathering(16).layer_times(stage(16)).gather > 4 * gathering(8).layer_times(stage(8)).gather


def test_two_layers_their_gradients_and_the_last_layer_are_whole_at_once() -> None:
    gib = 2**30
    assert gathered_gib(stage(8)) == pytest.approx((2 * 2 + 2 * 2) * 1e8 / gib + (2 + 2) * 1e8 / gib)


def test_compute_beside_a_measured_collective_takes_longer_by_what_was_measured_and_covers_the_rest() -> None:
    """200 and 400 MB on 2 ranks at 1 GB/s take 100 and 200 ms; beside compute they cost it a quarter of that."""
    latency, plain, overlapped = Quantity(0.0, "us"), Quantity(1.0, "GB/s"), Quantity(4.0, "GB/s")
    rows = tuple(
        (op, latency, speed)
        for names, speed in ((OVERLAPPED, plain), (OVERLAPPED.values(), overlapped))
        for op in names
    )
    machine = parse_cluster("2:cpu")
    model = Gathering({"dit": stage(2)}, replace(machine, attrs=machine.attrs.updated(collectives=rows)))
    times = model.layer_times(stage(2))
    assert times.gather_overlapped == pytest.approx(times.gather / 4)
    ends = times.last_gather + 2 * times.gather + times.scatter + times.last_scatter
    covered = 9 * (2 * times.gather + times.scatter) / 4
    assert model.exposed(CASCADE, 1e6, 1e6) == pytest.approx(ends + covered)
    everything = 10 * (2 * times.gather + times.scatter) + times.last_gather + times.last_scatter
    assert model.exposed(CASCADE, 0.0, 0.0) == pytest.approx(everything)
