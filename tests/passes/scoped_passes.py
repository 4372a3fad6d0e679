"""Passes that note what they were given, for ``--load``: how often does each scope run, and on what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from arachnec.ir.nodes import Level, Module
from arachnec.passes import Pass, Scope

SEEN = "seen.txt"


@dataclass(frozen=True)
class NoteModel(Pass):
    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL
    file: str = SEEN

    def run(self, module: Module) -> Module:
        return noted(module, "model", self.file)


@dataclass(frozen=True)
class NoteIteration(Pass):
    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    file: str = SEEN

    def run(self, module: Module) -> Module:
        return noted(module, "iteration", self.file)


def noted(module: Module, scope: str, file: str) -> Module:
    assert module.cluster is not None
    with Path(file).open("a", encoding="utf-8") as seen:
        graphs = "graphs" if module.graphs else "none"
        seen.write(f"{scope} {[clip.id for clip in module.clips]} {graphs} {module.cluster.world}\n")
    return module
