"""What a pass is: a frozen dataclass whose fields are its options, with one pure method.

Class ``ScheduleZ3`` has the name ``schedule-z3`` and lives in ``passes/schedule_z3.py``.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, ClassVar, NewType, Self

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
        cls.name = pass_name(cls.__name__)

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


def pass_name(class_name: str) -> str:
    """``ScheduleZ3`` to ``schedule-z3``."""
    return "-".join(re.findall(r"[A-Z][a-z0-9]*", class_name)).lower()


@dataclass(frozen=True)
class InformedPass(Pass):
    """A pass whose work depends on those that follow it in its pipeline; they are no option, and print nowhere."""

    following: tuple[Pass, ...] = field(default=(), init=False, compare=False, repr=False)

    def informed(self, following: tuple[Pass, ...]) -> Self:
        informed = copy.copy(self)
        object.__setattr__(informed, "following", following)
        return informed
