"""A rank that becomes slow gets less work, and as much as the others when it is not any more."""

from __future__ import annotations

import json
from pathlib import Path

from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from tests.distributed.executor_cases import Work, clip, executable, losses, train_on

CLIPS = [clip(number, 5) for number in range(6)]
SLOW_UNTIL = 22  # forwards of the slow rank
# A forward takes 10 ms, and five times as long on rank 1 at first.
SLEEPS = f"""

class Slow(Tiny):
    calls = 0

    def forward(self, x, time):
        import time as clock

        import torch.distributed as dist

        if x.device.type == "cpu" and dist.is_initialized():
            Slow.calls += 1
            slow = dist.get_rank() == 1 and Slow.calls <= {SLOW_UNTIL}
            clock.sleep(0.05 if slow else 0.01)
        return super().forward(x, time)


def build():
    return Slow()
"""


def test_a_slow_rank_gets_less_work_and_all_of_it_again(tmp_path: Path) -> None:
    works = [Work((number,), (number % 2,), float(number // 2)) for number in range(6)]
    folder = executable(tmp_path / "b", [CLIPS], works, 2, more=SLEEPS)
    train_on(2, folder, steps=26)
    steps = json.loads((folder / "run.json").read_text())["steps"]
    times = [step["step_ms"] for step in steps]
    assert len(losses(folder / "run.json")) == 26
    slow, relieved, even = times[1], min(times[5:9]), min(times[-4:])
    assert relieved < 0.8 * slow, times  # 3 forwards of 50 ms, then 1
    assert even < 0.6 * slow, times
    assert work_of(parse_module((folder / "measured.cascade").read_text(), "measured")) == [3, 3]


def work_of(module: Module) -> list[int]:
    return [sum(step.op == "forward" for step in program.instructions) for program in module.programs]
