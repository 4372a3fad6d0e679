"""What a pass is, a frozen dataclass whose fields are its options, with one pure method; and which passes there are.

Class ``ScheduleZ3`` has the name ``schedule-z3`` and lives in ``passes/schedule_z3.py``. Built-in passes are found by
the names of their files, without importing them: listing names is free of torch and z3.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NewType, Self, cast

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.long_computations import Reporter
from arachnec.ir.nodes import Level, Module

if TYPE_CHECKING:
    from arachnec.cost.table import Rows


Duration = NewType("Duration", float)
"""An option that is a time: ms in Python, written with its unit in a pipeline (``500ms``, ``20s``, ``2min``)."""


@dataclass(frozen=True)
class AtLeast:
    """Of an option that is an integer: the least that may be written in a pipeline."""

    least: int


Count = Annotated[int, AtLeast(1)]
"""An option that is a number of things, one at least."""

CountFromZero = Annotated[int, AtLeast(0)]
"""An option that is a number of things, or none of them."""


class Scope(Enum):
    """What a pass decides for, and so how often it runs."""

    MODEL = "model"  # once, on the traced module: every clip of the manifest, and the block graphs
    ITERATION = "iteration"  # for each global batch, on a module of its clips, without graphs


@dataclass(frozen=True)
class Pass(ABC):
    """Module in, module out.

    A pass of scope ``MODEL`` takes a traced module, and stands before every pass of scope ``ITERATION``. It may read
    the cluster: where another number of ranks runs than was compiled for, it runs again for those.

    A pass that raises the level (``gives > needs``) takes a module of exactly the level it needs. One that keeps it
    (``gives == needs``) takes that level or any later one, and gives back the level it was given.

    Options may be bool, int, ``Count``, float, str, ``Duration``, ``Literal`` of strings, tuples of int or str, and
    ``X | None``; all have defaults.
    """

    needs: ClassVar[Level]
    gives: ClassVar[Level]
    scope: ClassVar[Scope] = Scope.ITERATION
    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = "-".join(re.findall(r"[A-Z][a-z0-9]*", cls.__name__)).lower()  # `ScheduleZ3` to `schedule-z3`

    @abstractmethod
    def run(self, module: Module) -> Module:
        """The module after this pass. Never changes its argument; a user's mistake is raised as UserError."""

    def run_reporting(self, module: Module, reporter: Reporter) -> Module:
        """The same as ``run``; a pass that takes seconds overrides it, and reports how far it is."""
        return self.run(module)

    def run_for_comparison(self, module: Module, rows: Rows) -> Module:
        """The same as ``run`` for a plan that is only compared: nothing says how good it is. ``rows`` of costs are
        filled, and used where they are there."""
        return self.run(module)

    def informed(self, following: tuple[Pass, ...]) -> Pass:
        """This pass, knowing which passes follow in its pipeline; one whose work does not depend on them is itself."""
        return self

    def accepts(self, level: Level) -> bool:
        return level == self.needs if self.gives > self.needs else level >= self.needs

    def result(self, level: Level) -> Level:
        """The level of the module this pass gives for a module of ``level``."""
        return self.gives if self.gives > self.needs else level


@dataclass(frozen=True)
class InformedPass(Pass):
    """A pass whose work depends on those that follow it in its pipeline; they are no option, and print nowhere."""

    following: tuple[Pass, ...] = field(default=(), init=False, compare=False, repr=False)

    def informed(self, following: tuple[Pass, ...]) -> Self:
        informed = copy.copy(self)
        object.__setattr__(informed, "following", following)
        return informed


NO_PASS = ("trace",)  # makes the module that the first pass takes
ENTRY_POINTS = "arachnec.passes"


def pass_file_fails_error(path: str, reason: str) -> UserError:
    return user_error(f"{path} cannot be loaded: {reason}", help=f"run it with `python {path}` to see where")


@dataclass(frozen=True)
class Registry:
    """Pass name to ``"module:Class"`` or the class itself; a later entry of one name stands before an earlier one."""

    entries: tuple[tuple[str, str | type[Pass]], ...]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.entries))

    def __contains__(self, name: object) -> bool:
        return name in dict(self.entries)

    def get(self, name: str) -> type[Pass]:
        """The class of a pass. Raises KeyError where there is none of that name."""
        entry = dict(self.entries)[name]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        return cast(type[Pass], getattr(importlib.import_module(module), attribute))

    def with_passes(self, *kinds: type[Pass]) -> Registry:
        return Registry(self.entries + tuple((kind.name, kind) for kind in kinds))


def builtin() -> Registry:
    """A pass for every file of ``arachnec/passes``: ``schedule_z3.py`` holds class ``ScheduleZ3``, ``schedule-z3``."""
    folder = Path(__file__).parents[1]
    files = [file.name for file in pkgutil.iter_modules([str(folder)]) if not file.ispkg]
    return Registry(tuple(_entry(file) for file in files if file not in NO_PASS))


def _entry(file: str) -> tuple[str, str]:
    words = file.split("_")
    return "-".join(words), f"arachnec.passes.{file}:{''.join(word.capitalize() for word in words)}"


def installed() -> Registry:
    """The built-in passes and those of installed packages (entry points ``name = "module:Class"``)."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return Registry(tuple((entry.name, entry.value) for entry in points) + builtin().entries)


def load_file(path: str | Path, registry: Registry) -> Registry:
    """``registry`` and every pass that the Python file ``path`` defines. Raises UserError."""
    path = Path(path)
    if not path.is_file():
        raise user_error(f"there is no file {path}", help="--load takes a Python file that defines passes")
    name = f"arachnec_loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise pass_file_fails_error(path=str(path), reason="its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise pass_file_fails_error(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    kinds = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Pass) and kind.__module__ == name and not inspect.isabstract(kind)
    ]
    if not kinds:
        raise user_error(
            f"{path} defines no pass",
            help="a pass is a frozen dataclass derived from arachnec.passes.Pass, with `needs`, `gives` and `run`",
        )
    return registry.with_passes(*kinds)
