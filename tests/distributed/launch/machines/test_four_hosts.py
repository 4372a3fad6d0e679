"""Placement on four hosts in two racks, made of network namespaces: bytes on the uplinks, losses, and no trace left.

Nothing here depends on how long anything takes; ``benchmarks/four_hosts.py`` measures that.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed.executor_cases import RUNS
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[4]
BENCHMARKS = ROOT / "benchmarks"
PASSES = "partition{policy=single},annotate,schedule-static{degree=2}"

pytestmark = pytest.mark.root


def test_placement_that_knows_the_racks_sends_less_between_them_and_changes_no_loss(
    fabric: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arachnec.backends.reference import run_reference
    from arachnec.executable.folder import read_executable

    bench = importlib.import_module("four_hosts")
    monkeypatch.setattr(bench, "WORKER", "tests.distributed.launch.machines.capturing_once")  # else as there
    monkeypatch.setattr(sys, "executable", warm_python(RUNS))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    clips, cluster = tmp_path / "clips.jsonl", tmp_path / "cluster.toml"
    bench.write_clips(clips, ((8, 2), (2, 2)))
    timed = [(0, 0.1), (10**6, 20.1)]  # bytes and ms
    bench.write_cluster(cluster, fabric.Fabric(), {"in both racks": timed, "twice between racks": timed})
    plans = bench.compile_plans(tmp_path, clips, cluster, {"one degree": PASSES}, tmp_path / "none")
    folders = {place: folder for (_, place), (folder, _) in plans.items()}
    program = {place: sum(bench.crossing_bytes(module)) for (_, place), (_, module) in plans.items()}
    with fabric.hosts(fabric.Fabric(link_mbit=400, uplink_mbit=400)) as machines:
        steps = bench.run_plans(machines, tmp_path, list(folders.values()), 2).steps

    read = read_executable(folders["aware"])
    alone = run_reference(read.program, read.model_file(), dict(enumerate(read.clips)), read.training).loss
    aware, blind = steps[str(folders["aware"])], steps[str(folders["blind"])]
    assert aware[0]["loss"] == pytest.approx(alone, rel=1e-5)
    for one, other in zip(aware, blind, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)

    assert program["aware"] < program["blind"] / 4
    for place, rows in (("aware", aware), ("blind", blind)):
        crossed = rows[1]["rack 0"] + rows[1]["rack 1"]  # headers, acknowledgements and barriers come on top
        assert program[place] < crossed < 1.15 * program[place] + 200_000
