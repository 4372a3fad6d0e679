"""How long ranks take to meet, connected on demand and as a full mesh, by their number.

python benchmarks/rank_start.py [--ranks 8 16 32 64] [--output benchmarks/results/rank_start.json]

Each rank is a process that has imported torch and is connected to the store (which looks up host names, and where
there is no name server waits for one). Timed is what comes after, on the rank that is last: the process group,
a second group of all ranks (as handoffs have), connecting to two neighbours, and one all-reduce. ``growth`` is the
exponent of the time between the two largest numbers of ranks: 2 would be the square.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROUNDS = 3
RESULT = Path(__file__).parent / "results" / "rank_start.json"


def rank_starts(rank: int, ranks: int, lazy: bool, port: int, pipe: Connection) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from arachnec.runtime.handoffs import HandoffConnections

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    pipe.send(None)
    pipe.recv()  # every rank has come so far
    started = time.perf_counter()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    connections = HandoffConnections()
    connections.ensure((other, (other + 1) % ranks) for other in range(ranks))
    dist.all_reduce(torch.ones(1))
    took = time.perf_counter() - started
    pipe.send((took, len(list(Path("/proc/self/fd").iterdir()))))
    pipe.recv()
    os._exit(0)


def measure(context: Any, ranks: int, lazy: bool) -> tuple[float, int]:
    """Seconds until the last rank had started, and the most open descriptors of any."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_starts, args=(rank, ranks, lazy, store.port, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        rows = []
        for pipe in pipes:
            if not pipe.poll(60):
                raise TimeoutError(f"{ranks} ranks did not start in 60 s")
            rows.append(pipe.recv())
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return max(took for took, _ in rows), max(count for _, count in rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    measure(context, 2, True)  # starts the server that all others are forked from
    results: dict[str, Any] = {}
    for name, lazy in (("on demand", True), ("full mesh", False)):
        rows = []
        for ranks in options.ranks:
            runs = [measure(context, ranks, lazy) for _ in range(ROUNDS)]
            seconds = statistics.median(took for took, _ in runs)
            rows.append({"ranks": ranks, "seconds": round(seconds, 4), "descriptors": max(n for _, n in runs)})
            print(f"{name}: {ranks:3d} ranks {seconds:.3f} s, {rows[-1]['descriptors']} descriptors", flush=True)
        first, last = rows[-2:]
        growth = math.log(last["seconds"] / first["seconds"]) / math.log(last["ranks"] / first["ranks"])
        results[name] = {"rows": rows, "growth": round(growth, 2)}
        print(f"{name}: grows with the number of ranks to the power of {growth:.2f}")
    options.output.write_text(json.dumps({"cores": os.cpu_count(), "rounds": ROUNDS, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
