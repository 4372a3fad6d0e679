"""The process group with NCCL's semantics does what its page promises."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RankError, RankPool
from tests.distributed.ncclish import Counts, Settings, install, uninstall

# torch 2.13 renamed them, and warns of the old names
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Case = Callable[[dist.ProcessGroup, Counts], Any]


def in_group(case: Case, settings: Settings, store: str) -> Any:
    """Run a case on this rank, in a group of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = install(dist.FileStore(store, world), rank, world, settings)
    try:
        return case(dist.new_group(backend="ncclish"), counts)
    finally:
        uninstall()


def run(case: Case, path: Path, ranks: int = 2, **settings: Any) -> list[Any]:
    pool = RankPool(ranks)
    try:
        return pool.run(in_group, case, Settings(**settings), str(path / "store"), timeout=30)
    finally:
        pool.close()


def collectives(group: dist.ProcessGroup, counts: Counts) -> dict[str, list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total, group=group)
    gathered = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(gathered, torch.full((2,), float(rank)), group=group)
    flat = torch.zeros(2 * world)
    ALL_GATHER(flat, torch.full((2,), float(rank)), group=group)
    part = torch.zeros(1)
    REDUCE_SCATTER(part, torch.arange(float(world)), group=group)
    first = torch.full((1,), float(rank))
    dist.broadcast(first, 0, group=group)
    traded = torch.zeros(world)
    dist.all_to_all_single(traded, torch.full((world,), float(rank)), group=group)
    passed = torch.zeros(1)
    right, left = (rank + 1) % world, (rank - 1) % world
    around = [
        dist.P2POp(dist.isend, torch.full((1,), float(rank)), right, group),
        dist.P2POp(dist.irecv, passed, left, group),
    ]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    dist.barrier(group=group)
    assert not counts.freed_in_flight
    return {
        "sum": total.tolist(), "gathered": torch.cat(gathered).tolist(), "flat": flat.tolist(), "part": part.tolist(),
        "first": first.tolist(), "traded": traded.tolist(), "passed": passed.tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("eager", [True, False])
def test_collectives_give_what_gloo_gives(tmp_path: Path, eager: bool) -> None:
    for rank, values in enumerate(run(collectives, tmp_path, 3, eager=eager)):
        assert values["sum"] == [6.0] * 3
        assert values["gathered"] == values["flat"] == [0, 0, 1, 1, 2, 2]
        assert values["part"] == [3.0 * rank]
        assert values["first"] == [0]
        assert values["traded"] == [0, 1, 2]
        assert values["passed"] == [(rank - 1) % 3]


def send_both_first(group: dist.ProcessGroup, _: Counts) -> float:
    rank = dist.get_rank()
    out, into = torch.full((4,), float(rank)), torch.zeros(4)
    works = [dist.isend(out, 1 - rank, group=group), dist.irecv(into, 1 - rank, group=group)]
    for work in works:
        assert work is not None
        work.wait()
    return float(into[0])


def test_two_ranks_that_send_to_each_other_first_stand_still_and_the_circle_is_printed(tmp_path: Path) -> None:
    """gloo's isend lets them pass; a communicator of two runs one after another, and both run their send."""
    with pytest.raises(RankError, match=r"Standstill: nothing moves any more:\n.*rank 0 in send.* waits for rank 1"):
        run(send_both_first, tmp_path)


def crossed(group: dist.ProcessGroup, _: Counts) -> None:
    rank = dist.get_rank()
    other = dist.new_group(backend="ncclish")
    order = [group, other] if rank == 0 else [other, group]
    for communicator in order:
        dist.all_reduce(torch.zeros(1), group=communicator, async_op=False)


def test_collectives_of_two_communicators_in_crossed_order_stand_still_within_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="nothing moves any more"):
        run(crossed, tmp_path)
    assert time.monotonic() - began < 20


def crossed_but_asynchronous(group: dist.ProcessGroup, _: Counts) -> float:
    rank = dist.get_rank()
    other = dist.new_group(backend="ncclish")
    values = [torch.ones(1), torch.ones(1)]
    order = [0, 1] if rank == 0 else [1, 0]
    works = [dist.all_reduce(values[i], group=[group, other][i], async_op=True) for i in order]
    for work in works:
        assert work is not None
        work.wait()
    return float(values[0] + values[1])


def test_crossed_asynchronous_collectives_pass_only_where_both_find_a_place_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    assert run(crossed_but_asynchronous, tmp_path / "many") == [4.0, 4.0]
    with pytest.raises(RankError, match="for a place on the device"):
        run(crossed_but_asynchronous, tmp_path, kernels=1)


def lazily_crossed(group: dist.ProcessGroup, counts: Counts) -> int:
    rank = dist.get_rank()
    other = dist.new_group(backend="ncclish")
    order = [group, other] if rank == 0 else [other, group]
    works = [dist.all_reduce(torch.zeros(1), group=communicator, async_op=True) for communicator in order]
    for work in works:
        assert work is not None
        work.wait()
    return counts.connected_in_use


def test_a_first_use_blocks_the_host_where_communicators_connect_lazily(tmp_path: Path) -> None:
    (tmp_path / "eager").mkdir()
    assert run(lazily_crossed, tmp_path / "eager") == [0, 0]
    with pytest.raises(RankError, match="in connecting group"):
        run(lazily_crossed, tmp_path, eager=False)


def mismatched(group: dist.ProcessGroup, _: Counts) -> None:
    dist.all_reduce(torch.zeros(3 + dist.get_rank()), group=group)


def test_a_collective_of_other_sizes_is_named_with_what_each_rank_called(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 called all_reduce float32\[3\]; rank 1 called .* float32\[4\]"):
        run(mismatched, tmp_path)


def dropped(group: dist.ProcessGroup, counts: Counts) -> tuple[int, int]:
    dist.all_reduce(torch.zeros(2), group=group, async_op=True)  # nobody keeps the work, nor the tensor
    dist.barrier(group=group)
    freed = len(counts.freed_in_flight)
    kept = torch.zeros(2)
    dist.all_reduce(kept, group=group, async_op=True)
    dist.barrier(group=group)
    return freed, len(counts.freed_in_flight) - freed


def test_a_tensor_that_is_freed_while_it_travels_is_counted(tmp_path: Path) -> None:
    assert run(dropped, tmp_path, delay=0.2) == [(1, 0), (1, 0)]


def overwritten(group: dist.ProcessGroup, counts: Counts) -> list[str]:
    given, taken = torch.zeros(2), torch.zeros(4)
    work = ALL_GATHER(taken, given, group=group, async_op=True)
    given.add_(1)
    assert work is not None
    work.wait()
    return counts.written_in_flight


def test_an_input_that_is_written_before_the_wait_is_counted(tmp_path: Path) -> None:
    assert [len(names) for names in run(overwritten, tmp_path, delay=0.2)] == [1, 1]


def waited(group: dist.ProcessGroup, counts: Counts) -> tuple[int, int]:
    work = dist.all_reduce(torch.zeros(2), group=group, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier(group=group)
    return counts.communicators, counts.host_waits


def test_communicators_and_waits_are_counted(tmp_path: Path) -> None:
    assert run(waited, tmp_path, delay=0.1) == [(1, 2), (1, 2)]
