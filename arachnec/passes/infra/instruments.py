"""One instrumentation point for whatever watches a pipeline: before, after and failed, once per pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arachnec.ir.diagnostic import UserError
from arachnec.ir.long_computations import Reporter
from arachnec.ir.nodes import Module
from arachnec.ir.printer import print_module

REPRODUCER_LINE = re.compile(r"//\s*arachnec opt --passes\s+(.+?)\s*$")


@dataclass(frozen=True)
class Moment:
    """A pass about to run, or just run: ``module`` is then what it gave, ``seconds`` what it took.

    ``remaining`` is the pipeline from this pass on, as text.
    """

    index: int
    name: str
    remaining: str
    module: Module
    seconds: float


class Instrument:
    """Watches a pipeline. Override what is needed."""

    def before(self, moment: Moment) -> None: ...

    def after(self, moment: Moment) -> None: ...

    def failed(self, moment: Moment, error: Exception) -> None: ...

    def progress(self, doing: str) -> None:
        """A pass that is running has reported how far it is."""


@dataclass(frozen=True)
class ReportProgress(Instrument):
    """Hands to ``reporter`` which pass runs, and what passes report themselves."""

    reporter: Reporter

    def before(self, moment: Moment) -> None:
        self.reporter(f"planning: {moment.name}")

    def progress(self, doing: str) -> None:
        self.reporter(doing)


class Timing(Instrument):
    """Collects how long every pass took, and how many cascades there were after it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def after(self, moment: Moment) -> None:
        self.rows.append((moment.name, moment.seconds, len(moment.module.cascades)))

    @property
    def total(self) -> float:
        """Seconds of all passes together; printing and verifying apart."""
        return sum(seconds for _, seconds, _ in self.rows)

    def table(self) -> str:
        width = max([len(name) for name, _, _ in self.rows], default=4)
        lines = [f"{'pass':<{width}}  {'ms':>10}  {'cascades':>8}"]
        lines += [f"{name:<{width}}  {seconds * 1e3:>10.1f}  {count:>8}" for name, seconds, count in self.rows]
        lines.append(f"{'total':<{width}}  {self.total * 1e3:>10.1f}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PrintAfter(Instrument):
    """Hands the module's text to ``write`` after the passes in ``names``, or after every one where that is None."""

    write: Callable[[str], object]
    names: frozenset[str] | None = None

    def after(self, moment: Moment) -> None:
        if self.names is None or moment.name in self.names:
            self.write(f"// after {moment.name}\n{print_module(moment.module)}")


@dataclass(frozen=True)
class Dump(Instrument):
    """Numbered files in ``directory``: ``00_input.cascade``, ``01_partition.cascade``, ..."""

    directory: Path

    def before(self, moment: Moment) -> None:
        if moment.index == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_reproducer(self.directory / "00_input.cascade", moment.module, moment.remaining)

    def after(self, moment: Moment) -> None:
        path = self.directory / f"{moment.index + 1:02}_{moment.name.replace('-', '_')}.cascade"
        path.write_text(print_module(moment.module), encoding="utf-8")


@dataclass(frozen=True)
class Reproducer(Instrument):
    """When a pass crashes (not when it finds a user's mistake): the module before it, the pipeline in line 1."""

    directory: Path
    announce: Callable[[str], object] = print

    def failed(self, moment: Moment, error: Exception) -> None:
        if isinstance(error, UserError):
            return
        path = self.directory / f"reproducer_{moment.name.replace('-', '_')}.cascade"
        write_reproducer(path, moment.module, moment.remaining)
        self.announce(f"pass `{moment.name}` crashed; `arachnec opt {path}` repeats it")


def write_reproducer(path: Path, module: Module, pipeline: str) -> None:
    """The module's text with its pipeline in line 1; also the form of a golden test's input."""
    path.write_text(f"// arachnec opt --passes {pipeline}\n{print_module(module)}", encoding="utf-8")


def pipeline_of(text: str) -> str | None:
    """The pipeline that line 1 of a reproducer or golden input names."""
    match = REPRODUCER_LINE.match(text.partition("\n")[0])
    return match[1] if match else None
