"""Process groups over steps: the family is made once, others when a plan changes, and the oldest are given up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from arachnec.backends.torch_distributed import engine
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run import training_run
from arachnec.executable.folder import read_executable
from arachnec.kernels.attention.process_groups import ProcessGroups, disjoint, too_many
from tests.distributed.executor_cases import Work, clip, executable
from tests.distributed.harness import run_ranks

CPU = torch.device("cpu")
KEYS = st.lists(st.frozensets(st.integers(0, 7), min_size=2), unique=True)


@given(KEYS, st.data(), st.integers(0, 4))
def test_what_is_given_up_leaves_no_rank_with_too_many(
    keys: list[frozenset[int]], data: st.DataObject, most: int
) -> None:
    needed = set(data.draw(st.lists(st.sampled_from(keys)) if keys else st.just([])))
    dropped = too_many(keys, needed, most)
    kept = [key for key in keys if key not in dropped]
    assert not needed & set(dropped)
    for rank in range(8):
        mine = [key for key in kept if rank in key]
        assert len(mine) <= most or set(mine) <= needed
    assert not too_many(keys, needed, None)


def test_the_groups_that_were_asked_for_longest_ago_are_given_up_first() -> None:
    keys = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 2}), frozenset({0, 3})]
    assert too_many(keys, {keys[3]}, 2) == [keys[0]]
    assert too_many(keys, {keys[0], keys[3]}, 2) == [keys[2]]


@given(KEYS)
def test_a_split_has_every_rank_at_most_once(keys: list[frozenset[int]]) -> None:
    batches = disjoint(keys)
    assert sorted(map(sorted, keys)) == sorted(sorted(key) for batch in batches for key in batch)
    for batch in batches:
        assert len(frozenset().union(*batch)) == sum(map(len, batch))


def change_plans() -> tuple[int, int, float, list[str]]:
    """Three plans on four ranks, of which each may be in two groups."""
    groups, rank = ProcessGroups(most=2), dist.get_rank()
    groups.ensure([(0, 1), (2, 3), (0, 1, 2, 3)], CPU)
    pairs = (0, 2) if rank in (0, 2) else (1, 3)
    groups.ensure([(0, 2), (1, 3)], CPU)
    groups.ensure([(0, 1, 2, 3), (0, 2), (1, 3)], CPU)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=groups.get(pairs))
    gone = []
    try:
        groups.get((0, 1) if rank < 2 else (2, 3))
    except KeyError as error:
        gone.append(str(error))
    answer = groups.count(), groups.given_up, float(value), gone
    groups.ensure([(0, 1), (2, 3)], CPU)  # again
    dist.all_reduce(value, group=groups.get((0, 1) if rank < 2 else (2, 3)))
    groups.close()
    return answer


def test_groups_are_bounded_over_plans() -> None:
    for rank, (count, given_up, total, gone) in enumerate(run_ranks(4, change_plans)):
        assert (count, given_up, total) == (2, 2, 2.0 if rank % 2 == 0 else 4.0)
        assert len(gone) == 1


def split_from_everyone() -> list[list[list[int]]]:
    """As on NCCL with ``device_id``, where one call makes a whole batch; gloo cannot split."""
    batches: list[list[list[int]]] = []
    groups, rank = ProcessGroups(), dist.get_rank()

    def split(split_ranks: list[list[int]], timeout: object, backend: str) -> dist.ProcessGroup | None:
        assert backend == "cpu:gloo"
        batches.append(split_ranks)
        groups = [dist.new_group(ranks, backend="gloo") for ranks in split_ranks]
        return next((group for group, ranks in zip(groups, split_ranks, strict=True) if rank in ranks), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arachnec.kernels.attention.process_groups._can_split", lambda device: True)
        patch.setattr(dist, "split_group", split)
        groups.ensure([(0, 1), (2, 3), (0, 1, 2, 3), (0, 2)], CPU)
    for ranks in ((0, 1), (2, 3), (0, 1, 2, 3), (0, 2)):
        if rank in ranks:
            value = torch.ones(1)
            dist.all_reduce(value, group=groups.get(ranks))
            assert float(value) == len(ranks)
    groups.close()
    return batches


def test_groups_that_share_no_rank_are_split_in_one_call() -> None:
    assert run_ranks(4, split_from_everyone) == [[[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2]]]] * 4


def groups_of_steps(folder: Path) -> list[tuple[str, int]]:
    """What is made of process groups, and when."""
    events: list[tuple[str, int]] = []
    new, iterate = dist.new_group, training_run.run_iteration
    running = False

    def noted(*arguments: object, **keys: object) -> dist.ProcessGroup:
        assert not running, "a group is made within a step"
        events.append(("group", dist.get_rank()))
        return new(*arguments, **keys)  # type: ignore[arg-type]

    def step(*arguments: object) -> object:
        nonlocal running
        events.append(("step", dist.get_rank()))
        running = True
        try:
            return iterate(*arguments)  # type: ignore[arg-type]
        finally:
            running = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        patch.setattr(training_run, "run_iteration", step)
        engine.train(read_executable(folder), RunOptions(steps=3), CPU)
    return events


def test_no_group_is_made_within_a_step_nor_once_the_family_stands(tmp_path: Path) -> None:
    clips = (clip("a", 3), clip("b", 5))
    works = [Work((0,), (0, 1), 0.0, "dit"), Work((1,), (0, 1), 1.0, "dit")]
    folder = executable(tmp_path, [clips], works, 2)
    for events in run_ranks(2, groups_of_steps, folder):
        names = [name for name, _ in events]
        assert names.count("step") == 3
        assert "group" not in names[names.index("step") :]
