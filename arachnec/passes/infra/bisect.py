"""Which pass of a pipeline goes wrong first."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from arachnec.ir.nodes import Module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.passes.infra.base import Pass
from arachnec.passes.infra.pipeline import Pipeline

Predicate: TypeAlias = Callable[[Module], bool]


@dataclass(frozen=True)
class Verdict:
    """``index`` is the first bad pass; -1 where the input is bad already, None where nothing is.

    ``before`` is the module that pass was given; ``reason`` says what made it bad.
    """

    index: int | None
    before: Module
    reason: str = ""


def first_bad(module: Module, pipeline: Pipeline, good: Predicate = lambda module: not verify(module)) -> Verdict:
    """The first pass that crashes, or after which ``good`` no longer holds.

    ``good`` is asked by bisection, so it must hold up to some pass and fail from it on. The default is "verifies".
    Raises ``UserError`` where the passes do not fit the module.
    """
    if not good(module):
        return Verdict(-1, module, "the input is bad before any pass")
    pipeline.demand_fit(module)
    modules, crash = _run(module, pipeline.informed)
    if good(modules[-1]):
        return Verdict(len(modules) - 1, modules[-1], crash) if crash else Verdict(None, modules[-1])
    low, high = 0, len(modules) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(modules[middle]) else (low, middle)
    problems = verify(modules[high])
    reason = problems[0].message if problems else "the predicate fails after it"
    return Verdict(low, modules[low], reason)


def _run(module: Module, passes: tuple[Pass, ...]) -> tuple[list[Module], str]:
    """The module before the first pass and after each, up to a crash, and what the crash was."""
    modules = [module]
    for step in passes:
        try:
            modules.append(step.run(modules[-1]))
        except Exception as error:
            return modules, f"{type(error).__name__}: {error}"
    return modules, ""


def command_predicate(command: str) -> Predicate:
    """A shell command that gets the path of the module's text; exit code 0 says good."""

    def good(module: Module) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "module.cascade"
            path.write_text(print_module(module), encoding="utf-8")
            completed = subprocess.run(
                f"{command} {shlex.quote(str(path))}", shell=True, capture_output=True, check=False
            )
            return completed.returncode == 0

    return good
