"""One rank of ``four_hosts.py``: measures the links, or runs steps of several executables in turn.

python -m hosts.worker links OUT.json
python -m hosts.worker steps OUT.json ROUNDS FABRIC FOLDER...
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from hosts.fabric import sent_by_racks

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import read_executable
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank

SIZES = (256, 65536, 262144, 1048576)  # bytes
REPEATS, AGAIN = 7, 3  # before any plan is made, and between the rounds of steps
PAIRS = {
    "in a rack": ((0, 1),),
    "in both racks": ((0, 1), (2, 3)),
    "between racks": ((0, 2),),
    "twice between racks": ((0, 2), (1, 3)),
}


Links = dict[str, list[tuple[int, float]]]  # bytes and ms of messages, by pairs


def links(repeats: int) -> Links:
    """Bytes and ms of messages that pairs of hosts send to each other, both ways and all pairs at once."""
    rates: Links = {}
    for name, pairs in PAIRS.items():
        rank = dist.get_rank()
        peer = next((sum(pair) - rank for pair in pairs if rank in pair), None)
        rates[name] = [(size, _exchange(size, peer, repeats)) for size in SIZES]
    return rates


def _exchange(size: int, peer: int | None, repeats: int) -> float:
    """The time until the last pair is done, ms: the median over repeats, of the shortest message the least.

    What the shortest takes beyond that is a busy machine's, not the link's.
    """
    outgoing, incoming = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    times = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        if peer is not None:
            works = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
            for work in works:
                assert work is not None
                work.wait()
        slowest = torch.tensor((time.perf_counter() - started) * 1e3)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return min(times) if size == SIZES[0] else statistics.median(times[1:])


def steps(rounds: int, fabric: str, folders: Sequence[Path], device: torch.device) -> dict[str, object]:
    """Step ``n`` of every executable, one executable after the other, before step ``n + 1`` of any.

    Per executable and step: the time, the loss, and the bytes that left each rack meanwhile. Before each round the
    links are measured again.
    """
    trainers = {folder: Trainer(read_executable(folder), RunOptions(), device) for folder in folders}
    times: dict[str, list[dict[str, float]]] = {str(folder): [] for folder in folders}
    measured: list[Links] = []
    for number in range(rounds):
        measured.append(links(AGAIN))
        for folder, trainer in trainers.items():
            before = _sent(fabric)
            report = trainer.step(number)
            after = _sent(fabric)
            sent = {f"rack {rack}": b - a for rack, (a, b) in enumerate(zip(before, after, strict=True))}
            times[str(folder)].append({"ms": report.step_ms, "loss": report.loss, **sent})
    for trainer in trainers.values():
        trainer.close()
    return {"links": measured, "steps": times}


def _sent(fabric: str) -> list[int]:
    """The uplinks' counters while nobody sends, on rank 0."""
    dist.barrier()
    sent = sent_by_racks(fabric) if dist.get_rank() == 0 else []
    dist.barrier()
    return sent


def main(what: str, output: str, *arguments: str) -> None:
    def work(device: torch.device) -> None:
        if what == "links":
            measured: object = links(REPEATS)
        else:
            rounds, fabric, *folders = arguments
            measured = steps(int(rounds), fabric, [Path(folder) for folder in folders], device)
        if dist.get_rank() == 0:
            Path(output).write_text(json.dumps(measured))

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
