"""What a setting says, hashable. In: any object. Out: equal for two that a graph need not tell apart."""

from __future__ import annotations

import contextlib
import hashlib
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arachnec.models.compiled_modules import ORIGINAL

Known = dict[int, tuple[Hashable, Any]]  # what was met, by identity; kept, so that no identity is given again
SAID = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)


def described(value: Any) -> Hashable:
    """Containers, functions with what they enclose, and objects with their attributes, to any depth.

    A module is its class alone: its own settings are said where it stands. Of an object that shows no attributes, such
    as one written in C, nothing is known: two of them are never equal.
    """
    said = _described(value, {})
    try:
        hash(said)
    except TypeError:  # a class whose own class has no hash
        return type(value).__qualname__, id(value)
    return said


def class_of(value: object) -> Any:  # hashable
    """By name, since torch makes a class of its own for each module that it parametrizes; one that a function made by
    itself, which may enclose anything."""
    kind = type(value)
    return kind if "<locals>" in kind.__qualname__ else f"{kind.__module__}.{kind.__qualname__}"


def _described(value: Any, known: Known) -> Hashable:
    """One inside itself is a number."""
    if isinstance(value, SAID):
        return class_of(value), repr(value)
    value = getattr(value, ORIGINAL, value) if isinstance(value, types.FunctionType) else value
    if id(value) not in known:
        known[id(value)] = len(known), value
        try:
            parts = _parts(value, known)
        except Exception:  # it does not let itself be read
            parts = (id(value),)
        known[id(value)] = (class_of(value), *parts), value
    return known[id(value)][0]


def _parts(value: Any, known: Known) -> tuple[Hashable, ...]:
    for kind, parts in CONTAINERS:
        if isinstance(value, kind):
            return tuple(_described(part, known) for part in parts(value))
    if isinstance(value, Set):
        return (frozenset(_described(part, known) for part in value),)
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, Tensor):
        return _numbers(value)
    if isinstance(value, nn.Module):
        return ()
    if isinstance(value, types.CodeType):
        return (value,)
    if isinstance(value, type | types.BuiltinFunctionType):
        return value.__module__, value.__qualname__
    attributes = _attributes(value)
    if attributes is None:
        return (id(value),)
    return tuple((name, _described(part, known)) for name, part in attributes.items())


def _of_function(function: types.FunctionType) -> tuple[Any, ...]:
    said = function.__module__, function.__code__, function.__defaults__, function.__kwdefaults__
    return *said, *_enclosed(function)


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing was put into it yet
            yield cell.cell_contents


CONTAINERS: tuple[tuple[Any, Callable[[Any], tuple[Any, ...]]], ...] = (
    (Mapping, lambda value: tuple(part for item in value.items() for part in item)),
    (tuple | list, tuple),
    (partial, lambda value: (value.func, value.args, value.keywords)),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda value: (value.__func__, value.__self__)),
)


def _numbers(tensor: Tensor) -> tuple[Hashable, ...]:
    form = tuple(tensor.shape), str(tensor.dtype)
    if tensor.is_meta or tensor.grad_fn is not None:
        return form  # no graph can read its numbers; or a forward computed it, from parameters (weight_norm)
    if tensor.layout is not torch.strided:
        return *form, id(tensor)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    return *form, hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _attributes(value: object) -> dict[str, Any] | None:
    """By name; None where there are none to look at."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    if not hasattr(value, "__dict__") and not slots:
        return None
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return dict(sorted(named.items()))
