"""A port for tests whose processes are told one: of those that the system gives to nobody who asks for any."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST = 10_000


def free_port() -> int:
    """One that nothing listens on; of the rest, a rank of another test could take it before it is used."""
    first = int(RANGE.read_text().split()[0]) if RANGE.is_file() else 32_768
    for port in random.Random().sample(range(LEAST, first), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
