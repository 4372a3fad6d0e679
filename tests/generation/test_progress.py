"""Where a rank stands in a program of requests: operation, segment, request and denoising step, and for how long."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arachnec.generation.progress import RequestProgress, instruction_limit
from arachnec.ir.nodes import Instruction, Module
from arachnec.ir.values import Attributes, Quantity
from arachnec.launch.phases import PLAN_S, Position, Timeouts
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.step_progress import Clock
from tests.generation.cases import ENCODER, FIXED, REQUESTS, SAMPLER, lowered, partitioned, sampling_of, written
from tests.warm_python import warm_python

pytest.importorskip("diffusers")
HANGS = """

import os
from time import sleep

class Hangs(Tiny):
    calls = 0

    def forward(self, x, time):
        Hangs.calls += 1
        if os.environ.get("RANK") == "1" and Hangs.calls == 4:
            sleep(1000)
        return super().forward(x, time)


def models():
    return {"large": lambda: Hangs()}
"""

KILLED = """

import os, signal
from pathlib import Path

class Dies(Tiny):
    calls = 0

    def forward(self, x, time):
        Dies.calls += 1
        told = Path("{folder}/killed")
        if os.environ.get("RANK") == "1" and Dies.calls == 8 and not told.exists():
            told.write_text(" ".join(path.stem for path in Path("{folder}/out").glob("*.safetensors")))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, time)


def models():
    return {{"large": lambda: Dies()}}
"""


@pytest.fixture
def module(tmp_path: Path) -> Module:
    """Request a's caption is encoded on rank 1 for rank 0; both ranks share the second segment of b."""
    sampling = sampling_of(written(tmp_path, ENCODER), FIXED)
    return lowered(partitioned(sampling, REQUESTS, 2), {"r0.text": {"ranks": (1,)}, "r1.1": {"ranks": (0, 1)}})


def progress_of(module: Module, rank: int) -> RequestProgress:
    clock = Clock(rank, DeviceRuntime.of(torch.device("cpu")))
    return RequestProgress(module, rank, REQUESTS, clock, lambda instruction: 60.0)


def index_of(module: Module, rank: int, op: str, target: str) -> int:
    steps = module.programs[rank].instructions
    return next(i for i, step in enumerate(steps) if (step.op, step.target) == (op, target))


def test_a_place_names_operation_segment_request_and_step(module: Module) -> None:
    progress = progress_of(module, 0)
    progress.at(index_of(module, 0, "denoise", "r1.1"))
    assert progress.place().doing == "denoise %r1.1 (request b)"
    progress.step(2, 5)
    place = progress.place()
    assert (place.doing, place.limit) == ("denoise %r1.1 (request b), step 3 of 5", 60.0)
    progress.result_of(REQUESTS[1])
    assert progress.place().doing == "denoise %r1.1 (request b), the result of request b"
    progress.at(0)
    assert "step" not in progress.place().doing


def test_a_request_that_has_not_arrived_may_be_waited_for_without_a_limit(module: Module) -> None:
    progress = progress_of(module, 0)
    progress.at(index_of(module, 0, "denoise", "r0.0"))
    with progress.arriving():
        assert (progress.place().doing, progress.place().limit) == (
            "denoise %r0.0 (request a), before they arrive", None,
        )  # fmt: skip
    assert progress.place().limit == 60.0


def test_a_segment_waits_for_its_input_and_for_the_ranks_that_share_it(module: Module) -> None:
    progress = progress_of(module, 0)
    first = index_of(module, 0, "denoise", "r0.0")
    sent = Position(0, index_of(module, 1, "send", "r0.text") + 1)
    assert progress.awaited(0, Position(0, first)) == {1: sent}
    shared = progress.awaited(0, Position(0, index_of(module, 0, "denoise", "r1.1")))
    assert shared == {1: Position(0, index_of(module, 1, "denoise", "r1.1"))}
    assert "denoise %r1.1 (request b)" in progress.work(1, None)


def test_the_program_of_another_round_is_followed(module: Module) -> None:
    progress = progress_of(module, 0)
    first = module.programs[0]
    progress.follow(
        replace(module, programs=(replace(first, instructions=first.instructions[-1:]), *module.programs[1:]))
    )
    progress.at(0)
    assert progress.place().doing.startswith(first.instructions[-1].op)


def test_a_denoising_step_has_its_share_of_the_planned_time_and_planning_its_own_limit(module: Module) -> None:
    cascade = next(cascade for cascade in module.cascades if cascade.name == "r0.0")  # three steps
    planned = Instruction("denoise", "r0.0", (), Attributes.of(time=Quantity(12000.0, "ms")))
    for applies, least in ((True, 60.0), (False, 600.0)):
        assert instruction_limit(cascade, planned, Timeouts(), applies=applies) == least + 4.0
    assert instruction_limit(cascade, planned, Timeouts(stall=1.0), applies=True) == 5.0
    assert instruction_limit(None, Instruction("free", "r0.0"), Timeouts(stall=1.0), applies=True) == 1.0
    assert instruction_limit(None, Instruction("replan", "", ()), Timeouts(stall=1.0), applies=True) == PLAN_S


def test_a_rank_that_hangs_in_a_step_ends_the_command_with_its_request(tmp_path: Path) -> None:
    """Of two requests each on a rank of its own; what the other rank has finished stays."""
    (tmp_path / "sampler.py").write_text(SAMPLER + HANGS)
    rows = [{"id": id, "caption": "fox", "frames": 3, "height": 16, "width": 16, "steps": 6} for id in ("a", "b")]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "sampler.py", "--data", "requests.jsonl", "-o", "out", "--cluster", "2:cpu"]
    command = [warm_python(("arachnec.generation.rank",)), "-m", "arachnec.cli", *words, "--stall-timeout", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("error:") == 1
    told = r"rank 1 on host \S+ is silent: in the program of requests it has been in denoise %\S+ \(request [ab]\), "
    assert re.search(told + "step 4 of 6", ended.stderr), ended.stderr
    assert "--stall-timeout" in ended.stderr


def test_a_rank_that_is_killed_takes_along_nothing_that_was_finished(tmp_path: Path) -> None:
    """In its second request. Its first one's file is there by then; the same command does what is left."""
    (tmp_path / "sampler.py").write_text(SAMPLER + KILLED.format(folder=str(tmp_path)))
    rows = [
        {"id": id, "caption": "fox", "frames": 5 - number, "height": 16, "width": 16, "steps": 6}
        for number, id in enumerate("abcd")
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "sampler.py", "--data", "requests.jsonl", "-o", "out", "--cluster", "2:cpu"]
    command = [warm_python(("arachnec.generation.rank",)), "-m", "arachnec.cli", *words]

    def generate() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)

    ended = generate()
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("error:") == 1
    told = re.search(
        r"rank 1 of 2 was killed by SIGKILL; .* denoise %r\d\.\d \(request ([a-d])\), step 2 of 6", ended.stderr
    )
    assert told, ended.stderr
    assert "the same command does the requests that are not finished" in ended.stderr
    there = set((tmp_path / "killed").read_text().split())
    files = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert there and there <= files.keys() and told[1] not in files
    again = generate()
    assert again.returncode == 0, again.stderr
    after = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert after.keys() == set("abcd") and after.items() >= files.items()
    report = json.loads((tmp_path / "out" / "report.json").read_text())["requests"]
    assert {row["id"] for row in report if row["earlier"]} == files.keys()
