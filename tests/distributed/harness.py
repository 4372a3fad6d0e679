"""Running a function on several gloo ranks, for tests.

Ranks are processes that are started once per degree and kept. They are forked from a server that has imported torch
and the executor and captured the small model, and that nothing else has run in: a pool is up in well under a second.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rank_device import MOST_RANKS, ON_GPU
from tests.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (
    "torch",
    "torch.distributed",
    "pytest",
    "hypothesis",
    "arachnec.backends.torch_distributed.engine",
    "arachnec.backends.torch_distributed.checkpoints.checkpoint",
    "arachnec.spmd.sharded_model",
    "arachnec.tracing.blocks",
)
CAPTURED = "tests.distributed.preloaded"  # where the tests can be imported by name


@contextlib.contextmanager
def started_by(program: str | None = None) -> Iterator[Any]:
    """The context of multiprocessing whose processes find the tests by name, and are started by ``program``; without
    one they are forked from a server that has everything preloaded."""
    resource_tracker.ensure_running()  # needs nothing
    known, usual = list(sys.path), spawn.get_executable()
    if str(ROOT) not in known:
        sys.path.append(str(ROOT))
    spawn.set_executable(program or warm_python((*PRELOAD, CAPTURED)))
    try:
        context = multiprocessing.get_context("spawn" if program else "forkserver")
        context.set_forkserver_preload([*PRELOAD, CAPTURED])
        yield context
    finally:
        sys.path[:] = known
        spawn.set_executable(usual)


class RankError(AssertionError):
    """What went wrong on one rank, with that rank's traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank


class RankPool:
    """``ranks`` processes in one gloo world, one thread each; a ``program`` starts ranks in which nothing has run."""

    def __init__(self, ranks: int, *, program: str | None = None) -> None:
        self.ranks = ranks
        self._program = sys.executable if ON_GPU else program  # CUDA does not survive a fork
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """``function(*args)`` on every rank at once; the results by rank.

        ``function`` stands at the top of a module; ``dist.get_rank()`` tells it where it is. The first failure of any
        rank is raised as RankError and ends all ranks; the next call starts new ones.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        try:
            return self._collect(timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Let every rank end by itself."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        store = str(Path(self._folder.name) / "store")
        with started_by(self._program) as context:
            for rank in range(self.ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self.ranks, store, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(results) < self.ranks:
            waiting = {self._pipes[r]: r for r in range(self.ranks) if r not in results}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                missing = sorted(waiting.values())
                raise RankError(missing[0], f"no answer in {timeout:g} s, nor from any of ranks {missing}")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    failed, answer = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    raise RankError(rank, "the process died") from None
                if failed:
                    raise RankError(rank, answer)
                results[rank] = answer
        return [results[rank] for rank in range(self.ranks)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


def _serve(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    from tests.distributed.executor_cases import captured_once
    from tests.distributed.rank_device import make_world

    torch.set_num_threads(1)
    make_world(rank, ranks, store)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(message)
            with captured_once():
                answer = (False, tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*args)))
            encoded = pickle.dumps(answer)
        except BaseException as error:
            encoded = pickle.dumps((True, told(error)))
        pipe.send_bytes(encoded)
    dist.destroy_process_group()


def told(error: BaseException) -> str:
    """The traceback; where an assertion failed, with the values around it: ranks have nothing of pytest's own."""
    traced = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
    for frame in traced.stack[:-1]:
        frame.locals = None
    return "".join(traced.format())


_POOLS: dict[int, RankPool] = {}


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """``RankPool.run`` on a pool of ``ranks`` processes that all tests of this process share."""
    if ranks > MOST_RANKS:
        pytest.skip(f"{ranks} ranks, and ARACHNEC_TEST_RANKS allows {MOST_RANKS}")
    if ranks not in _POOLS:
        _POOLS[ranks] = RankPool(ranks)
    return _POOLS[ranks].run(function, *args, timeout=timeout)


@atexit.register
def _close() -> None:
    for pool in _POOLS.values():
        pool.close()
