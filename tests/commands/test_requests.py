"""A sampler file and requests through the commands that look at plans: compare, generate --plan-only, explain, show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from arachnec.cli import group
from arachnec.commands.generated import print_request_plan
from arachnec.commands.program_file import read_program
from arachnec.data.requests import Request
from arachnec.executable.folder import read_executable
from arachnec.executable.program_input import demand_own_requests
from arachnec.executable.sampling_folder import (
    Settings,
    read_sampling_executable,
    sampler_digest,
    write_sampling_executable,
)
from arachnec.generation.run import planned_stages
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import quantity
from arachnec.ir.parser import parse_file
from arachnec.models.sampler_file import load_sampler_file
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
    rows = [line.split() for line in told.splitlines()]
    assert any({"large", "6-11", "(2)", "apart", "0-3"} <= set(row) for row in rows)
    makespan = quantity(module.attrs["makespan"]) / 1e3
    assert f"makespan {makespan:.4g} s, lower bound" in told and "peak memory" in told
    assert f"longest {makespan:.4g} s of request" in told
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


def test_equivalence_is_of_programs_that_train(tmp_path: Path) -> None:
    program = tmp_path / "program.cascade"
    program.write_text(GOLDEN.read_text())
    refused = CliRunner().invoke(group, ["check", str(program), "--equivalence"])
    assert refused.exit_code == 2 and "--equivalence is of programs that train" in refused.output


@pytest.mark.parametrize("level", ["traced", "partitioned", "costed"])
def test_a_module_of_requests_that_is_not_lowered_is_told_the_passes_of_requests(level: str, tmp_path: Path) -> None:
    path = tmp_path / "module.cascade"
    path.write_text(f'module @requests attributes {{ level = "{level}", models = ["large"] }} {{\n}}\n')
    with pytest.raises(UserError, match=f"is at level {level}") as told:
        read_program(path)
    assert "schedule-sampling,place,lower -o" in render(told.value.diagnostics[0])


def test_a_compiled_sampler_file_is_looked_at_and_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The executable stands by itself: its own sampler file, its own requests, nothing sampled twice."""
    sampler, data = map(str, files)
    exe, results = tmp_path / "exe", tmp_path / "exe" / "results"
    arguments = ("compile", sampler, "--data", data, "--cluster", "1:cpu", "--switch", "fixed=3", "-o", str(exe))
    assert "2 requests, every step taken once" in invoke(*arguments)
    for command in (("show",), ("check",), ("simulate",), ("explain", "--no-what-if")):
        assert invoke(command[0], str(exe), *command[1:])
    invoke("run", str(exe))
    assert {path.name for path in results.glob("*.safetensors")} == {"0.safetensors", "1.safetensors"}
    shown = invoke("show", str(exe))
    assert "measured" in shown and "step 0" not in shown
    assert "Sampling 2 requests on" in invoke("explain", str(exe), "--no-what-if")
    assert invoke("run", str(exe)).count("finished before") == 2
    for option in (["--lr", "1"], ["--no-equivalence"]):
        refused = CliRunner().invoke(group, ["run", str(exe), *option])
        assert refused.exit_code == 2 and f"{option[0]} is of training" in refused.output
    with pytest.raises(UserError, match="is an executable that samples, and trains nothing"):
        read_executable(exe)


def test_an_edited_executable_is_held_to_what_was_asked_for(files: tuple[Path, Path], tmp_path: Path) -> None:
    module = parse_file(GOLDEN)
    requests = tuple(
        Request(n, None, clip.frames, clip.height, clip.width, text_tokens=clip.text)
        for n, clip in enumerate(module.clips)
    )
    traced = parse_file(GOLDEN.with_suffix(".cascade"))
    settings = Settings(str(files[0]), ("large", "small"), "adaptive=0.1")
    (tmp_path / "beside.py").write_text("NUMBER = 1\n")
    path = tmp_path / "sampler.py"
    path.write_text("from beside import NUMBER\n" + SAMPLER)
    sampler = load_sampler_file(path)
    write_sampling_executable(
        tmp_path / "exe", program=module, traced=traced, pipeline="generate", sampler=sampler,
        requests=requests, settings=settings,
    )  # fmt: skip
    executable = read_sampling_executable(tmp_path / "exe")
    assert executable.header.digest == sampler_digest(sampler) != sampler.digest
    (tmp_path / "beside.py").write_text("NUMBER = 2\n")
    assert sampler_digest(sampler) != executable.header.digest  # its requests are sampled again
    assert sampler_digest(load_sampler_file(files[0])) == load_sampler_file(files[0]).digest
    stages = planned_stages(executable)
    demand_own_requests(executable, executable.program, stages)
    fewer = replace(module.clips[0], attrs=module.clips[0].attrs.updated(steps=1))
    with pytest.raises(UserError, match="steps = 1 in the program"):
        demand_own_requests(executable, replace(module, clips=(fewer, *module.clips[1:])), stages)
    with pytest.raises(UserError, match="leaves out clip 0"):
        demand_own_requests(executable, replace(module, clips=module.clips[1:]), stages)
    (tmp_path / "exe" / "requests.json").write_text("[]")
    with pytest.raises(UserError, match=r"requests\.json in .* is not the one"):
        read_sampling_executable(tmp_path / "exe")
