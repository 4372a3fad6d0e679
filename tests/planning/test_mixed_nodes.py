"""Clusters whose nodes differ: the slowest member of a group sets its pace, and memory is that of each device."""

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.simulator import simulate
from arachnec.cluster.device_specs import DEVICE_SPECS
from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import cluster_for, kinds_of_ranks, machines
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.lowering.programs import lower
from arachnec.passes.check import find_problems
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.pipeline_places import at_level_placed
from arachnec.planning.validate import validate_schedule

MIXED = "1x4:h100-80g+1x4:a100-80g"
SLOWDOWN = DEVICE_SPECS["h100-80g"].sustained / DEVICE_SPECS["a100-80g"].sustained
PASSES = "schedule-z3{budget=0ms},place,lower,check"


def linear(coefficient: float, unit: str) -> Formula:
    return Formula((Term(coefficient, (("S", 1),)),), unit)


def costed(cluster: str, tokens: list[int], saved: float = 1e-4, **more: object) -> Module:
    attrs = {
        "params": 1_000_000,
        "state": Quantity(4.0, "GiB"),
        "forward": linear(1e-2, "ms"),
        "backward": linear(2e-2, "ms"),
        "costs": "table",
        "saved": linear(saved, "GiB"),
        "flops": linear(1e-3, "TFLOP"),
        **more,
    }
    stage = Stage("dit", True, Attributes.of(**attrs))  # type: ignore[arg-type]
    clips = tuple(Clip(i, 17, 480, 832, 100, count) for i, count in enumerate(tokens))
    cascades = tuple(Cascade(str(c.id), Phase.TRAIN, "dit", (c.id,), 1, c.tokens, c.text) for c in clips)
    return Module("m", Level.COSTED, parse_cluster(cluster), clips, (stage,), cascades=cascades)


def planned(module: Module) -> Module:
    lowered = Pipeline.parse(PASSES).run(module)
    assert validate_schedule(lowered) == []
    assert find_problems(lowered) == ()
    return lowered


def test_nodes_keep_the_order_in_which_the_groups_are_written() -> None:
    cluster = parse_cluster("1x4:a100+2x4:h100")
    assert [machine.device for machine in machines(cluster)] == ["a100-80g", "h100-80g", "h100-80g"]
    assert cluster.attrs["device"] == "h100-80g", "the fastest, which costs are for"
    assert quantity(cluster.attrs["intra"]) == DEVICE_SPECS["a100-80g"].intra
    assert kinds_of_ranks(parse_cluster("2x4:h100")) == (tuple(range(8)),)


def test_a_cascade_takes_as_long_as_its_slowest_device() -> None:
    module = costed(MIXED, [10_000])
    cost, cascade = CostModel(module), module.cascades[0]
    assert cost.time(cascade, 1, ranks=(0,)) == pytest.approx(300)
    assert cost.time(cascade, 1, ranks=(5,)) == pytest.approx(300 * SLOWDOWN)
    assert cost.time(cascade, 4, ranks=(2, 3, 4, 5)) == cost.time(cascade, 4, ranks=(4, 5, 6, 7))
    assert cost.time(cascade, 4) == pytest.approx(75), "without ranks, those that suit it best"


@pytest.mark.parametrize("cluster", [MIXED, "1x4:a100-80g+1x4:h100-80g"])
def test_clips_side_by_side_wait_for_the_one_on_the_slowest_devices(cluster: str) -> None:
    module = costed(cluster, [10_000], cell=8, layers=(("blocks.0", 1_000_000),))
    pair = replace(module.cascades[0], clips=(0, 0), batch=2)
    cost = CostModel(module)
    gathers = cost.table.gathering.exposed(pair, 75.0, 150.0)
    assert cost.time(pair, 8, ranks=tuple(range(8)), side=2) == pytest.approx(75 * SLOWDOWN + gathers, rel=1e-3)


def test_cells_on_several_kinds_gather_as_fast_as_the_slowest() -> None:
    module = costed("1x4:h100-80g+1x4:l20", [10_000], cell=4, layers=(("blocks.0", 1_000_000_000),), params=10**9)
    cost, cascade = CostModel(module), module.cascades[0]
    fast, slow = (cost.table.gathering.exposed(cascade, 0.0, 0.0, rank) for rank in (0, 4))
    assert slow > 2 * fast
    assert cost.time(cascade, 8, ranks=tuple(range(8))) > slow


