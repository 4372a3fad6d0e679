"""Ragged collectives on every kind of back end, and the memory that they take."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from arachnec.kernels.attention import collectives
from arachnec.kernels.attention.collectives import all_gather, exchange, is_gloo, reduce_scatter
from tests.distributed.attention_cases import process_groups
from tests.distributed.harness import RankPool, run_ranks
from tests.distributed.ncclish import NAME, Settings, install, uninstall
from tests.slow import slow

Sizes = tuple[int, ...]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    groups = process_groups()
    groups.ensure([tuple(sorted(ranks))])
    return groups.get(ranks)


def whole(sizes: Sizes, dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    full = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
    return torch.randn(full, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def of_all(calls: list[str]) -> Callable[..., None]:
    """``dist.all_gather`` of uneven tensors as NCCL does it: a broadcast from every member, in the group's order."""

    def gather(tensors: list[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> None:
        calls.append("all_gather")
        members = dist.get_process_group_ranks(group)
        tensors[members.index(dist.get_rank())].copy_(tensor)
        for rank, into in zip(members, tensors, strict=True):
            dist.broadcast(into, rank, group=group)

    return gather


@contextmanager
def not_gloo() -> Iterator[list[str]]:
    """Inside, groups count as NCCL's; what they are asked for is noted."""
    calls: list[str] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def noted(wrapped: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(wrapped.__name__)
            return wrapped(*args, **kwargs)

        return call

    with (
        patch.object(collectives, "is_gloo", lambda *_: False),
        patch.object(dist, "all_gather", of_all(calls)),
        patch.object(dist, name, noted(getattr(dist, name))),
        patch.object(dist, "all_to_all_single", noted(dist.all_to_all_single)),
        patch.object(dist, "batch_isend_irecv", noted(dist.batch_isend_irecv)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        yield calls


def gathered(
    ranks: tuple[int, ...], sizes: Sizes, dim: int, shape: tuple[int, ...], buffer: int, nccl: bool
) -> list[str]:
    """Check the gather and the reduce-scatter of one case on this rank; what was called."""
    group, index = group_of(ranks), ranks.index(dist.get_rank())
    full = whole(sizes, dim, shape, torch.float32)
    mine = full.split_with_sizes(list(sizes), dim)[index]
    calls: list[str] = []
    with patch.object(collectives, "BUFFER", buffer):
        if nccl:
            with not_gloo() as calls:
                out = all_gather(mine, dim, sizes, ranks, group)
                noted = list(calls)
                part = reduce_scatter(full * (index + 1), dim, sizes, index, ranks, group)
            calls = noted
        else:
            out = all_gather(mine, dim, sizes, ranks, group)
            part = reduce_scatter(full * (index + 1), dim, sizes, index, ranks, group)
    assert torch.equal(out, full) and out.is_contiguous()
    total = mine * 0.0
    for factor in range(1, len(ranks) + 1):
        total += mine * factor
    assert torch.equal(part, total), "summed in the order of the positions"
    return calls


CASES = [
    ((0, 1, 2), (3, 3, 3), 1, (1, 0, 4)),
    ((0, 1, 2), (2, 5, 1), 1, (1, 0, 4)),
    ((0, 1, 2), (2, 0, 6), 1, (3, 0, 2)),
    ((2, 0, 1), (2, 2, 2), 0, (0, 5)),
    ((2, 0, 1), (4, 1, 2), 2, (2, 3, 0)),
    ((0, 1, 2), (0, 0, 0), 1, (2, 0, 4)),
]


@pytest.mark.parametrize(("ranks", "sizes", "dim", "shape"), CASES)
@pytest.mark.parametrize("buffer", [1 << 26, 100, 1])
@pytest.mark.parametrize("nccl", [False, True])
def test_pieces_come_together_and_sums_come_apart(
    ranks: tuple[int, ...], sizes: Sizes, dim: int, shape: tuple[int, ...], buffer: int, nccl: bool
) -> None:
    run_ranks(3, gathered, ranks, sizes, dim, shape, buffer, nccl)


def test_each_gather_is_one_collective_where_the_back_end_has_it() -> None:
    even, uneven, rotated = (
        run_ranks(3, gathered, ranks, sizes, 0, (0, 4), 1 << 26, True)[0]
        for ranks, sizes in (((0, 1, 2), (3, 3, 3)), ((2, 0, 1), (3, 1, 2)), ((2, 0, 1), (3, 3, 3)))
    )
    assert even in (["all_gather_single"], ["all_gather_into_tensor"])
    assert uneven == ["all_gather"]
    assert rotated == ["batch_isend_irecv"], "a list of even pieces would be gathered into a copy"


def exchanged(nccl: bool) -> tuple[bool, list[str]]:
    group, me = group_of((0, 1, 2)), dist.get_rank()
    send = [[torch.full((me + 1, j + 1), float(10 * me + j))] for j in range(3)]
    shapes = [[(j + 1, me + 1)] for j in range(3)]
    with not_gloo() if nccl else nullcontext([]) as calls:
        received = exchange(send, shapes, (0, 1, 2), group)
    wanted = [torch.full((j + 1, me + 1), float(10 * j + me)) for j in range(3)]
    assert group is not None
    return all(torch.equal(x, y) for (x,), y in zip(received, wanted, strict=True)), list(calls)


def test_the_all_to_all_follows_the_group_and_not_the_device() -> None:
    for nccl, names in ((False, []), (True, ["all_to_all_single"])):
        for right, calls in run_ranks(3, exchanged, nccl):
            assert right and calls == names


def known() -> bool:
    group = group_of((0, 1))
    assert group is not None
    return is_gloo(group, torch.device("cpu"))


def test_gloo_is_known_by_the_group() -> None:
    assert run_ranks(2, known) == [True, True]


def peak(function: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes allocated at the fullest moment of a call, over those before it."""
    function()  # connections and caches are there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, result


BYTES = 1 << 16  # of the buffer, in these tests


def memory(sizes: Sizes, batch: int) -> tuple[int, int, int, int]:
    """Peaks of the gather and the reduce-scatter in bytes, and the bytes of the whole and of this rank's piece."""
    ranks = tuple(range(len(sizes)))
    group, index = group_of(ranks), dist.get_rank()
    full = whole(sizes, 1, (batch, 0, 256), torch.float32)
    mine = full.split_with_sizes(list(sizes), 1)[index].contiguous()
    with patch.object(collectives, "BUFFER", BYTES):
        forward, out = peak(lambda: all_gather(mine, 1, sizes, ranks, group))
        backward, _ = peak(lambda: reduce_scatter(full, 1, sizes, index, ranks, group))
    assert torch.equal(out, full)
    return forward, backward, math.prod(full.shape) * 4, math.prod(mine.shape) * 4


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sizes", [slow((1500, 1500, 1500, 1500)), (1501, 1501, 1501, 1500)])
def test_a_gather_holds_its_result_and_its_gradient_holds_its_piece(sizes: Sizes, batch: int) -> None:
    for forward, backward, full, piece in run_ranks(4, memory, sizes, batch):
        assert full > 60 * BYTES
        assert full <= forward <= full + 2 * BYTES
        assert piece <= backward <= piece + 4 * BYTES


def over_ncclish(store: str, ranks: tuple[int, ...], sizes: Sizes) -> None:
    world, me = dist.get_world_size(), dist.get_rank()
    counts = install(dist.FileStore(store, world), me, world, Settings())
    try:
        group, index = dist.new_group(backend=NAME), ranks.index(me)
        full = whole(sizes, 0, (0, 4), torch.float32)
        mine = full.split_with_sizes(list(sizes), 0)[index]
        assert not is_gloo(group, mine.device)
        assert torch.equal(all_gather(mine, 0, sizes, ranks, group), full)
        part = reduce_scatter(full, 0, sizes, index, ranks, group)
        torch.testing.assert_close(part, mine * len(ranks))
        dist.barrier(group=group)
        assert not counts.freed_in_flight
    finally:
        uninstall()


@pytest.mark.parametrize(
    ("ranks", "sizes"), [((0, 1, 2), (2, 2, 2)), ((0, 1, 2), (3, 0, 2)), ((1, 2, 0), (3, 1, 2)), ((1, 2, 0), (2, 2, 2))]
)
def test_with_nccl_s_order_and_matching_too(tmp_path: Path, ranks: tuple[int, ...], sizes: Sizes) -> None:
    pool = RankPool(3)
    try:
        pool.run(over_ncclish, str(tmp_path / "store"), ranks, sizes, timeout=30)
    finally:
        pool.close()
