"""Time of one distributed attention, forward and backward, for every grid of Ulysses and ring on local gloo ranks.

    python benchmarks/attention_degree.py --ranks 4 --tokens 4096 --heads 12 --json

Measured on this machine's cores: it compares the grids' own work and their transfers through the loopback device, not
what they take on GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from arachnec.kernels.attention.distributed_attention import distributed_attention
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split
from arachnec.kernels.attention.subgroups import subgroups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (arguments, Path(folder)), nprocs=arguments.ranks)
        results = json.loads((Path(folder) / "results.json").read_text())
    print(json.dumps(results, indent=2) if arguments.json else table(results))


def table(results: list[dict[str, float]]) -> str:
    lines = ["degree  ulysses  ring   forward and backward, ms"]
    lines += [f"{r['degree']:6}  {r['ulysses']:7}  {r['ring']:4}   {r['ms']:10.1f}" for r in results]
    return "\n".join(lines)


def measure(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    groups = ProcessGroups()
    results = []
    for degree in range(1, arguments.ranks + 1):
        for ulysses in (u for u in range(degree, 0, -1) if degree % u == 0):
            grid = (ulysses, degree // ulysses)
            ranks = tuple(range(degree))
            groups.ensure(subgroups(ranks, *grid))
            if rank < degree:
                shard = groups.shard(ranks, even_split(arguments.tokens, degree), *grid)
                ms = [once(shard, arguments) for _ in range(arguments.repeats + 1)][1:]
                results.append({"degree": degree, "ulysses": grid[0], "ring": grid[1], "ms": statistics.median(ms)})
            dist.barrier()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    groups.close()
    dist.destroy_process_group()


def once(shard: SequenceShard, arguments: argparse.Namespace) -> float:
    """Milliseconds on this rank, from a common start."""
    shape = (1, arguments.heads, shard.local, arguments.head_size)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    if shard.group is not None:
        dist.barrier(group=shard.group)
    start = time.perf_counter()
    out = distributed_attention(query, key, value, shard, query_parts=(None,), key_parts=(None,))
    out.sum().backward()
    if shard.group is not None:
        dist.barrier(group=shard.group)
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