@pytest.mark.parametrize(("shards", "time"), [((5000, 5000), 150.0), ((7500, 2500), 225.0), ((10_000, 0), 300.0)])
def test_a_clip_takes_as_long_as_the_rank_with_most_of_it(shards: tuple[int, int], time: float) -> None:
    cascade = costed("1x2:h100-80g", [10_000]).cascades[0].with_attrs(shards=shards)
    cost = CostModel(replace(costed("1x2:h100-80g", [10_000]), cascades=(cascade,)))
    assert cost.time(cascade, 2, ranks=(0, 1)) == pytest.approx(time)
    assert cost.memory(cascade, 2) == pytest.approx(1e-4 * max(shards))
    assert cost.time(cascade, 1) == pytest.approx(300), "shards are for two ranks"


def test_shards_by_speed_let_no_device_wait() -> None:
    tokens = 10_000
    fast = round(tokens * SLOWDOWN / (1 + SLOWDOWN))
    cascade = costed("1x1:h100-80g+1x1:a100-80g", [tokens]).cascades[0].with_attrs(shards=(fast, tokens - fast))
    cost = CostModel(replace(costed("1x1:h100-80g+1x1:a100-80g", [tokens]), cascades=(cascade,)))
    even = cost.time(cascade.with_attrs(shards=None), 2, ranks=(0, 1))
    assert even == pytest.approx(150 * SLOWDOWN)
    assert cost.time(cascade, 2, ranks=(0, 1)) == pytest.approx(300 * SLOWDOWN / (1 + SLOWDOWN), rel=1e-3)
    assert cost.time(cascade, 2, ranks=(1, 0)) > even, "the slow device has most"


def test_ranks_wait_for_each_other_before_and_behind_attention() -> None:
    """The fast device computes all that tokens take, the slow one half of the pairs."""
    pairs = Formula((Term(1e-2, (("B", 1), ("S", 1))), Term(1e-6, (("B", 1), ("S", 2)))), "ms")
    module = costed("1x1:h100-80g+1x1:a100-80g", [10_000], forward=pairs, backward=pairs)
    cascade = module.cascades[0].with_attrs(shards=(10_000, 0))
    cost = CostModel(replace(module, cascades=(cascade,)))
    assert cost.time(cascade, 2, ranks=(0, 1)) == pytest.approx(2 * (100 + 100 / 2 * SLOWDOWN))


def test_a_plan_whose_shards_fit_no_device_is_refused() -> None:
    module = costed("1x2:h100-80g", [100_000], saved=1e-3)

    def problems(shards: tuple[int, int], memory: float) -> list[str]:
        cascade = module.cascades[0].with_attrs(degree=2, ranks=(0, 1), shards=shards, start=Quantity(0.0, "ms"))
        cost = CostModel(replace(module, cascades=(cascade,)))
        times = {"end": Quantity(cost.placed_time(cascade), "ms"), "memory": Quantity(memory, "GiB")}
        placed = at_level_placed(module, [cascade.with_attrs(**times)], {"dit": (0, 1)})
        return [problem.kind for problem in find_problems(lower(placed))]

    assert problems((50_000, 50_000), 50.0) == []
    assert problems((60_000, 40_000), 60.0) == []
    assert problems((100_000, 0), 100.0) == ["out of memory"]
    assert set(problems((100_000, 0), 50.0)) == {"cascade memory too low", "memory too low"}


@pytest.mark.parametrize(("symbol", "size"), [("S", 10_000), ("T", 100)])
def test_an_encoder_and_the_caption_take_longer_on_a_slower_device(symbol: str, size: int) -> None:
    work = Formula((Term(5.0, ()), Term(1e-2, ((symbol, 1),))), "ms")
    module = costed(MIXED, [10_000], forward=work)
    for phase in (Phase.ENCODE, Phase.FORWARD):
        cost, cascade = CostModel(module), replace(module.cascades[0], phase=phase)
        assert cost.time(cascade, 1, ranks=(0,)) == pytest.approx(5 + 1e-2 * size)
        assert cost.time(cascade, 1, ranks=(5,)) == pytest.approx(5 + 1e-2 * size * SLOWDOWN), "a launch takes as long"


def test_measured_times_are_those_of_the_fastest_device() -> None:
    module = costed(MIXED, [10_000])
    timed = module.cascades[0].with_attrs(times=((1, Quantity(10.0, "ms")), (2, Quantity(6.0, "ms"))))
    cost = CostModel(replace(module, cascades=(timed,)))
    assert cost.time(timed, 2, ranks=(0, 1)) == 6.0
    assert cost.time(timed, 2, ranks=(3, 4)) == pytest.approx(6.0 * SLOWDOWN)


