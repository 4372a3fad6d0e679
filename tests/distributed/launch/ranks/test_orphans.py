"""Ranks whose launcher is killed before they have joined: the store that they wait for will never be there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from arachnec.launch import ranks
from arachnec.launch.environment import AGENTS_STORE
from arachnec.launch.ranks import AGENT_POLL_S
from tests.ports import free_port

ENDS_S = 30.0
RANK = """
import sys
from arachnec.launch.ranks import ends_with_its_agent
with ends_with_its_agent():
    print("waits", flush=True)
    {waits}
print("joined", flush=True)
"""
AGENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
FOREVER = "import time; time.sleep(600)"
FOR_A_STORE = """
    from datetime import timedelta
    from torch.distributed.rendezvous import rendezvous
    next(iter(rendezvous("env://", timeout=timedelta(seconds=600))))
"""


@pytest.mark.parametrize("waits", [FOREVER, FOR_A_STORE], ids=["asleep", "for a store"])
def test_a_rank_whose_agent_is_killed_before_it_joined_ends_and_says_so(waits: str) -> None:
    agents = {AGENTS_STORE: "True", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, RANK.format(waits=waits)],
        env={**os.environ, **agents, "MASTER_PORT": str(free_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "waits\n"
        agent.send_signal(signal.SIGKILL)
        said, told = agent.communicate(timeout=ENDS_S)  # until the rank, which has both pipes too, is gone
    assert said == ""
    assert told.splitlines()[-1] == "error: rank 1 had not joined the others when its launcher ended"


def test_a_rank_whose_agent_was_gone_before_its_first_look_ends_as_nothing_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parent is somebody else by then, and stays so."""
    ended = threading.Event()
    monkeypatch.setattr(ranks, "AGENT_POLL_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setenv(AGENTS_STORE, "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MASTER_PORT", str(listening.getsockname()[1]))
        with ranks.ends_with_its_agent():
            assert not ended.wait(0.5)
            listening.close()
            assert ended.wait(ENDS_S)


@pytest.mark.parametrize("store", ["True", "False"])
def test_a_rank_that_has_joined_or_is_its_own_launcher_outlives_its_parent(store: str) -> None:
    """Behind the joining the watchdog is there; a script's own shell may end while its ranks go on."""
    waits = "sys.stdin.readline()" if store == "False" else "pass"
    ends = "sys.stdin.readline(); print('ended', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, RANK.format(waits=waits) + ends],
        env={**os.environ, AGENTS_STORE: store},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        assert agent.stdout.readline() == "waits\n"
        if store == "True":
            assert agent.stdout.readline() == "joined\n"
        agent.send_signal(signal.SIGKILL)
        agent.wait(ENDS_S)
        time.sleep(3 * AGENT_POLL_S)
        said, _ = agent.communicate("\n\n", timeout=ENDS_S)
    assert said.splitlines()[-1] == "ended"
