"""Backwards inside which gradients may start to be summed. In: the lists of all ranks, without what ends them.

A split backward has no whole gradients: its ``weight`` stands for it, which nothing waits for. On a rank with several
stages the reduces of those that were through before stand between its cascades.

A rank that starts an all-reduce inside its last backward waits there, as far as a proof knows, for every other rank
that starts it so: each comes to its own last backward, and may have to wait for what this rank hands on behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arachnec.analysis.uses import BACKWARDS
from arachnec.ir.nodes import Instruction

Lists = Mapping[int, Sequence[Instruction]]

_OTHER_END = {"send": "receive", "receive": "send"}


def overlapped_backwards(lists: Lists, stage_of: Mapping[str, str]) -> dict[int, Instruction]:
    """Per rank, the backward or weight inside which its reduces may start; ranks without one are absent.

    It must be the last collective of every rank of its group. Then no other rank waits for one that is held up in an
    all-reduce, however little the links and the device can overlap (docs/check.md). Only what it hands on may come
    behind it: the gradient of a stage's input goes to an earlier stage. Where replicas of a stage share the stages
    before, one of those may be waiting for it that another replica's last backward waits for, with a value for it or
    a gradient to take: then its reduces come behind the backward. Where reduces stand between cascades, of ranks with
    several stages, nothing comes behind it but those of its own stage. ``stage_of`` is the stage of every cascade.
    """
    tails = _last_backwards(lists, stage_of)
    while (tail := _holding_up(lists, tails, stage_of)) is not None:
        for rank in tail.peers:
            del tails[rank]
    return {rank: tail.backward for rank, tail in tails.items()}


@dataclass(frozen=True)
class _Tail:
    """The last backward or weight of a rank, and its index; behind it are at most sends of gradients."""

    rank: int
    backward: Instruction
    index: int

    @property
    def peers(self) -> tuple[int, ...]:
        return self.backward.peers or (self.rank,)


def _last_backwards(lists: Lists, stage_of: Mapping[str, str]) -> dict[int, _Tail]:
    last: dict[int, _Tail] = {}
    for rank, items in lists.items():
        handed_on = {item.target for item in items if item.op == "backward"}
        behind: set[tuple[str, str]] = set()
        for index in range(len(items) - 1, -1, -1):
            item = items[index]
            if item.op in BACKWARDS:
                if not behind or behind == {("reduce", stage_of[item.target])} or _only_sends(behind):
                    last[rank] = _Tail(rank, item, index)
                break
            if item.op == "reduce" or (item.op == "send" and item.target in handed_on):
                behind.add((item.op, item.target))
            elif item.op != "free":
                break
    return {
        rank: tail
        for rank, tail in last.items()
        if all(peer in last and last[peer].backward.target == tail.backward.target for peer in tail.peers)
    }


def _only_sends(behind: Collection[tuple[str, str]]) -> bool:
    return all(op == "send" for op, _ in behind)


def _holding_up(lists: Lists, tails: Mapping[int, _Tail], stage_of: Mapping[str, str]) -> _Tail | None:
    """A last backward behind which something comes that another waits for, where both start the same reduces."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, tail in tails.items():
        ranks_of[stage_of[tail.backward.target]].append(rank)
    for ranks in ranks_of.values():
        for tail in {tails[rank].backward.target: tails[rank] for rank in ranks}.values():
            others = [rank for rank in ranks if rank not in tail.peers]
            if others:
                behind = _behind(lists, tails, ranks_of, stage_of, tail.peers)
                if any(behind.get(rank, len(lists[rank])) <= tails[rank].index for rank in others):
                    return tail
    return None


def _behind(
    lists: Lists,
    tails: Mapping[int, _Tail],
    ranks_of: Mapping[str, Sequence[int]],
    stage_of: Mapping[str, str],
    begun: Sequence[int],
) -> dict[int, int]:
    """By rank, the index from which on everything comes behind the last backwards of the ranks ``begun``."""
    first_behind: dict[int, int] = {}
    coming = [(rank, tails[rank].index + 1) for rank in begun]
    while coming:
        rank, first = coming.pop()
        until = first_behind.get(rank, len(lists[rank]))
        first_behind[rank] = min(first, until)
        for index in range(first, until):
            coming += _met(lists, rank, lists[rank][index])
        if rank in tails and first <= tails[rank].index:  # and so the reduces that start inside it
            stage = stage_of[tails[rank].backward.target]
            coming += [(other, tails[other].index + 1) for other in ranks_of[stage]]
    return first_behind


def _met(lists: Lists, rank: int, item: Instruction) -> Iterator[tuple[int, int]]:
    """Where ranks come to what happens on several at once."""
    if item.op in _OTHER_END:
        yield item.peers[0], _last(lists[item.peers[0]], _OTHER_END[item.op], item.target, (rank,))
        return
    for peer in item.peers:
        yield peer, _last(lists[peer], item.op, item.target, item.peers)


def _last(items: Sequence[Instruction], op: str, target: str, peers: tuple[int, ...]) -> int:
    """What is asked for stands near the end."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if item.target == target and item.op == op and item.peers == peers:
            return index
    return len(items)
