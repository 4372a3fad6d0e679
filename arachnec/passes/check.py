"""``check``: the four rules of a lowered program, proved before anything runs. The module comes back unchanged.

``docs/check.md`` says what the rules mean and what a back end must do for them to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from arachnec.analysis.uses import Values
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Level, Module
from arachnec.lowering.programs import NoCluster
from arachnec.passes.infra.base import Pass
from arachnec.verification.deadlock import check_deadlock
from arachnec.verification.gradient import check_gradient
from arachnec.verification.inputs import check_inputs
from arachnec.verification.memory import check_memory
from arachnec.verification.structure import check_structure

RULES: tuple[Callable[[Values], Iterator[Diagnostic]], ...] = (
    check_gradient,
    check_deadlock,
    check_inputs,
    check_memory,
)


@dataclass(frozen=True)
class Check(Pass):
    """The proof before launch."""

    needs: ClassVar[Level] = Level.LOWERED
    gives: ClassVar[Level] = Level.LOWERED

    def run(self, module: Module) -> Module:
        return checked(module)


def checked(module: Module) -> Module:
    """The module itself, or UserError with the first diagnostic of every kind that its programs earn."""
    problems = find_problems(module)
    if problems:
        raise UserError(*problems)
    return module


def find_problems(module: Module) -> tuple[Diagnostic, ...]:
    """What is wrong with a lowered module: the first of every kind of mistake, in the order of the rules."""
    if module.cluster is None:
        return (NoCluster(module.span, module.name),)
    values = Values(module)
    broken = _first_of_each(check_structure(values))
    if broken:
        return broken
    return _first_of_each(problem for rule in RULES for problem in rule(values))


def _first_of_each(problems: Iterator[Diagnostic]) -> tuple[Diagnostic, ...]:
    kinds: dict[type[Diagnostic], Diagnostic] = {}
    for problem in problems:
        kinds.setdefault(type(problem), problem)
    return tuple(kinds.values())
