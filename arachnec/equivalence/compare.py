"""Translation validation, by itself and before a run: what a lowered program computes, against ``reference``.

In: a module that ``check`` holds. Out: how far the two are apart, or a ``UserError`` that says in which stage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from arachnec.backends.torch_distributed.plans.supported import demand_supported
from arachnec.equivalence.execution import (
    Failed,
    OnRank,
    captured_blocks,
    on_forked_ranks,
    run_rank,
    run_reference_steps,
)
from arachnec.equivalence.small_program import CannotExecute, Small, small, stand_in
from arachnec.ir.diagnostic import Mistake, UserError, counted, user_error
from arachnec.ir.limits import MOST_CHECKED_RANKS, MOST_NAMES
from arachnec.ir.nodes import Module
from arachnec.passes.check import checked

TOLERANCE = 1e-6  # norms are made in fp32
SECONDS = 60.0
OUTSIDE = "what lies outside the layers"


@dataclass(frozen=True)
class Agreement:
    """``worst`` is the largest difference, as a part of the norm of what it is in; ``by_stage`` that of gradients and
    weights of each stage, and of what lies outside the layers."""

    ranks: int
    layers: int
    gradients: int
    steps: int
    worst: float
    by_stage: Mapping[str, float]

    @property
    def text(self) -> str:
        return (
            f"{counted(self.steps, 'step')} of a small model of {counted(self.layers, 'layer')} on "
            f"{counted(self.ranks, 'rank')}: loss, {counted(self.gradients, 'gradient')} and weights are the "
            f"reference's, to {self.worst:.0e}"
        )

    @property
    def stages(self) -> str:
        return ", ".join(f"{stage} to {worst:.0e}" for stage, worst in self.by_stage.items())


def demand_equivalent(module: Module, seconds: float = SECONDS) -> Agreement:
    """Raises ``UserError`` where the program computes something else, does not end, or cannot be executed here."""
    world = len(module.programs)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        reason = "this process has used a GPU, and ranks that are forked from it could not compute"
        raise UserError(CannotExecute(module.span, module.name, reason))
    if world > MOST_CHECKED_RANKS:
        reason = f"it has {world} ranks, and this machine is to execute at most {MOST_CHECKED_RANKS}"
        raise UserError(CannotExecute(module.span, module.name, reason))
    demand_supported(module, module.programs)
    reduced = small(module)
    model_file = stand_in(reduced.form)
    captured = captured_blocks(reduced, model_file)
    try:
        ranks: list[OnRank] = on_forked_ranks(world, partial(run_rank, reduced, model_file, captured), seconds)
        expected: OnRank
        (expected,) = on_forked_ranks(1, lambda _: run_reference_steps(reduced, model_file), seconds)
    except Failed as failure:
        last = failure.text.strip().splitlines()[-1]
        raise user_error(
            f"the program of @{module.name} does not run to its end on small tensors: rank {failure.rank}: {last}",
            help="`check` holds all its rules, so this is a mistake in the compiler or in the executor",
            span=module.span,
        ) from failure
    differences = list(_differences(reduced, ranks, expected))
    wrong = [difference for difference in differences if not difference.size <= TOLERANCE]
    if wrong:
        first = min(difference.after for difference in wrong)  # what comes later may follow from it
        by_size = sorted((d for d in wrong if d.after == first), key=lambda d: d.size)
        told = list({d.where: d for d in by_size}.values())[-MOST_NAMES:]  # the worst of each place
        raise UserError(
            *(
                Mistake(
                    module.span,
                    f"the program of @{module.name} does not compute what its batch asks for: {d.text} {d.where}",
                    help=(
                        "`check` holds all its rules, so this is a mistake in the compiler or in the executor, or a "
                        "program that was edited in a way no rule sees: do not run it, and report it with the file"
                    ),
                )
                for d in reversed(told)
            )
        )
    worst = max(difference.size for difference in differences)
    by_stage: dict[str, float] = {}
    for difference in differences:
        if difference.stage:
            by_stage[difference.stage] = max(by_stage.get(difference.stage, 0.0), difference.size)
    return Agreement(world, len(reduced.names), len(expected.steps[0].gradients), len(expected.steps), worst, by_stage)


@dataclass(frozen=True)
class Difference:
    """``size`` is a part of the norm of what is right, ``after`` how many updates it was seen."""

    what: str
    where: str
    size: float
    after: int
    stage: str = ""  # empty: of all stages together

    @property
    def text(self) -> str:
        return f"{self.what} differs by {self.size:.2%}"


def _differences(reduced: Small, ranks: Sequence[OnRank], expected: OnRank) -> Iterator[Difference]:
    for number, right in enumerate(expected.steps):
        when = "" if number == 0 else f" after {number} update"
        loss = sum(rank.steps[number].loss for rank in ranks)
        yield Difference("the loss", f"of the whole step{when}", abs(loss - right.loss) / abs(right.loss), number)
        own = ranks[0].steps[number].gradients
        scale = _norm(right.gradients)
        for name, value in right.gradients.items():
            where = f"of {_place(reduced, name)}{when}"
            yield Difference("the gradient", where, _apart(own.get(name), value, scale), number, _stage(reduced, name))
    for number, rank in enumerate(ranks):
        scale, last = _norm(expected.weights), len(expected.steps)
        for name, value in rank.weights.items():
            where = f"of {_place(reduced, name)} on rank {number} after {last} updates"
            size = _apart(value, expected.weights[name], scale)
            yield Difference("the weight", where, size, last, _stage(reduced, name))


def _apart(own: Tensor | None, right: Tensor, scale: float) -> float:
    """Of the norm of the right value, or of a thousandth of all together."""
    if own is None or own.shape != right.shape:
        return float("inf")
    return float((own.double() - right.double()).norm()) / max(float(right.norm()), 1e-3 * scale)


def _norm(values: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.norm()) ** 2 for value in values.values()))


def _place(reduced: Small, parameter: str) -> str:
    """A parameter's place in the real model: its layer and stage."""
    layer = _layer(parameter)
    return OUTSIDE if layer is None else f"layer {reduced.names[layer]} of {_stage(reduced, parameter)}"


def _stage(reduced: Small, parameter: str) -> str:
    layer = _layer(parameter)
    return OUTSIDE if layer is None else f"@{reduced.stage_of[layer]}"


def _layer(parameter: str) -> int | None:
    root, *rest = parameter.split(".")
    return int(rest[0]) if root == "blocks" else None


MOST_INSTRUCTIONS = 2000  # of a program that is worth the seconds at every start


def executed_first(program: Module) -> str:
    """What was seen, for a person.

    Raises ``UserError`` for a program that ``check`` refuses, or that does not compute what its batch asks for.
    """
    if sum(len(own.instructions) for own in program.programs) > MOST_INSTRUCTIONS:
        return "self-test left out: the program is large (arachnec check --equivalence executes it on small tensors)"
    started = time.perf_counter()
    try:
        told = demand_equivalent(checked(program)).text
    except UserError as error:
        if any(not isinstance(diagnostic, CannotExecute) for diagnostic in error.diagnostics):
            raise
        return f"self-test left out: {error}"
    return f"self-test passed: {told} ({time.perf_counter() - started:.1f} s; --no-equivalence leaves it out)"
