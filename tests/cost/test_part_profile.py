"""A stage of a pipeline takes what was measured of its blocks, of what lies around them, and of a split backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.cost.profile import Measurement, Synchronisation, fit_profile, read_profile, write_profile
from arachnec.ir.nodes import Phase, formula, quantity
from arachnec.ir.stage_sizes import crowding
from arachnec.passes.annotate import part_from_profile
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import traced

# ms a token
TOOK = {
    "Block": {"forward": 1.0, "backward": 2.0, "activation": 1.25, "weight": 0.75},
    "Block_2": {"forward": 3.0, "backward": 7.0, "activation": 3.5, "weight": 3.0},
    "first": {"forward": 0.5, "backward": 0.25, "weight": 0.25},  # whose input needs no gradient
    "last": {"forward": 0.125, "backward": 0.5, "activation": 0.25, "weight": 0.25},
    "batch": {"forward": 0.0625},
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    measured = [
        (f"dit/{part}", phase, [Measurement(1, tokens, 0, 1, ms * tokens) for tokens in (10, 20, 40)])
        for part, phases in TOOK.items()
        for phase, ms in phases.items()
    ]
    path = tmp_path / "profile.json"
    end = Synchronisation("dit", 2, 4108 * 8, 10.0, 4.0)
    write_profile(fit_profile(measured, machine="m", device="cpu", synchronisation=[end]), path)
    return path


def test_a_stage_takes_its_blocks_and_what_lies_before_or_behind_them(profile: Path) -> None:
    passes = (
        f"stages{{p=2}},partition{{policy=single}},annotate{{profile={profile}}},schedule-pipeline{{schedule=zb-h1}}"
    )
    module = Pipeline.parse(passes).run(traced(2, [[clip("a", 3), clip("b", 5)]]))
    assert module.cluster is not None
    crowd = crowding(module.cluster)
    for name, block, end in (("dit_0", "Block", "first"), ("dit_1", "Block_2", "last")):
        attrs = module.stage(name).attrs
        for phase in ("forward", "backward", "activation", "weight"):
            expected = 30 * crowd * (2 * TOOK[block][phase] + TOOK[end].get(phase, 0.0) + TOOK["batch"].get(phase, 0.0))
            assert formula(attrs[phase])(B=1, S=30, T=0) == pytest.approx(expected), (name, phase)
    assert sum(quantity(module.stage(name).attrs["update"]) for name in ("dit_0", "dit_1")) > 3.9 * crowd
    cost = CostModel(module)
    for cascade in module.cascades:
        attrs = module.stage(cascade.stage).attrs
        phase = {Phase.BACKWARD: "activation", Phase.WEIGHT: "weight"}.get(cascade.phase, "forward")
        own = formula(attrs[phase])(B=1, S=cascade.tokens, T=0)
        assert cost.time(cascade, 1) == pytest.approx(own), cascade.name


def test_a_thread_that_makes_batches_takes_a_core_from_cpu_ranks_and_nothing_from_gpus(profile: Path) -> None:
    stages = Pipeline.parse("stages{p=2}").run(traced(2, [[clip("a", 3)]])).stages
    times = []
    for cluster in ("2:cpu", "2:h100-80g"):
        stage = part_from_profile(stages[0], read_profile(profile), parse_cluster(cluster))
        assert stage is not None
        times.append(formula(stage.attrs["forward"])(B=1, S=30, T=0) / crowding(parse_cluster(cluster)))
    assert times[0] - times[1] == pytest.approx(30 * TOOK["batch"]["forward"])


def test_a_profile_without_the_blocks_says_nothing_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    rows = [Measurement(1, tokens, 0, 1, 3.0 * tokens) for tokens in (10, 20)]
    whole = [("dit", phase, rows) for phase in ("forward", "backward")]
    write_profile(fit_profile(whole, machine="m", device="cpu"), path)
    passes = f"stages{{p=2}},partition{{policy=single}},annotate{{profile={path}}}"
    module = Pipeline.parse(passes).run(traced(2, [[clip("a", 3)]]))
    assert {stage.attrs["costs"] for stage in module.stages} == {"device specs"}
