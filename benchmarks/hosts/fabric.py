"""Hosts on one machine: network namespaces in racks, with shaped links and an uplink that a rack shares.

    with hosts(Fabric(racks=2, hosts=2, link_mbit=200, uplink_mbit=100)) as made:
        made.run([sys.executable, "worker.py"])          # one rank a host, with torchrun's environment
        made.uplink_bytes()                              # what has left each rack

Needs root and iproute2 (Linux). The bridges are in a namespace of their own, so that nothing of the machine's own
network is touched, addresses do not collide with anything, and deleting the namespaces leaves nothing behind. That
happens however the block ends; what a killed process left behind, the next one removes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from types import FrameType

PREFIX = "arachnec"
DEVICE = "eth0"
PORT = 29500  # every fabric has its own network
BURST_MS = 1.0  # what may pass unshaped after a pause; less, and a busy machine's late timers cost bandwidth
QUEUE = "2s"  # long enough to drop nothing, as the fabrics that this stands for do not
NETWORK = ip_network("10.77.0.0/16")
# As with a fabric's credits, little is under way and whoever waits for a link has as much there as the others. The
# machine's own choice may be BBR, which probes for what is free: it left a sixth of a link unused and made every step
# take another time.
FLOW_CONTROL = ("congctl", "reno", "initcwnd", "100", "window", "16384")
NAMESPACES = Path("/run/netns")


class NoHosts(Exception):
    """This machine cannot make them; the message says why."""


class RankFailed(Exception):
    """A rank ended badly; the message has the end of its output."""


@dataclass(frozen=True)
class Fabric:
    """``racks`` of ``hosts`` each, host links and uplinks in Mbit/s, each direction apart."""

    racks: int = 2
    hosts: int = 2
    link_mbit: float = 200.0
    uplink_mbit: float = 100.0

    @property
    def world(self) -> int:
        return self.racks * self.hosts


@dataclass(frozen=True)
class Hosts:
    """A fabric that stands."""

    fabric: Fabric
    name: str

    def run(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> list[str]:
        """``command`` once on every host, as one rank each; the standard outputs by rank.

        Raises RankFailed when one ends badly or not in time; then none is left running.
        """
        common = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as scratch:
            logs = [Path(scratch) / f"{rank}.{kind}" for rank in range(self.fabric.world) for kind in ("out", "err")]
            ranks: list[subprocess.Popen[bytes]] = []
            try:
                for rank in range(self.fabric.world):
                    with logs[2 * rank].open("wb") as out, logs[2 * rank + 1].open("wb") as errors:
                        ranks.append(
                            subprocess.Popen(
                                ["ip", "netns", "exec", self.host(rank), *command],
                                env={**common, **self.rank_environment(rank)},
                                stdin=subprocess.DEVNULL,
                                stdout=out,
                                stderr=errors,
                            )
                        )
                self._wait(ranks, logs, time.monotonic() + timeout)
            finally:
                for process in ranks:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
            return [log.read_text() for log in logs[::2]]

    def uplink_bytes(self) -> list[int]:
        """``sent_by_racks`` of this fabric."""
        return sent_by_racks(self.name)

    def host(self, rank: int) -> str:
        """The namespace of a rank's host."""
        return f"{self.name}-{rank}"

    def rank_environment(self, rank: int) -> dict[str, str]:
        """torchrun's, with the store on the first host."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.fabric.world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    def _wait(self, ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float) -> None:
        while True:
            codes = [process.poll() for process in ranks]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                what = logs[2 * failed + 1].read_text()[-4000:]
                raise RankFailed(f"rank {failed} ended with exit code {codes[failed]}:\n{what}")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                raise RankFailed(f"ranks {[r for r, code in enumerate(codes) if code is None]} did not end in time")
            time.sleep(0.02)


def address(rank: int) -> str:
    return str(NETWORK[rank + 1])


def sent_by_racks(fabric: str) -> list[int]:
    """Bytes that have left each rack, by its uplink's own counter: frames, so headers and acknowledgements too.

    Any process may ask that can see the machine's namespaces, the ranks on the hosts among them.
    """
    shown = json.loads(_output("ip", "-n", fabric, "-j", "-s", "link", "show"))
    sent = {link["ifname"]: int(link["stats64"]["tx"]["bytes"]) for link in shown}
    racks = sum(name.startswith("up") for name in sent)
    return [sent[f"up{rack}"] for rack in range(racks)]


def set_links(fabric: str, ranks: int, mbit: float) -> None:
    """From now on hosts' links of a fabric that stands have so many Mbit/s, each direction apart.

    Any process may do that that can see the machine's namespaces, the ranks on the hosts among them.
    """
    for rank in range(ranks):
        _shape(fabric, f"host{rank}", mbit, "replace")
        _shape(f"{fabric}-{rank}", DEVICE, mbit, "replace")


def cut(machines: Hosts, one: int, other: int) -> None:
    """From now on nothing gets from one of two hosts to the other, and neither is told."""
    for here, there in ((one, other), (other, one)):
        _run("ip", "-n", machines.host(here), "route", "replace", "blackhole", f"{address(there)}/32")


def unplug(machines: Hosts, rank: int) -> None:
    """From now on a host's wire is out."""
    _run("ip", "-n", machines.name, "link", "set", f"host{rank}", "down")


