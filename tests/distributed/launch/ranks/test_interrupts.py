"""Ctrl-C goes to the launcher alone: it ends the ranks, and none of them shows where it was."""

import signal
import subprocess
import sys

from arachnec.launch.local_ranks import _without_interrupts

GRANDCHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


def test_a_rank_and_what_it_starts_do_not_see_it_and_the_launcher_does() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _without_interrupts():
        rank = subprocess.Popen([sys.executable, "-S", "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert signal.getsignal(signal.SIGINT) is before
    assert rank.communicate()[0].split() == ["True"]
