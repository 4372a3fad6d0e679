"""The emulator itself: what NCCL's documentation says would hang does, and what would not does not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.emulator.machine import Action, Await, Connect, Fence, Launch, Machine, Post, Send, Standstill, Synchronize


def run(*hosts: Sequence[Action], pool: int = 8, waits: float = 0.0) -> Standstill | None:
    """The same whatever order the hosts run in."""
    results = [Machine(dict(enumerate(hosts)), pool, waits, random.Random(seed)).run() for seed in range(10)]
    assert len({result is None for result in results}) == 1
    return results[0]


def meet(stream: str, *members: int) -> Launch:
    return Launch(stream, stream, stream, members)


def test_collectives_in_two_orders_stand_still_only_where_streams_are_shared() -> None:
    a, b = meet("a", 0, 1), meet("b", 0, 1)
    assert run([a, b], [a, b], pool=1) is None
    assert run([a, b], [b, a], pool=2) is None
    assert run([a, b], [b, a], pool=1) is not None


def test_a_wait_for_the_whole_device_behind_a_receive_that_depends_on_it_stands_still() -> None:
    compute, transfer = Launch("compute"), meet("handoff", 0, 1)
    back, wait = meet("back", 0, 1), Synchronize("cudaFree")
    # rank 0 has posted a receive; rank 1 sends what it needs from rank 0 first
    assert run([transfer, compute, back], [back, transfer]) is None
    circle = run([transfer, compute, wait, back], [back, transfer], waits=0.0)
    assert circle is None  # rank 1's streams are apart and its host does not wait
    circle = run([transfer, wait, back], [back, wait, transfer])
    assert circle is not None
    assert circle.is_circle
    assert circle.lines == (
        "rank 0: its host waits for the whole device before cudaFree",
        "rank 0: stream 1 runs handoff, which rank 1 has not started",
        "rank 1: its host waits for the whole device before cudaFree",
        "rank 1: stream 1 runs back, which rank 0 has not started",
    )


def test_a_fence_makes_its_stream_wait_and_not_the_host() -> None:
    first, second = meet("first", 0, 1), meet("second", 0, 1)
    fenced = [first, Fence("wait", "compute", "first"), Launch("reads"), second]
    assert run(fenced, [second, first]) is None
    held = [first, Fence("wait", "compute", "first"), Fence("wait", "second", "compute"), second]
    assert run(held, [first, second]) is None
    held_twice = [second, Fence("wait", "first", "second"), first]
    circle = run(held, held_twice)
    assert circle is not None
    assert circle.is_circle


def test_a_lazy_connection_holds_its_hosts() -> None:
    a, b = Connect("a", "a", (0, 1)), Connect("b", "b", (0, 1))
    assert run([a, b], [a, b]) is None
    circle = run([a, b], [b, a])
    assert circle is not None
    assert circle.is_circle


def test_a_message_over_the_host_occupies_no_stream() -> None:
    post, wait = Post("post", "m"), Await("value", "m")
    back = meet("back", 0, 1)
    assert run([post, Synchronize("cudaFree"), back, wait], [back, Send("send", "m", "copies")], pool=1) is None
    assert run([post, wait, back], [back, Fence("send", "copies", "back"), Send("send", "m", "copies")]) is not None


def test_what_never_comes_is_a_chain_and_no_circle() -> None:
    lost = run([meet("a", 0, 1)], [])
    assert lost is not None
    assert not lost.is_circle
    assert lost.lines[-1] == "rank 1: its host has ended, and what is waited for never comes"


@pytest.mark.parametrize("waits", [0.5, 1.0])
def test_injected_waits_are_before_any_action(waits: float) -> None:
    a, b = meet("a", 0, 1), meet("b", 0, 1)
    assert run([a, b], [a, b], waits=waits) is None
    seen = {Machine({0: [a, b], 1: [b, a]}, 8, waits, random.Random(seed)).run() is None for seed in range(50)}
    assert seen == ({True, False} if waits < 1 else {False})
