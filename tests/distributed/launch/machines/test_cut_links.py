"""A link between hosts is cut in the middle of a step: every rank ends, and says which is silent, in what, with which
clip."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.distributed.executor_cases import RUNS, Work, clip, executable
from tests.slow import SLOW
from tests.warm_python import warm_python

CLIPS = (clip("a", 3), clip("b", 5))
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1, 2), 0.0)]  # the second clip is shared by two hosts
STARTS_S, STALL_S, ENDS_S = 200.0, 8.0, 60.0
CUT_NOW = """

import pathlib, time

def sample(clip, generator, inner=sample, calls=[]):
    calls.append(clip.id)
    place = pathlib.Path(__file__).parent.parent
    if clip.id == "b" and len(calls) >= 40:  # more than are drawn to capture the model
        (place / "begun").touch()
        while not (place / "cut").exists():
            time.sleep(0.05)
    return inner(clip, generator)
"""

pytestmark = pytest.mark.root


@SLOW
def test_a_link_between_two_hosts_of_a_clip_is_cut(fabric: ModuleType, tmp_path: Path) -> None:
    with training(fabric, tmp_path) as (machines, ranks):
        fabric.cut(machines, 1, 2)
        (tmp_path / "cut").touch()
        codes, seconds = ended(ranks)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
    assert codes == [2, 2, 2], said
    assert seconds < STALL_S + ENDS_S
    for text in said:
        assert text.count("error:") == 1, text
        assert re.search(
            r"error: rank [12] on host \S+ is silent: in step \d+ it has been in forward %c1 \(clip b\)", text
        )
        assert re.search(r"where rank [12] came too: the network between them may be cut", text)


def test_a_host_whose_wire_is_out(fabric: ModuleType, tmp_path: Path) -> None:
    with training(fabric, tmp_path) as (machines, ranks):
        fabric.unplug(machines, 2)
        (tmp_path / "cut").touch()
        codes, seconds = ended(ranks)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
    assert codes == [2, 2, 2], said
    assert seconds < STALL_S + ENDS_S
    for text in said[:2]:
        assert text.count("error:") == 1, text
        silent = r"rank 2 of 3 on host \S+ has given no sign of life for \d+ s"
        held_up = r"rank 1 on host \S+ is silent: .*, where rank 2 came too"  # where rank 2 had told that it came
        assert re.search(f"error: ({silent}|{held_up})", text)
        assert "forward %c1 (clip b)" in text
    assert "error: rank 2 on host" in said[2]  # the store is beyond the wire
    assert "cannot reach the rendezvous store any more" in said[2]


@contextmanager
def training(fabric: ModuleType, place: Path) -> Iterator[tuple[Any, list[subprocess.Popen[bytes]]]]:
    """Three hosts that train, one rank each, and are in their third step; the second and third wait for ``cut``."""
    folder = executable(place / "build", [CLIPS], WORKS, 3, more=CUT_NOW)
    worker = [warm_python(RUNS), "-m", "arachnec.backends.torch_distributed.worker", str(folder), "--steps", "1000000"]
    limits = ["--stall-timeout", str(STALL_S), "--step-timeout", "500", "--start-timeout", "500"]
    ranks: list[subprocess.Popen[bytes]] = []
    with fabric.hosts(fabric.Fabric(racks=1, hosts=3)) as machines:
        try:
            for rank in range(3):
                apart = ["sh", "-c", '"$@"; exit $?', "sh"]  # a parent of its own, as on a host of its own
                with (place / f"{rank}.log").open("wb") as log:
                    ranks.append(
                        subprocess.Popen(
                            ["ip", "netns", "exec", machines.host(rank), *apart, *worker, *limits],
                            env={**os.environ, "OMP_NUM_THREADS": "1", **machines.rank_environment(rank)},
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
            deadline = time.monotonic() + STARTS_S
            while not (place / "begun").exists():
                said = [(place / f"{rank}.log").read_text() for rank in range(3)]
                assert time.monotonic() < deadline and all(one.poll() is None for one in ranks), said
                time.sleep(0.1)
            yield machines, ranks
        finally:
            for one in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()


def ended(ranks: list[subprocess.Popen[bytes]]) -> tuple[list[int], float]:
    """The exit codes of all, and after how many seconds the last had ended."""
    begun = time.monotonic()
    codes = [one.wait(STALL_S + ENDS_S) for one in ranks]
    return codes, time.monotonic() - begun
