"""What lies in host memory, and what it costs: as little as lets clips fit, on links that devices of a node share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import Values
from arachnec.backends.simulator import simulate
from arachnec.cluster.device_specs import copy_speed, usable_host_memory
from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.host_placement import PLACED, in_host
from arachnec.ir.nodes import Clip, Cluster, Level, Module, Stage, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.check import find_problems
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.simulation.events import Engine
from arachnec.views.host_memory import host_sentences

BLOCKS = 4
PLAN = "partition,annotate,schedule-z3{steps=5},place,bucket,lower"


def cluster(memory: float, host: float | None, gpus: int = 1) -> Cluster:
    attrs = parse_cluster(f"1x{gpus}:h100").attrs.updated(
        memory=Quantity(memory, "GiB"),
        host_memory=None if host is None else Quantity(host, "GiB"),
        pcie=None if host is None else Quantity(50.0, "GB/s"),
    )
    return Cluster("pod", attrs)


def per_token(value: float) -> Formula:
    return Formula((Term(value, (("B", 1), ("S", 1))),), "GiB")


def stage(billions: float, saved: float) -> Stage:
    """2 bytes of parameters, 2 of gradients, 16 of the optimizer; ``saved`` GiB of a clip's 1000 tokens."""
    count = round(billions * 1e9)
    gib = count / 2**30
    return Stage(
        "dit",
        True,
        Attributes.of(
            params=count, dtype="bf16", hidden=1024, heads=8, attentions=BLOCKS,
            layers=tuple((f"blocks.{number}", count // BLOCKS) for number in range(BLOCKS)),
            flops=Formula((Term(1e-3, (("B", 1), ("S", 1))),), "TFLOP"),
            saved=per_token(saved / 1000), saved_recompute=per_token(saved / 4000),
            state=Quantity(20 * gib, "GiB"), optimizer=Quantity(16 * gib, "GiB"),
        ),
    )  # fmt: skip


def module(memory: float, host: float | None, billions: float = 1.0, saved: float = 4.0, gpus: int = 1) -> Module:
    clips = tuple(Clip(number, 1, 64, 64, 16, 1000) for number in range(gpus))
    return Module("m", Level.TRACED, cluster(memory, host, gpus), clips, (stage(billions, saved),))


def fits(source: Module, what: str) -> bool:
    try:
        Pipeline.parse(f"shard-optimizer,offload{{what={what}}},{PLAN},check").run(source)
    except UserError:
        return False
    return True


@settings(deadline=None, max_examples=12)
@given(st.floats(2, 60), st.floats(0.2, 2), st.floats(0.1, 20), st.sampled_from([None, 8.0, 30.0, 200.0]))
def test_auto_takes_the_first_that_fits(memory: float, billions: float, saved: float, host: float | None) -> None:
    source = module(memory, host, billions, saved)
    fitting = [what for what in ("none", *PLACED) if fits(source, what)]
    try:
        placed = Pipeline.parse(f"shard-optimizer,offload,{PLAN},check").run(source)
    except UserError:
        assert not fitting
        return
    listed = in_host(placed.stage("dit"))
    assert fitting[0] == (listed[-1] if listed else "none")


def test_a_refusal_says_how_much_host_memory_makes_it_fit() -> None:
    with pytest.raises(UserError) as caught:
        Pipeline.parse(f"shard-optimizer,offload,{PLAN}").run(module(10, None))
    said = render(caught.value.diagnostics[0])
    stated = float(said.partition('host_memory = "')[2].partition(" GiB")[0])
    assert fits(module(10, stated), "auto")
    assert not fits(module(10, stated - 2), "auto")


def planned(gpus: int, **attrs: object) -> Module:
    source = module(12, 400, gpus=gpus)
    assert source.cluster is not None
    slow = replace(source.cluster, attrs=source.cluster.attrs.updated(**attrs))  # type: ignore[arg-type]
    return Pipeline.parse(f"offload{{what=inputs}},{PLAN},check").run(replace(source, cluster=slow))


def test_devices_of_a_node_share_what_joins_them_to_its_host() -> None:
    for gpus, share in ((1, 50.0), (2, 25.0), (8, 25.0)):
        assert copy_speed(cluster(80, 100, gpus)) == share
    assert usable_host_memory(cluster(80, 100)) == 90


def test_slow_links_show_and_fast_ones_hide_behind_compute() -> None:
    times = [simulate(planned(1, pcie=Quantity(speed, "GB/s"))).iteration_ms for speed in (0.5, 5.0, 50.0, 500.0)]
    assert times == sorted(times, reverse=True)
    # at 0.5 GB/s the link is all that counts: parameters twice, gradients and the inputs of blocks
    slow = planned(1, pcie=Quantity(0.5, "GB/s"))
    moved = 2 * 2e9
    assert simulate(slow).iteration_ms > moved / 0.5e9 * 1e3


def ends_of_rank_0(lowered: Module) -> list[float]:
    assert lowered.cluster is not None
    engine = Engine(Values(lowered), lowered.cluster)
    engine.run()
    return [i.end for i in engine.intervals if i.rank == 0 and i.op in ("forward", "backward")]


def test_the_simulator_knows_when_other_devices_of_a_node_copy() -> None:
    """A plan takes all of them to copy at once."""
    both = planned(2, pcie=Quantity(0.5, "GB/s"))
    steps = tuple(
        replace(step, attrs=step.attrs.updated(from_host=None, to_host=None)) for step in both.programs[1].instructions
    )
    alone = replace(both, programs=(both.programs[0], replace(both.programs[1], instructions=steps)))
    ends = [quantity(s.attrs["start"]) + quantity(s.attrs["time"]) for s in both.programs[0].instructions[:2]]
    assert ends_of_rank_0(both) == pytest.approx(ends, rel=1e-3)
    assert all(end < 0.6 * planned_end for end, planned_end in zip(ends_of_rank_0(alone), ends, strict=True))


def test_a_plan_with_host_memory_reads_back_and_holds() -> None:
    lowered = planned(2)
    again = parse_module(print_module(lowered), "again")
    assert not find_problems(again)
    sentences = host_sentences(lowered, CostModel(lowered))
    assert "In host memory lie optimizer and parameters and inputs of @dit" in sentences[0]
    assert quantity(lowered.programs[0].attrs["host_state"]) > 0


@pytest.mark.parametrize("name", ["one_24g", "one_h100_512g"])
def test_the_examples_name_their_host_memory(name: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "clusters" / f"{name}.toml"
    assert usable_host_memory(parse_cluster(path)) > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("host_memory = 512", "expected a positive number of GiB"),
        ('host_memory = "512 GB"', "GiB"),
        ('pcie = "0 GB/s"', "pcie"),
    ],
)
def test_a_host_without_a_unit_is_refused(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'gpus = 1\ndevice = "h100"\n{line}\n')
    with pytest.raises(UserError) as caught:
        parse_cluster(file)
    assert said in render(caught.value.diagnostics[0])
