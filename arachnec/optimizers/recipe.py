"""What updates which parameter, and with which arguments.

In: parameters as the model has them, and training options or the model file's ``optimizer``. Out: a ``Recipe``, from
which every rank makes the optimizer of what lies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arachnec.executable.training_options import OWN_OPTIMIZER, Group, Training, bad_value
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Span
from arachnec.optimizers.classes import ELEMENTWISE, REFUSED, constructed, optimizer_class
from arachnec.optimizers.schedules import demand_schedule

UserOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def wrong_optimizer_error(span: Span | None, reason: str, remedy: str) -> UserError:
    return user_error(f"`optimizer` {reason}", help=remedy, span=span)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters by name, and the arguments that their update has, ``lr`` among them."""

    names: tuple[str, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """``kind`` with arguments for each group; or what the user's own function makes, on whole tensors alone."""

    groups: tuple[ParameterGroup, ...]
    kind: type[Optimizer] | None = None
    user: UserOptimizer | None = None
    span: Span | None = None  # of the function
    made: str = ""  # the class of what it makes

    @property
    def name(self) -> str:
        return self.made if self.kind is None else self.kind.__name__

    @property
    def elementwise(self) -> bool:
        """Whether any part of a parameter may be updated by itself."""
        return self.kind is not None and self.kind.__name__ in ELEMENTWISE

    def text(self) -> str:
        """What the ranks of a run must have in common."""
        made_by = getattr(self.user, "__qualname__", "") if self.kind is None else self.kind.__qualname__
        return "\n".join([str(made_by), *(f"{group.names} {_told(group.arguments)}" for group in self.groups)])

    def make(self, parameters: Sequence[tuple[Sequence[Tensor], ParameterGroup]]) -> Optimizer:
        """The optimizer of these tensors, each run of them with its group's arguments."""
        if self.kind is None:
            assert self.user is not None
            values = [value for run, _ in parameters for value in run]
            own = self.user([value if isinstance(value, nn.Parameter) else nn.Parameter(value) for value in values])
            if has_modes(own):
                own.train()  # type: ignore[attr-defined]
            return own
        runs: list[Any] = [{"params": list(run), **group.arguments} for run, group in parameters]
        kind: Callable[..., Optimizer] = self.kind
        fused = bool(runs) and all(run.get("fused") for run in runs)  # torch asks it of the class, too
        return kind(runs or [nn.Parameter(torch.empty(0))], **({"fused": True} if fused else {}))


def recipe_of(
    parameters: Mapping[str, Tensor], training: Training, user: UserOptimizer | None = None, span: Span | None = None
) -> Recipe:
    """``parameters`` are those that train, whole, by name; on the meta device is enough. ``user`` is the model file's
    ``optimizer``, defined at ``span``.

    Raises ``UserError`` for an optimizer that torch does not have or that refuses its arguments, a group that nothing
    fits, and for a function that returns no optimizer of these parameters.
    """
    if user is not None:
        return _users(parameters, training, user, span)
    kind = optimizer_class(training.optimizer.name)
    common = {"lr": training.lr, **training.optimizer.arguments}
    groups = []
    dealt = zip(_dealt(parameters, training.groups), (*training.groups, Group()), strict=True)
    for number, (names, group) in enumerate(dealt):
        if names:
            standing = [_stand_in(parameters[name]) for name in names]
            key = f"groups[{number}]" if group.arguments else "optimizer"
            optimizer = constructed(kind, standing, key, common | group.arguments)
            groups.append(ParameterGroup(names, _arguments(optimizer.param_groups[0])))
    return Recipe(tuple(groups), kind)


def demand_torch_takes(training: Training) -> None:
    """Raises ``UserError`` for an optimizer, a group or a schedule that torch has not, or whose arguments it refuses.

    Before there is a model: what a class asks of its parameters is seen later.
    """
    kind = optimizer_class(training.optimizer.name)
    common = {"lr": training.lr, **training.optimizer.arguments}
    standing = [nn.Parameter(torch.empty(1, 1, device="meta"))]
    groups = [_arguments(constructed(kind, standing, "optimizer", common).param_groups[0])]
    for number, group in enumerate(training.groups):
        optimizer = constructed(kind, standing, f"groups[{number}]", common | group.arguments)
        groups.append(_arguments(optimizer.param_groups[0]))
    demand_schedule(training.schedule, groups)


def _dealt(parameters: Mapping[str, Tensor], groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """The names in each group, and in none of them."""
    dealt: list[list[str]] = [[] for _ in (*groups, None)]
    for name, value in parameters.items():
        dealt[next((i for i, group in enumerate(groups) if _fits(name, value, group)), len(groups))].append(name)
    for number, (group, names) in enumerate(zip(groups, dealt, strict=False)):
        if not any(_fits(name, value, group) for name, value in parameters.items()):
            shown = [*(group.match or ()), *([] if group.dimensions is None else [group.dimensions])]
            some = ", ".join(list(parameters)[:3])
            key = f"groups[{number}].{'dimensions' if group.match is None else 'match'}"
            raise UserError(bad_value(key, shown, "no parameter fits", f"names are such as {some}"))
        if not names:
            key, shown = f"groups[{number}].match", list(group.match or ())
            remedy = "the first group that a parameter fits has it: put this group in front"
            raise UserError(bad_value(key, shown, "every parameter that fits is in a group before", remedy))
    return [tuple(names) for names in dealt]


def _fits(name: str, value: Tensor, group: Group) -> bool:
    named = group.match is None or any(fnmatchcase(name, pattern) for pattern in group.match)
    return named and (group.dimensions is None or value.ndim <= group.dimensions)


def _users(parameters: Mapping[str, Tensor], training: Training, user: UserOptimizer, span: Span | None) -> Recipe:
    if training.optimizer != OWN_OPTIMIZER or training.groups:
        raise wrong_optimizer_error(
            span,
            "was given, and the training options have an optimizer or groups too",
            "keep one of them: leave out [optimizer] and [[groups]], or the function",
        )
    standing = {name: _stand_in(value) for name, value in parameters.items()}
    try:
        optimizer = user(list(standing.values()))
    except UserError:
        raise
    except Exception as error:  # of a class or a partial, which has no line of its own
        reason = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise wrong_optimizer_error(span, reason, "look at its arguments, and at the parameters' shapes") from error
    if not isinstance(optimizer, Optimizer):
        reason = f"returned a {type(optimizer).__name__}"
        raise wrong_optimizer_error(span, reason, "return a torch.optim.Optimizer over the parameters it was given")
    names = {id(value): name for name, value in standing.items()}
    groups = []
    for group in optimizer.param_groups:
        if not all(id(value) in names for value in group["params"]):
            reason = "has parameters that it was not given"
            raise wrong_optimizer_error(span, reason, "make it over the tensors in `parameters`, and no copies")
        groups.append(ParameterGroup(tuple(names[id(value)] for value in group["params"]), _arguments(group)))
    missing = names.keys() - {id(value) for group in optimizer.param_groups for value in group["params"]}
    if missing:
        reason = f"leaves out {len(missing)} parameters that train, among them {names[min(missing)]}"
        raise wrong_optimizer_error(span, reason, "take all of `parameters`, or freeze them in build()")
    kind = type(optimizer)
    if kind.__name__ in REFUSED and kind is getattr(torch.optim, kind.__name__):
        reason = f"returned a {kind.__name__}: {REFUSED[kind.__name__]}"
        raise wrong_optimizer_error(span, reason, "return another optimizer")
    if kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__):
        return Recipe(tuple(groups), kind)
    return Recipe(tuple(groups), None, user, span, kind.__name__)


def has_modes(optimizer: Optimizer) -> bool:
    """Whether it keeps other weights to train with than to use, and switches between them (schedule-free)."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _arguments(group: Mapping[str, Any]) -> dict[str, Any]:
    """All that a group of torch's says of its parameters' update, defaults included."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}


def _told(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arguments as text; of one that is no number, flag or text only its kind, as its text may be an address."""
    plain = (bool, int, float, str, tuple, list)
    shown = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    return sorted((key, repr(v) if isinstance(v, plain) else type(v).__name__) for key, v in shown.items())


def _stand_in(value: Tensor) -> nn.Parameter:
    """On the meta device, in the precision in which a parameter is updated."""
    return nn.Parameter(torch.empty(value.shape, dtype=master_dtype(value.dtype), device="meta"))


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which parameters of ``dtype`` are updated: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)