def test_slower_devices_get_less_of_the_work() -> None:
    module = planned(costed(MIXED, [10_000] * 48))
    tokens = [sum(c.tokens for c in module.cascades if rank in c.ranks) for rank in range(8)]
    assert min(tokens[:4]) > max(tokens[4:]) > 0
    capacity = 4 + 4 / SLOWDOWN
    perfect = 48 * 300 / capacity
    assert perfect <= quantity(module.attrs["makespan"]) <= 1.15 * perfect
    assert simulate(module).mfu is not None


@pytest.mark.parametrize("count", [3, 8, 20])
def test_slower_nodes_beside_fast_ones_never_make_a_plan_longer(count: int) -> None:
    tokens = [2_000 + 1_900 * (i % 7) for i in range(count)]
    alone = planned(costed("1x4:h100", tokens))
    both = planned(costed("1x4:h100+1x4:l20", tokens))
    assert quantity(both.attrs["makespan"]) <= 1.001 * quantity(alone.attrs["makespan"])


def test_what_only_some_devices_can_hold_is_placed_there() -> None:
    """30,000 tokens keep 60 GiB at degree 1: too much for an L20, not for an H20."""
    module = planned(costed("1x4:l20+1x4:h20", [30_000] * 4 + [4_000] * 8, saved=2e-3, degrees=(1,)))
    for cascade in module.cascades:
        if cascade.tokens == 30_000:
            assert all(rank >= 4 for rank in cascade.ranks)


def test_a_degree_that_the_large_devices_cannot_reach_counts_with_the_memory_of_the_small_ones() -> None:
    module = costed("1x2:l20+1x2:h20", [60_000], saved=2e-3)
    cost, cascade = CostModel(module), module.cascades[0]
    assert cost.recompute_at(cascade, 2) == 0, "60 GiB on each of two H20"
    assert cost.recompute_at(cascade, 2, (0, 1)) is None
    assert cost.recompute_at(cascade, 3) is None or cost.memory(cascade, 3) <= cost.room_on((0, 2, 3), 3)
    assert set(planned(module).cascades[0].ranks) in ({2, 3}, {0, 1, 2, 3})


def test_recomputation_is_decided_by_the_device_that_a_cascade_lands_on() -> None:
    module = planned(
        costed("1x2:l20+1x2:h20", [30_000] * 12, saved=2e-3, saved_recompute=linear(1e-4, "GiB"), degrees=(1,))
    )
    on_small = [c for c in module.cascades if c.ranks[0] < 2]
    assert on_small
    assert all(c.recomputes for c in on_small)
    assert not any(c.recomputes for c in module.cascades if c.ranks[0] >= 2)


def test_a_clip_that_no_device_holds_is_refused_with_the_largest_memory() -> None:
    with pytest.raises(UserError) as caught:
        planned(costed("1x2:l20+1x2:h20", [400_000], saved=2e-3, degrees=(1,)))
    assert "there are 95.0" in render(caught.value.diagnostics[0])


def test_mixed_clusters_survive_printing_and_parsing() -> None:
    module = planned(costed(MIXED, [5_000] * 9))
    assert parse_module(print_module(module)) == module


def test_a_run_on_fewer_or_more_nodes_keeps_their_kinds() -> None:
    cluster = parse_cluster("2x4:h100+2x4:a100")
    assert [m.device[:4] for m in machines(cluster_for(cluster, 12))] == ["h100", "h100", "a100"]
    assert [m.device[:4] for m in machines(cluster_for(cluster, 8))] == ["h100", "h100"]
    assert len(machines(cluster_for(cluster, 24))) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpus = 4\nnodes = 2\n[[group]]\ndevice = 'h100'\n", "in each `[[group]]`"),
        ("gpus = 4\n[[group]]\nnodes = 2\n", "has no `device`"),
        ("gpus = 4\n[[group]]\ndevice = 'h100'\nnode = 2\n", "did you mean `nodes`?"),
        ("gpus = 4\n[[group]]\ndevice = 'h101'\n", "did you mean `h100`?"),
        ("gpus = 4\n[[group]]\nnodes = 0\ndevice = 'h100'\n", "no GPUs"),
        ("gpus = 4\ngroup = 3\n", "tables `[[group]]`"),
        ("[[group]]\ndevice = 'h100'\n", "has no `gpus`"),
    ],
)
def test_a_wrong_group_gets_one_message_with_its_line(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_cluster(file)
    assert len(caught.value.diagnostics) == 1
    said = render(caught.value.diagnostics[0])
    assert expected in said
    assert f"--> {file}:" in said


def test_groups_of_a_short_form_have_equal_nodes() -> None:
    with pytest.raises(UserError) as caught:
        parse_cluster("1x8:h100+1x4:l20")
    assert "different numbers of GPUs" in render(caught.value.diagnostics[0])
