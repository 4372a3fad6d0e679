"""A sampler file and requests through the commands that look at plans: compare, generate --plan-only, explain, show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from arachnec.cli import group
from arachnec.commands.request_tables import print_request_plan
from arachnec.ir.parser import parse_file
from arachnec.report import plan_report
from tests.commands.small_model import MODEL

SAMPLER = (
    MODEL.split("def build")[0]
    + """
class Steps:
    def set_timesteps(self, steps):
        self.timesteps = torch.linspace(1000, 1000 / steps, steps)

    def step(self, prediction, timestep, latents):
        return latents - prediction

def models():
    return {"large": lambda: Net(), "small": lambda: Net()}

scheduler = Steps

def start(request, generator):
    return torch.randn(1, request.frames * (request.height // 16) * (request.width // 16), 8, generator=generator)

def arguments(name, latents, timestep, request, conditional):
    return {"x": latents}
"""
)
REQUESTS = (
    {"caption": "a", "frames": 1, "height": 64, "width": 64, "steps": 6, "guidance": 4.0},
    {"caption": "b", "frames": 2, "height": 64, "width": 96, "steps": 5},
)


GOLDEN = Path(__file__).parents[1] / "golden" / "schedule_sampling" / "adaptive.expect"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("requests")
    (folder / "sampler.py").write_text(SAMPLER)
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REQUESTS))
    return folder / "sampler.py", folder / "requests.jsonl"


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(group, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_ways_to_sample_are_compared(files: tuple[Path, Path]) -> None:
    sampler, data = map(str, files)
    switch = "adaptive=0.1,least=2,most=4"
    arguments = ("compare", sampler, "--data", data, "--cluster", "2:h100-80g", "--switch", switch, "--json")
    report = json.loads(invoke(*arguments))
    rows = {row["pipeline"]: row for row in report["pipelines"]}
    assert set(rows) == {"generate", "replica", "one-degree", "large-only", "two-pools"} and not report["refused"]
    assert (
        rows["generate"]["makespan_ms"] <= min(rows[name]["makespan_ms"] for name in ("replica", "one-degree")) * 1.01
    )
    for row in rows.values():
        assert row["clips_dropped"] == row["clips_repeated"] == 0
        assert row["p95_latency_ms"] >= row["mean_latency_ms"] > 0


def test_a_plan_alone_has_the_keys_of_every_report(files: tuple[Path, Path], tmp_path: Path) -> None:
    sampler, data = map(str, files)
    arguments = ("generate", sampler, "--data", data, "--cluster", "2:h100-80g", "-o", str(tmp_path / "out"))
    report = json.loads(invoke(*arguments, "--switch", "fixed=3", "--plan-only", "--json"))
    keys = {"makespan_ms", "iteration_ms", "bound_ms", "gap", "proved_optimal", "imbalance", "planning_ms"}
    assert keys | {"peak_memory_gib", "requests"} <= set(report)
    segments = [row for row in report["cascades"] if row["phase"] == "denoise"]
    assert sum(row["planned_steps"] for row in segments) == 11


def test_a_plan_is_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    module = parse_file(GOLDEN)
    print_request_plan(module, plan_report(module, 1.0), 1.0, Path("out/plan/program.cascade"))
    told = capsys.readouterr().out
    assert told.startswith(
        "large then small, switch adaptive=0.1 after 0 to 12 steps, planned for 0, 8, 10: 3 requests on 4 x"
    )
    words = [line.split() for line in told.splitlines()]
    assert ["large", "6-11", "(2)", "2", "2", "apart", "ulysses", "2", "0-3", "1.869", "s", "2.491", "s"] in words
    assert "makespan 3.54 s, lower bound 3.422 s, gap 3.4%" in told and "peak memory 41.1 GiB" in told
    assert "latency: mean 3.471 s, 95th percentile 3.54 s, longest 3.54 s of request 0" in told
    assert "3 requests, every step taken once, whenever it switches" in told


def test_options_of_training_and_of_sampling_are_told_apart(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    for path, option in ((model, ("--switch", "fixed=2")), (files[0], ("--batch", "2"))):
        arguments = ["compare", str(path), "--data", str(files[1]), "--cluster", "2:h100-80g", *option]
        result = CliRunner().invoke(group, arguments)
        assert result.exit_code == 2


@pytest.mark.parametrize("command", ["show", "simulate", "explain", "check"])
def test_a_lowered_module_of_requests_is_looked_at(command: str, tmp_path: Path) -> None:
    program = tmp_path / "program.cascade"
    program.write_text(GOLDEN.read_text())
    options = ("--no-what-if",) if command == "explain" else ()
    assert invoke(command, str(program), *options)
