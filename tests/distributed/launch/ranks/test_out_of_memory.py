"""Where a rank runs out of memory it says what was planned for that moment, what its device holds, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from arachnec.analysis.memory import usages
from arachnec.analysis.uses import Values
from arachnec.executable.folder import read_executable
from arachnec.ir.diagnostic import UserError, render
from arachnec.runtime.device_runtime import DeviceMemory
from arachnec.runtime.out_of_memory import explained_memory
from tests.distributed.executor_cases import Work, clip, executable, run

CLIPS = (clip("a", 3), clip("b", 5))
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]
FAILS = """

import torch

class Hungry(Tiny):
    def forward(self, x, time):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. And more lines.")

def build():
    return Hungry()
"""


@dataclass(frozen=True)
class Runtime:
    """A device of 80 GiB."""

    held: DeviceMemory

    def memory(self) -> DeviceMemory:
        return self.held

    def name(self) -> str:
        return "NVIDIA H100 80GB HBM3"


def explained(tmp_path: Path, index: int, error: Exception, **held: Any) -> str:
    program = read_executable(executable(tmp_path / "build", [CLIPS], WORKS, 2)).program
    memory = DeviceMemory(**{"total": 80.0, "free_is_shared": True} | held)
    runtime: Any = Runtime(memory)
    with (
        pytest.raises(UserError) as caught,
        explained_memory(runtime, program, program.programs[1], index, "step 7"),
    ):
        raise error
    return render(caught.value.diagnostics[0])


def test_the_message_has_the_plans_numbers_and_the_devices(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
    said = explained(tmp_path, 1, error, allocated=60.0, reserved=76.5, free=1.25)
    program = read_executable(tmp_path / "build").program
    usage = next(u for u in usages(Values(program), program.programs[1]) if u.index == 1)
    assert "rank 1 ran out of memory in `backward %c1` of step 7 (host " in said
    assert ", NVIDIA H100 80GB HBM3)\n" in said
    assert f"  by the plan: {usage.total:.2f} GiB = state {usage.state:.2f} + saved for backward" in said
    assert "; at most " in said
    assert "  on the device: 80.00 GiB, of which 60.00 allocated, 76.50 reserved, 1.25 free\n" in said
    assert "  CUDA out of memory. Tried to allocate 2.00 GiB.\n" in said
    assert "expandable_segments" in said


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"allocated": 30.0, "reserved": 31.0, "free": 0.5}, "48.5 GiB are held outside this rank's allocator"),
        ({"allocated": 77.0, "reserved": 78.0, "free": 0.5}, "more is allocated than the plan knows of"),
    ],
)
def test_the_remedy_follows_from_who_holds_the_memory(tmp_path: Path, held: dict[str, float], expected: str) -> None:
    said = explained(tmp_path, -1, torch.OutOfMemoryError("no more"), **held)
    assert "ran out of memory in step 7 (" in said
    assert expected in said
    assert "compile again for devices with less memory" in said


def test_other_errors_pass(tmp_path: Path) -> None:
    program = read_executable(executable(tmp_path / "build", [CLIPS], WORKS, 2)).program
    runtime: Any = Runtime(DeviceMemory(80.0, 0.0, 0.0, 80.0))
    with pytest.raises(ValueError, match="something else"), explained_memory(runtime, program, program.programs[0]):
        raise ValueError("something else")


def test_a_run_that_runs_out_ends_with_one_message_and_exit_code_2(tmp_path: Path) -> None:
    result = run(executable(tmp_path / "build", [CLIPS], WORKS, 2, more=FAILS))
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error:") == 1
    assert "ran out of memory in `forward %c" in result.stderr
    assert "by the plan: " in result.stderr
    assert "on the device: " in result.stderr
    assert "Tried to allocate 2.00 GiB." in result.stderr
    assert "Traceback" not in result.stderr
