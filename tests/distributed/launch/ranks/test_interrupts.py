"""What ends the launcher ends its ranks. Ctrl-C goes to it alone, and no rank shows where it was."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from arachnec.launch.local_ranks import ENDING, _told_to_end, _without_interrupts

ENDS_S = 30.0
GRANDCHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


def test_a_rank_and_what_it_starts_do_not_see_it_and_the_launcher_does() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _without_interrupts():
        rank = subprocess.Popen([sys.executable, "-S", "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert signal.getsignal(signal.SIGINT) is before
    assert rank.communicate()[0].split() == ["True"]


LAUNCHER = """
from arachnec.launch.local_ranks import launch
launch(2, [], lambda line: None, worker="tests.distributed.launch.ranks.sleeping_worker")
"""


def test_a_launcher_that_is_told_to_end_many_times_at_once_ends_with_its_ranks() -> None:
    """`timeout` and schedulers tell a process and its group: the second time comes while the first is answered."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            assert all(launcher.stdout.readline() for _ in range(2))
            for _ in range(50):
                launcher.send_signal(signal.SIGTERM)
                time.sleep(1e-4)
            assert launcher.wait(ENDS_S) == 128 + signal.SIGTERM
            assert launcher.stdout.read() == "", "the ranks, which have it too, are gone"
        finally:
            launcher.kill()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_a_launcher_does_is_not_cut_off_and_it_ends_where_it_looks(handlers: None) -> None:
    done = []
    with pytest.raises(SystemExit) as ended, _told_to_end() as told:
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("its locks are given back")
        told.look()
        done.append("it went on")
    assert ended.value.code == 128 + signal.SIGTERM
    assert done == ["its locks are given back"]


def test_what_takes_long_is_cut_off(handlers: None) -> None:
    done = []
    with pytest.raises(SystemExit) as ended, _told_to_end() as told, told.at_once():
        os.kill(os.getpid(), signal.SIGHUP)
        done.append("it went on")
    assert ended.value.code == 128 + signal.SIGHUP
    assert not done


def test_a_launcher_that_was_told_stays_deaf_until_it_has_ended_and_another_hears_again(handlers: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _told_to_end():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit), _told_to_end():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in ENDING] == [signal.SIG_IGN] * len(ENDING)
