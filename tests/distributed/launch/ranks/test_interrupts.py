"""What ends the launcher ends its ranks. Ctrl-C goes to it alone, and no rank shows where it was."""

import signal
import subprocess
import sys
import time

from arachnec.launch.local_ranks import _without_interrupts

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
