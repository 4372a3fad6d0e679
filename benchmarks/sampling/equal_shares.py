"""More ranks than cores, each held to an equal share of them, as devices of one speed are.

Without it the ranks of four on two cores run twice as fast while two of them wait, and a plan that leaves ranks idle is
quicker than on four devices. Control group version 1 of Linux, writable by root; a rank is told by its command line.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
LOOK_S = 0.02


def available(ranks: int) -> bool:
    """Whether ranks share cores here, and whether shares of them can be given out."""
    return ranks > (os.cpu_count() or 1) and os.access(GROUPS / "cgroup.procs", os.W_OK)


@contextmanager
def equal_shares(ranks: int) -> Iterator[None]:
    """Child processes that start inside run at most cores / ``ranks`` of a core; nothing where not ``available``."""
    if not available(ranks):
        yield
        return
    ended, groups = threading.Event(), list[Path]()
    thread = threading.Thread(target=_hold, args=(ranks, ended, groups), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for group in groups:
            group.rmdir()


def _hold(ranks: int, ended: threading.Event, groups: list[Path]) -> None:
    seen = set[int]()
    while not ended.wait(LOOK_S):
        for child in _children() - seen:
            seen.add(child)
            group = GROUPS / f"arachnec-{os.getpid()}-{child}"
            group.mkdir()
            groups.append(group)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US * (os.cpu_count() or 1) // ranks))
            try:
                (group / "cgroup.procs").write_text(str(child))
            except ProcessLookupError:  # it has ended
                continue


def _children() -> set[int]:
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(child) for listed in lists for child in listed.read_text().split()}
