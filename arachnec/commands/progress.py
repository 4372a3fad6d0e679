"""Progress on standard error: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from arachnec.ir.long_computations import Reporter

PLAIN_SECONDS = 2.0  # at least, between two plain lines of one phase


@contextmanager
def progress_on_stderr() -> Iterator[Reporter]:
    """A reporter for the time of a ``with``; on a terminal nothing of it stays behind.

    Elsewhere every phase gives a line when it begins, and at most one each two seconds after that. Standard output
    stays as it is, so that ``--json`` can be read from it.
    """
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as status:
        yield lambda doing: status.update(escape(doing))  # names may hold what rich would read as markup


def _plain_lines() -> Reporter:
    phase, shown = "", 0.0

    def report(doing: str) -> None:
        nonlocal phase, shown
        begins = doing.partition(" ")[0]
        if begins != phase or time.monotonic() - shown >= PLAIN_SECONDS:
            phase, shown = begins, time.monotonic()
            click.echo(doing, err=True)

    return report
