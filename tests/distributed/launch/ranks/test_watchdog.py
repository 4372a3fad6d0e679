"""What ends a rank from beside its main thread, with a store of this process and limits of tenths of a second."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from arachnec.ir.diagnostic import UserError
from arachnec.launch.ending import Failure, follows_from_another
from arachnec.launch.peers import Member
from arachnec.launch.phases import START, Place, Position, held_up_by, new_memory
from arachnec.launch.ranks import store_of_this_start
from arachnec.launch.watchdog import Limits, Watchdog
from tests.distributed.executor_cases import RUNS
from tests.warm_python import warm_python

FAST = Limits(poll=0.05, beat=0.1, lapse=0.6, hold=0.0)
LAST = Place(12, "step 3", "gradients.py:88", doing="backward %c1 (clip b)")
ENDS_S = 20.0  # on a busy machine
KEEPS_A_STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class Run:
    """A store, and watchdogs of some ranks in this process that note their exit codes and end nothing."""

    def __init__(self) -> None:
        self.master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.codes: queue.Queue[int] = queue.Queue()
        self.dogs: list[Watchdog] = []

    def store(self) -> Any:
        return dist.TCPStore("127.0.0.1", self.master.port, is_master=False)

    def watch(self, rank: int, world: int, limits: Limits = FAST) -> Watchdog:
        self.dogs.append(Watchdog(self.store(), rank, world, limits, self.codes.put))
        return self.dogs[-1]

    def ended(self) -> int:
        return self.codes.get(timeout=ENDS_S)

    def pretend(self, member: Member, stands: Place) -> None:
        """A rank that is known to the store and does nothing."""
        self.master.set(f"member/{member.rank}", msgspec.json.encode(member).decode())
        self.master.set(f"at/{member.rank}", msgspec.json.encode(stands).decode())

    def all_leave(self) -> None:
        for rank in range(8):
            self.master.set(f"done/{rank}", "")
            self.master.set(f"left/{rank}", "")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.delenv("ARACHNEC_ERROR_FD", raising=False)
    run = Run()
    yield run
    run.all_leave()
    for dog in reversed(run.dogs):
        dog.close()


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_rank_without_a_sign_of_life_is_named_by_the_one_before_it(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), LAST)
    run.watch(0, 2)
    assert run.ended() == 2
    told = capfd.readouterr().err
    assert "rank 1 of 2 on host gpu-7 has given no sign of life for" in told
    assert "it was last seen in step 3: backward %c1 (clip b), gradients.py:88" in told


def test_of_a_rank_that_went_on_since_its_last_sign_the_step_and_its_work_there_are_told(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps may be shorter than what lies between two signs of life."""
    run.pretend(Member(1, "gpu-7", 1, "another agent"), LAST)
    run.watch(0, 2).enter("step 5", 1000.0, "--step-timeout", Stands(1.0, 1))
    assert run.ended() == 2
    told = " ".join(capfd.readouterr().err.split())
    assert "it was last seen in step 3: backward %c1 (clip b), gradients.py:88" in told
    assert "since then it came to step 5, and was to do rank 1's work up to instruction 3 there" in told
    assert "rank 0 stood in step 5: forward %c0 (clip a), " in told


def test_a_rank_may_be_silent_no_longer_than_its_instruction_may_take(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), msgspec.structs.replace(LAST, limit=0.4))
    run.watch(0, 2, Limits(poll=0.05, beat=0.1, lapse=600.0))
    assert run.ended() == 2
    assert "has given no sign of life" in capfd.readouterr().err


