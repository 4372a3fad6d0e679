"""Ranks that are forked from this process, with gloo between them. What they return comes back by rank.

A fork shares what is imported and captured already, so a rank is up in milliseconds. This process may have run no
backward before: autograd does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from arachnec.ir.diagnostic import UserError


class Failed(Exception):
    """A rank that raised, died, or did not end in time; ``text`` is what it said."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text = rank, text


def on_forked_ranks(world: int, work: Callable[[int], Any], seconds: float) -> list[Any]:
    """``work(rank)`` on ranks of one gloo world. Raises ``Failed`` for the first that fails, and ends all."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="arachnec-ranks-") as folder:
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                args = (rank, world, Path(folder) / "store", seconds, work, theirs)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            raise Failed(min(waiting.values()), f"it did not end within {seconds:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                failed, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                raise Failed(rank, "its process died") from None
            if failed:
                raise Failed(rank, answer)
            results[rank] = answer
    return [results[rank] for rank in range(len(pipes))]


def _serve(rank: int, world: int, store: Path, seconds: float, work: Callable[[int], Any], pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    timeout = timedelta(seconds=seconds)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        answer = False, work(rank)
        dist.barrier()  # nobody closes what another still reads
    except UserError as error:
        answer = True, str(error)
    except BaseException:
        answer = True, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