def unavailable() -> str | None:
    """Why this machine cannot make hosts, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(Fabric(racks=1, hosts=1)):
            return None
    except NoHosts as error:
        return str(error)


@contextmanager
def hosts(fabric: Fabric) -> Iterator[Hosts]:
    """The fabric, until the block ends: normally, by an exception, by Ctrl-C or by SIGTERM.

    Raises NoHosts where this machine does not let us make it.
    """
    _remove_orphans()
    machines = Hosts(fabric, f"{PREFIX}-{os.getpid()}")
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _exit) if main else None
    try:
        try:
            _build(machines)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            raise NoHosts(f"no network namespaces here: {reason.strip()}") from error
        yield machines
    finally:
        _remove(machines.name)
        if main:
            signal.signal(signal.SIGTERM, before)


def _build(machines: Hosts) -> None:
    fabric, switch = machines.fabric, machines.name
    _namespace(switch)
    for rack in range(fabric.racks):
        _run("ip", "-n", switch, "link", "add", f"rack{rack}", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", f"rack{rack}", "up")
    _run("ip", "-n", switch, "link", "add", "spine", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "spine", "up")
    for rack in range(fabric.racks):
        _run("ip", "-n", switch, "link", "add", f"up{rack}", "type", "veth", "peer", "name", f"down{rack}")
        for end, bridge in ((f"up{rack}", f"rack{rack}"), (f"down{rack}", "spine")):
            _run("ip", "-n", switch, "link", "set", end, "master", bridge, "up")
            _shape(switch, end, fabric.uplink_mbit)
    for rank in range(fabric.world):
        host, port = f"{switch}-{rank}", f"host{rank}"
        _namespace(host)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", host)
        _run("ip", "-n", switch, "link", "set", port, "master", f"rack{rank // fabric.hosts}", "up")
        _run("ip", "-n", host, "address", "add", f"{address(rank)}/{NETWORK.prefixlen}", "dev", DEVICE)
        _run("ip", "-n", host, "link", "set", DEVICE, "up")
        _run("ip", "-n", host, "route", "replace", str(NETWORK), "dev", DEVICE, *FLOW_CONTROL)
        _shape(switch, port, fabric.link_mbit)  # to the host
        _shape(host, DEVICE, fabric.link_mbit)  # and from it


def _namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _shape(namespace: str, device: str, mbit: float, how: str = "add") -> None:
    burst = max(4000, round(mbit * 1e3 / 8 * BURST_MS))
    tail = ("root", "tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "latency", QUEUE)
    _run("tc", "-n", namespace, "qdisc", how, "dev", device, *tail)


def _remove(name: str) -> None:
    for path in [*NAMESPACES.glob(f"{name}-*"), NAMESPACES / name]:
        if path.exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)


def _remove_orphans() -> None:
    """Namespaces of processes that are no more."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _run(*command: str) -> None:
    _output(*command)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
