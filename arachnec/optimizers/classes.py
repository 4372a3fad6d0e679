"""Optimizers and schedulers of torch by name, their arguments held to what the class takes."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from arachnec.executable.training_options import bad_value
from arachnec.ir.diagnostic import UserError

T = TypeVar("T")

# These update an element from its own gradient and state alone, so that any cut of a parameter is updated as the whole.
ELEMENTWISE = frozenset(
    "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split()  # noqa: SIM905
)
REFUSED = {
    "LBFGS": "it computes the loss again within an update, and here a step computes it once",
    "SparseAdam": "it takes sparse gradients, and here they are dense",
}
UNWRITABLE = {
    "LambdaLR": "it takes a function, which a file cannot hold",
    "MultiplicativeLR": "it takes a function, which a file cannot hold",
    "SequentialLR": "it takes other schedulers; `warmup` stands in front of any",
    "ChainedScheduler": "it takes other schedulers",
    "ReduceLROnPlateau": "it follows losses that a resumed run cannot see again",
}


def optimizer_class(name: str) -> type[Optimizer]:
    """A class of ``torch.optim``. Raises ``UserError`` for an unknown name, or one that cannot be run here."""
    kinds = {n: kind for n, kind in vars(torch.optim).items() if _is_proper(kind, Optimizer)}
    return _of_name("optimizer.name", name, kinds, REFUSED)


def scheduler_class(name: str) -> type[lr_scheduler.LRScheduler]:
    """A class of ``torch.optim.lr_scheduler``. Raises ``UserError`` as ``optimizer_class`` does."""
    kinds = {n: kind for n, kind in vars(lr_scheduler).items() if _is_proper(kind, lr_scheduler.LRScheduler)}
    return _of_name("schedule.name", name, kinds, UNWRITABLE)


def constructed(kind: Callable[..., T], first: Any, key: str, arguments: Mapping[str, Any]) -> T:
    """``kind(first, **arguments)``. Raises ``UserError`` for arguments that it does not take, lacks, or refuses.

    ``key`` is the table that they stand in.
    """
    known = list(inspect.signature(kind).parameters.values())[1:]
    names = [parameter.name for parameter in known]
    called = getattr(kind, "__name__", "it")
    for name in arguments:
        if name not in names:
            raise UserError(
                bad_value(f"{key}.{name}", arguments[name], f"{called} takes no `{name}`", near(name, names))
            )
    lacking = [p.name for p in known if p.default is inspect.Parameter.empty and p.name not in arguments]
    if lacking:
        written = ", ".join(f"`{name}`" for name in lacking)
        raise UserError(bad_value(f"{key}.name", called, f"it needs {written}", f"add `{lacking[0]} = ...` to [{key}]"))
    _hold_to_annotations(kind, key, arguments)
    try:
        return kind(first, **arguments)
    except (ArithmeticError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        given = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        reason = f"{called} refuses its arguments: {' '.join(str(error).split())}"
        raise UserError(
            bad_value(key, given or called, reason, f"torch's documentation of {called} has them")
        ) from None


def _hold_to_annotations(kind: Callable[..., Any], key: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a value of another type than the class states: torch takes "no" for true."""
    try:
        known = inspect.signature(kind, eval_str=True).parameters
    except NameError:  # a name that only a type checker imports
        return
    for name, value in arguments.items():
        try:
            msgspec.convert(value, _of_a_file(known[name].annotation))
        except msgspec.ValidationError as error:
            reason = (
                str(error).partition(" - at")[0].replace("Expected", "expected").replace("`", "").replace(" | null", "")
            )
            remedy = f"torch's documentation of {getattr(kind, '__name__', 'it')} has its arguments"
            raise UserError(bad_value(f"{key}.{name}", value, reason, remedy)) from None
        except TypeError:  # a type that no file can hold
            continue


def _of_a_file(hint: Any) -> Any:
    """A type without the tensors that it may be as well: a file holds numbers. What has no type may be anything."""
    if hint is inspect.Parameter.empty:
        return Any
    inner = tuple(_of_a_file(part) for part in get_args(hint) if part is not Tensor)
    if get_origin(hint) in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007
    return get_origin(hint)[inner] if get_origin(hint) in (tuple, list) else hint


def near(word: str, known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in known}
    begun = [name for name in lower if len(word) > 3 and name.startswith(word.lower())]
    close = difflib.get_close_matches(word.lower(), lower, n=1) or begun
    return f"did you mean `{lower[close[0]]}`?" if close else f"known are {', '.join(known)}"


def _is_proper(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base and not kind.__name__.startswith("_")


def _of_name(key: str, name: str, kinds: Mapping[str, type[T]], refused: Mapping[str, str]) -> type[T]:
    usable = sorted(n for n in kinds if n not in refused and not n.startswith("_") and n != "LRScheduler")
    if name in refused:
        raise UserError(bad_value(key, name, refused[name], f"known are {', '.join(usable)}"))
    if name not in usable:
        raise UserError(bad_value(key, name, "torch has none of that name", near(name, usable)))
    return kinds[name]