def test_a_sibling_whose_process_is_gone_is_named_before_it_lapses(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.pretend(Member(1, "here", dead_process(), Member.here(0).agent), Place(3, "start", "elsewhere"))
    run.watch(0, 2, Limits(poll=0.05, lapse=60.0))
    assert run.ended() == 2
    assert "rank 1 of 2 on host here was killed or crashed: its process is gone" in capfd.readouterr().err


def test_a_rank_that_begins_is_known_before_its_next_sign_of_life_is_due(run: Run) -> None:
    """Steps of a tenth of a second may be over, and the rank lost, by then."""
    run.watch(0, 2, Limits(poll=60.0, beat=60.0)).enter("step 0", 1000.0, "--step-timeout", Stands(1.0, 1))
    run.master.wait(["at/0"], timedelta(seconds=ENDS_S))
    assert msgspec.json.decode(run.master.get("at/0"), type=Place).phase == "step 0"


def test_of_a_killed_sibling_the_instruction_is_told_that_it_was_in_to_the_last(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it told in the store is some steps old; what it noted in its memory is not, and outlives it."""
    memory = new_memory()
    os.set_inheritable(memory, True)
    sibling = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[memory])
    os.pwrite(memory, msgspec.json.encode(msgspec.structs.replace(LAST, phase="step 9", line="")), 0)
    os.close(memory)
    run.pretend(Member(1, "here", sibling.pid, Member.here(0).agent, memory), LAST)
    dog = run.watch(0, 2, Limits(poll=0.05, lapse=60.0))
    while not dog._peers._memories:
        time.sleep(0.01)
    sibling.kill()
    sibling.wait()
    assert run.ended() == 2
    assert "its process is gone; the others were stopped; it was in step 9: backward %c1 (clip b)" in " ".join(
        capfd.readouterr().err.split()
    )


def test_one_that_is_done_may_go(run: Run) -> None:
    run.pretend(Member(1, "here", dead_process(), Member.here(0).agent), Place(3, "start", "elsewhere"))
    run.master.set("done/1", "")
    run.watch(0, 2)
    with pytest.raises(queue.Empty):
        run.codes.get(timeout=1.5)


def test_a_rank_stays_until_all_are_done_and_asks_nothing_when_it_says_that_it_has_left(run: Run) -> None:
    dog = run.watch(1, 3)

    def others() -> bool:
        run.master.wait(["done/1"])
        run.master.set("done/0", "")
        time.sleep(0.5)
        left = run.master.check(["left/1"])
        run.master.set("done/2", "")
        return left

    with ThreadPoolExecutor(1) as pool:
        too_early = pool.submit(others)
        dog.close()
    assert not too_early.result()
    assert run.master.check(["left/1"])
    run.dogs.remove(dog)


def test_a_rank_that_is_stopped_between_the_last_barrier_and_its_end_is_named(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its neighbour has nothing else to do, and waits for it."""
    run.pretend(Member(1, "gpu-7", 1, "another agent"), Place(40, "end", "ranks.py:140"))
    dog = run.watch(0, 2)

    def ended() -> int:
        code = run.ended()
        run.all_leave()  # a real one would have ended here
        return code

    with ThreadPoolExecutor(1) as pool:
        code = pool.submit(ended)
        dog.close()
    assert code.result() == 2
    told = capfd.readouterr().err
    assert "rank 1 of 2 on host gpu-7 has given no sign of life for" in told
    assert "it was last seen in end, ranks.py:140" in told
    run.dogs.remove(dog)


def test_a_rank_that_left_its_loop_is_named_by_one_that_is_in_a_later_step(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = run.watch(0, 2), run.watch(1, 2)
    for dog in (first, second):
        dog.begins(1)
    second.leaves(2)
    with pytest.raises(queue.Empty):
        run.codes.get(timeout=1.5)  # the first may be on its way out too
    first.begins(2)
    assert run.ended() == 2
    told = capfd.readouterr().err
    assert "rank 1 left its loop after 2 steps, and rank 0 is in step 2" in told
    assert "on every rank behind the same step" in told


def test_a_phase_that_takes_too_long_is_named_with_the_option_and_where_every_rank_stands(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), Place(12, "step 5", "handoffs.py:60"))
    run.watch(0, 2, Limits(poll=0.05, beat=0.1, lapse=60.0)).enter("step 5", 0.3, "--step-timeout")
    assert run.ended() == 2
    told = capfd.readouterr().err
    assert "has been in step 5 for" in told
    assert "its limit is 0.3 s" in told
    assert "raise the limit with --step-timeout" in told
    assert "rank 1: step 5, handoffs.py:60" in told


class Stands:
    """A rank that has been in one instruction for a while, in which it waits for some others."""

    def __init__(self, seconds: float, *others: int) -> None:
        self.seconds, self.others = seconds, others

    def place(self) -> Place:
        return Place(position=Position(5, 3), doing="forward %c0 (clip a)", seconds=self.seconds, limit=60.0)

    def tell(self, to: Callable[[Place], None]) -> None:
        to(self.place())

    def awaited(self, rank: int, position: Position) -> dict[int, Position]:
        return dict.fromkeys(self.others, position) if rank == 0 else {}

    def work(self, rank: int, until: Position | None) -> str:
        return f"rank {rank}'s work up to instruction {until.instruction if until else 'the last'}"


def stands_at(instruction: int, seconds: float = 100.0) -> Place:
    return Place(12, "step 5", "x.py:1", Position(5, instruction), "backward %c1 (clip b)", seconds, 60.0)


STILL = Limits(poll=0.05, beat=0.05, lapse=60.0)


def test_a_rank_that_nobody_holds_up_is_told_with_its_instruction_and_clip(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.watch(0, 2, STILL).enter("step 5", 1000.0, "--step-timeout", Stands(100.0))
    assert run.ended() == 2
    told = capfd.readouterr().err
    assert "is silent: in step 5 it has been in forward %c0 (clip a) for 100 s" in told
    assert "its limit is 60 s; if it was only slow, raise that with --stall-timeout" in told
    assert "rank 0: step 5: forward %c0 (clip a), " in told


def test_where_all_came_to_one_instruction_the_network_between_them_is_suspected(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), stands_at(3))
    run.watch(0, 2, STILL).enter("step 5", 1000.0, "--step-timeout", Stands(100.0, 1))
    assert run.ended() == 2
    assert "where rank 1 came too: the network between them may be cut" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("own", "other"),
    [
        pytest.param(100.0, stands_at(2), id="another-is-behind-and-speaks-for-itself"),
        pytest.param(100.0, stands_at(3, seconds=1.0), id="the-other-came-just-now"),
        pytest.param(100.0, Place(1, "start", "x.py:1"), id="the-other-has-not-begun"),
        pytest.param(59.0, stands_at(3), id="not-for-long"),
    ],
)
def test_a_rank_that_waits_for_another_is_not_told(run: Run, own: float, other: Place) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), other)
    dog = run.watch(0, 2, STILL)
    dog.enter("step 5", 1000.0, "--step-timeout", Stands(own, 1))
    assert dog._look(told_to_end=False) is None
    dog._next_beat = 0.0
    assert dog._look(told_to_end=False) is None
    assert run.codes.empty()


