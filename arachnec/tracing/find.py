"""Which modules of a model are its repeated blocks, and when two of them are one structure."""

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


Unread = frozenset[tuple[str, str]]
# What torch keeps for itself in every module. Hooks are said: what they do is in the graph.
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
UNSAID = frozenset(vars(nn.Module())) - set(HOOKS)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Module path to block, outermost ones only, in the order of ``named_modules``.

    Raises nothing: a model without blocks gives an empty dict.
    """
    listed = _list_members(model)
    for attribute in ("_repeated_blocks", "_no_split_modules"):
        names = set(getattr(model, attribute, None) or ())
        # The conventions also name single modules that must not be split (embeddings); a block stands in a list.
        named = {path: module for path, module in listed.items() if type(module).__name__ in names}
        if named:
            return _outermost(named)
    return _outermost(_innermost_stacks(model))


def structure(block: nn.Module, unread: Unread = frozenset()) -> Any:
    """Hashable; equal for blocks that differ in nothing but values of parameters, buffers and ``unread`` settings."""
    return (
        tuple((path, _kept(path, _settings(module), unread)) for path, module in block.named_modules()),
        tuple((n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in block.named_parameters()),
        tuple((n, tuple(b.shape), str(b.dtype)) for n, b in block.named_buffers()),
    )


def unread_settings(blocks: Mapping[str, nn.Module], run: Callable[[], object]) -> Unread:
    """Settings in which otherwise equal blocks differ and that ``run``, a forward of the model, never looks at.

    A block that keeps its own index is the common case. Returned as (path in the block, attribute).
    """
    watch = SettingsWatch(blocks)
    if watch:
        with watch:
            run()
    return watch.unread


class SettingsWatch:
    """Within ``with watch:`` it is noted which of the settings that differ between otherwise equal blocks are read."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        kinds: dict[Any, list[nn.Module]] = {}
        for block in blocks.values():
            shape = structure(block)
            kinds.setdefault((tuple((path, s[0]) for path, s in shape[0]), *shape[1:]), []).append(block)
        self._watched: dict[int, dict[str, tuple[str, str]]] = {}
        self._modules: list[nn.Module] = []
        self._classes: list[type[nn.Module]] = []
        self._read: set[tuple[str, str]] = set()
        for alike in kinds.values():
            for path in dict(alike[0].named_modules()):
                members = [block.get_submodule(path) for block in alike]
                first, *others = (dict(_settings(member)[1]) for member in members)
                names = [name for name in first if any(other.get(name) != first[name] for other in others)]
                for member in members if names else ():
                    self._watched[id(member)] = {name: (path, name) for name in names}
                    self._modules.append(member)

    def __bool__(self) -> bool:
        return bool(self._modules)

    @property
    def unread(self) -> Unread:
        """Those that were not read so far."""
        return frozenset(setting for names in self._watched.values() for setting in names.values()) - self._read

    def __enter__(self) -> None:
        self._classes = [type(module) for module in self._modules]
        for module, kind in zip(self._modules, self._classes, strict=True):
            module.__class__ = _watching(kind, self._watched, self._read)

    def __exit__(self, *error: object) -> None:
        for module, kind in zip(self._modules, self._classes, strict=True):
            module.__class__ = kind


def _watching(
    kind: type[nn.Module], watched: Mapping[int, dict[str, tuple[str, str]]], read: set[Any]
) -> type[nn.Module]:
    """The class, writing down which of the watched attributes are looked up."""

    def look_up(self: nn.Module, name: str) -> Any:
        setting = watched[id(self)].get(name)
        if setting is not None:
            read.add(setting)
        return kind.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": look_up, "__module__": kind.__module__})


def _kept(path: str, settings: Any, unread: Unread) -> Any:
    return settings[0], tuple((name, value) for name, value in settings[1] if (path, name) not in unread)


def _settings(module: nn.Module) -> Any:
    """The class and everything that an attribute says, modules, parameters and buffers apart."""
    said = {name: value for name, value in vars(module).items() if name not in UNSAID}
    said |= {name: list(said[name].values()) for name in HOOKS}  # their keys are numbers of their own
    return class_of(module), tuple((name, described(value)) for name, value in sorted(said.items()))


def _list_members(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that is an element of a ``ModuleList``."""
    return {
        f"{path}.{name}" if path else name: child
        for path, parent in model.named_modules()
        if isinstance(parent, nn.ModuleList)
        for name, child in parent.named_children()
    }


def _innermost_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The elements of every outermost list; where such an element is little more than a list of its own, that one's."""
    stacks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in stacks):
            continue
        for name, child in module.named_children():
            if next(child.children(), None) is None:
                continue  # a list of plain layers is no stack of blocks
            inner = _innermost_stacks(child)
            prefix = f"{path}.{name}" if path else name
            if inner and _parameters(*inner.values()) >= 0.9 * _parameters(child):
                stacks |= {f"{prefix}.{key}": block for key, block in inner.items()}
            else:
                stacks[prefix] = child
    return stacks


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _outermost(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        path: block
        for path, block in blocks.items()
        if not any(path.startswith(f"{outer}.") for outer in blocks if outer != path)
    }
