"""Two agents on one machine, as on two nodes: when a rank of one is killed, both end, and say which rank it was."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.executor_cases import RUNS, Work, clip, executable
from tests.ports import free_port
from tests.warm_python import warm_python

ENDS_S = 30.0
STARTS_S = 150.0
RANK = re.compile(rb"(?:^|\0)RANK=(\d+)")


@dataclass
class Agents:
    """Two torchruns with two ranks each."""

    port: int
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def ranks(self) -> dict[int, int]:
        """The process of every rank that is there."""
        workers: dict[int, int] = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdigit():
                continue
            try:
                environment, command = (place / "environ").read_bytes(), (place / "cmdline").read_bytes()
            except OSError:
                continue
            rank = RANK.search(environment)
            if rank and f"MASTER_PORT={self.port}".encode() in environment and b"torch_distributed.worker" in command:
                workers[int(rank[1])] = int(place.name)
        return workers

    def wait_for_step(self) -> None:
        deadline = time.monotonic() + STARTS_S
        while "step     0" not in self.logs[0].read_text():
            assert time.monotonic() < deadline, self.logs[0].read_text()
            assert all(process.poll() is None for process in self.processes), self.logs[0].read_text()
            time.sleep(0.1)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    clips = [clip(name, 3) for name in "abcd"]
    folder = executable(tmp_path / "build", [clips], [Work((rank,), (rank,), 0.0) for rank in range(4)], 4)
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tmp_path / f"agent-{node}.log" for node in range(2)]
    processes = []
    for node, log in enumerate(logs):
        torchrun = [warm_python(RUNS), "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        where = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
        worker = ["-m", "arachnec.backends.torch_distributed.worker", str(folder), "--steps", "1000000"]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen([*torchrun, *where, *worker], stdout=output, stderr=output, env=environment)
            )
    started = Agents(port, processes, logs)
    yield started
    for process in processes:
        process.kill()
        process.wait()
    for pid in started.ranks().values():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("victim", [3, 0], ids=["of-the-second-node", "of-the-node-with-the-store"])
def test_a_killed_rank_ends_both_agents_with_its_name(agents: Agents, victim: int) -> None:
    agents.wait_for_step()
    os.kill(agents.ranks()[victim], signal.SIGKILL)
    killed = time.monotonic()
    for process in agents.processes:
        assert process.wait(max(0.1, killed + ENDS_S - time.monotonic())) != 0
    named = f"rank {victim} of 4 on host {socket.gethostname()} was killed or crashed"
    for log in agents.logs:
        (told,) = (line for line in log.read_text().splitlines() if line.startswith("error:"))
        assert named in told, log.read_text()
        between = "your own code"  # two steps
        assert re.search(rf"; it was in ((the )?(plan of )?step \d+(: \w+ .*)?|{between})$", told), told
    assert agents.ranks() == {}