def test_a_step_that_takes_too_long_says_who_holds_it_up(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), stands_at(2))
    run.watch(0, 2, STILL).enter("step 5", 0.1, "--step-timeout", Stands(1.0, 1))
    assert run.ended() == 2
    assert "its limit is 0.1 s; it waits for rank 1, in backward %c1 (clip b)" in capfd.readouterr().err


def test_who_holds_up_is_found_over_several_ranks() -> None:
    waits = {0: {1: 5, 2: 5}, 1: {2: 5}, 2: {3: 5}, 3: {}}

    def awaited(rank: int, position: Position) -> dict[int, Position]:
        return {other: Position(5, at) for other, at in waits[rank].items()}

    places = {0: stands_at(5), 1: stands_at(5), 2: stands_at(4), 3: stands_at(3)}
    assert held_up_by(0, places, awaited) == 3
    assert held_up_by(3, places, awaited) == 3
    assert held_up_by(0, {rank: place for rank, place in places.items() if rank != 3}, awaited) == 3  # never seen
    assert Place().position == START < places[3].position


def test_a_failure_ends_every_rank_and_each_agent_tells_it_once(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    dogs = [run.watch(rank, 3) for rank in range(3)]
    failure, tells = dogs[1].failed(ValueError("the first cause"))
    assert (failure.exit_code, tells) == (1, True)
    assert "the first cause" in failure.text
    assert (run.ended(), run.ended()) == (1, 1)
    assert capfd.readouterr().err == ""  # rank 1 is to tell it, and is of the same agent


def test_what_a_rank_raises_because_another_died_is_not_told(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.pretend(Member(1, "gpu-7", 1, "another agent"), LAST)
    dog = run.watch(0, 2, replace(FAST, beat=5.0))
    error = RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    threading.Thread(target=dog.failed, args=(error,), daemon=True).start()  # a real one would not come back
    assert run.ended() == 2
    told = capfd.readouterr().err
    assert "rank 1 of 2 on host gpu-7 has given no sign of life" in told
    assert "gloo" not in told


def test_a_store_that_is_gone_ends_the_rank(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    keeper = subprocess.Popen(
        [
            warm_python(RUNS),
            "-c",
            KEEPS_A_STORE,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(keeper.stdout.readline()), is_master=False)
    dog = Watchdog(store, 0, 2, FAST, run.codes.put)
    keeper.kill()
    keeper.wait()
    assert run.ended() == 2
    assert "cannot reach the rendezvous store any more" in capfd.readouterr().err
    dog.close()
    keeper.stdout.close()


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [::1]:4711"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp: remote process exited"), True),
        (ConnectionResetError("connection reset"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("timed out"), False),
    ],
)
def test_a_broken_connection_is_told_from_a_mistake(error: BaseException, follows: bool) -> None:
    assert follows_from_another(error) is follows


def test_every_start_in_one_store_has_a_part_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    for number, world in enumerate((2, 3, 2), 1):  # what the starts before left is there
        with ThreadPoolExecutor(world) as ranks:
            coming = [ranks.submit(store_of_this_start, run.store(), rank, world, ENDS_S) for rank in range(world)]
            stores = [future.result() for future in coming]
        assert [given for _, given in stores] == [number] * world
        assert not stores[0][0].check(["failure"])
        stores[0][0].set("failure", "of this start")
        assert stores[1][0].get("failure") == b"of this start"


def test_a_rank_that_does_not_come_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    with pytest.raises(UserError, match="rank 1 of 2 did not come within 0 s"):
        store_of_this_start(run.store(), 0, 2, 0.1)
    with pytest.raises(UserError, match="rank 0 of 2 did not come within 0 s"):
        store_of_this_start(run.store(), 1, 2, 0.1)


def test_a_failure_has_the_exit_code_of_its_kind() -> None:
    assert (Failure(0.0, True, "").exit_code, Failure(0.0, False, "").exit_code) == (2, 1)


def test_a_script_that_has_ended_takes_leave_though_pools_take_no_more_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter closes its pools before what was to be done at its exit, of which leaving the ranks is a part."""

    def closed(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", closed)
    run.watch(0, 2)
    run.pretend(msgspec.structs.replace(Member.here(1), agent="elsewhere"), LAST)
    with pytest.raises(queue.Empty):
        run.codes.get(timeout=4 * FAST.poll)
    assert run.ended() == 2  # and still looks at the others: rank 1 gives no sign of life
