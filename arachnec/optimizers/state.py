"""What an optimizer keeps: tensors for a parameter, found by one update, entries of groups, attributes of its own.

The update is tried on the meta device first, where it takes no memory, and with drawn numbers where an optimizer looks
at them: a parameter or a gradient of zeros is a special case to some.

Schedule-free optimizers, D-Adaptation and Prodigy count updates and keep estimates outside it. Which entries these are
is seen by what an update changes; all else are arguments. They are the same on every rank: an optimizer that is not
elementwise updates whole tensors, on every rank alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arachnec.data.dataset import from_text, to_text
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.users_code import users_line
from arachnec.optimizers.recipe import ParameterGroup, Recipe, master_dtype

NUMBERS = (bool, int, float, str, type(None))
# What torch itself has in every optimizer, and what its schedulers add.
TORCHS = {*vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)), "_step_count", "_opt_called", "found_inf"}
Place = dict[str, Any]
Filled = dict[int, list[Tensor]]  # by the id of a tensor those that stand in its places, itself or others


def places(optimizer: Optimizer) -> list[Place]:
    """The dicts in use: of every group, then of the optimizer itself, and of one that it wraps."""
    dicts: list[Place] = [*optimizer.param_groups, vars(optimizer)]
    for _, inner in _wrapped(optimizer):
        known = set(map(id, dicts))
        dicts += [place for place in places(inner) if id(place) not in known]
    return dicts


def _wrapped(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers among its attributes, or in lists and dicts there, by the attribute."""
    for key, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from ((key, one) for one in several if isinstance(one, Optimizer))


def wrapped_with_state(optimizer: Optimizer) -> tuple[str, Optimizer] | None:
    """One that it wraps and that keeps a state beside its own, by the attribute that has it."""
    apart = ((key, one) for key, one in _wrapped(optimizer) if one.state and one.state is not optimizer.state)
    return next(apart, None)


def snapshot(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What tells later which entries have changed; the host waits for no tensor."""
    dicts = places(optimizer)
    updated = {id(value) for place in dicts for value in place.get("params", ())}
    return [
        {key: _mark(value, updated) for key, value in place.items() if key != "params" and key not in TORCHS}
        for place in dicts
    ]


def changed(before: list[dict[str, Any]], optimizer: Optimizer) -> list[set[str]]:
    """By place the keys of entries that are new or others since ``before``."""
    return [
        {key for key, mark in now.items() if key not in old or old[key] != mark}
        for old, now in zip(before, snapshot(optimizer), strict=True)
    ]


def is_entry(value: object) -> bool:
    """Whether a checkpoint can hold it: a number, a text, a tensor, or a list or dict of such."""
    if isinstance(value, dict):
        return all(isinstance(key, NUMBERS) for key in value) and all(map(is_entry, value.values()))
    return isinstance(value, (*NUMBERS, Tensor)) or (isinstance(value, list | tuple) and all(map(is_entry, value)))


@dataclass
class KeptEntries:
    """The entries of an optimizer that its updates change, for checkpoints."""

    optimizer: Optimizer
    _keys: list[set[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keys = [set() for _ in places(self.optimizer)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what the update inside changes."""
        before = snapshot(self.optimizer)
        yield
        for keys, new in zip(self._keys, changed(before, self.optimizer), strict=True):
            keys |= new

    def sets(self, group: int, key: str) -> bool:
        """Whether the updates themselves change this entry of a group."""
        return key in self._keys[group]

    def text(self) -> str:
        """All of them; empty where there are none. Raises ``UserError`` for one that no checkpoint holds."""
        if not any(self._keys):
            return ""
        pairs = zip(places(self.optimizer), self._keys, strict=True)
        return to_text([{key: place[key] for key in sorted(keys)} for place, keys in pairs])

    def take(self, text: str) -> None:
        """Put back what ``text`` gave. Raises ``UserError`` where that was an optimizer of other groups."""
        groups = self.optimizer.param_groups
        device = next((value.device for group in groups for value in group["params"]), torch.device("cpu"))
        filled: Filled = {id(value): [] for value in self.optimizer.defaults.values()}  # each group has these very ones
        stored = from_text(text)
        if len(stored) != len(self._keys):
            raise user_error(
                f"the checkpoint has entries of {type(self.optimizer).__name__} for another number of groups",
                help="make the groups that it was made with: what is estimated in them goes on with each",
            )
        for place, keys, kept in zip(places(self.optimizer), self._keys, stored, strict=True):
            keys |= kept.keys()
            for key, value in kept.items():
                place[key] = _taken(value, place.get(key), device, filled)


def _taken(value: Any, there: Any, device: torch.device, filled: Filled) -> Any:
    """An entry as it was, in the tensors that are ``there``, of which others may know, unless they are ``filled`` with
    another; new ones on the device."""
    if isinstance(value, list | tuple):
        known = there if isinstance(there, list | tuple) and len(there) == len(value) else [None] * len(value)
        return type(value)(_taken(one, before, device, filled) for one, before in zip(value, known, strict=True))
    if isinstance(value, dict):
        before = there if isinstance(there, dict) else {}
        return {key: _taken(one, before.get(key), device, filled) for key, one in value.items()}
    if not isinstance(value, Tensor):
        return value
    if isinstance(there, Tensor) and (there.shape, there.dtype) == (value.shape, value.dtype):
        if id(there) not in filled:
            filled[id(there)] = [there]
            with torch.no_grad():
                return there.copy_(value)
        instead = filled[id(there)]
        equal = next((tensor for tensor in instead if torch.equal(tensor.cpu(), value)), None)
        if equal is None:
            equal = value.to(there.device)
            instead.append(equal)
        return equal
    return value.to(there.device if isinstance(there, Tensor) else device)


def _mark(value: Any, updated: Set[int]) -> Any:
    """Equal for entries that nothing has changed between; the parameters that are ``updated`` are none."""
    if id(value) in updated:
        return id(value)
    if isinstance(value, Tensor):
        return id(value), value._version, value  # which keeps the id its own
    if isinstance(value, list | tuple):
        return type(value), [_mark(item, updated) for item in value]
    if isinstance(value, dict):
        return type(value), [(_mark(key, updated), _mark(item, updated)) for key, item in value.items()]
    return (type(value), value) if isinstance(value, NUMBERS) else id(value)


AVERAGE = 4  # bytes per parameter, of a moving average of fp32 masters


def unkept_state_error(name: str, key: str, kind: str) -> UserError:
    return user_error(
        f"{name} keeps `{key}`, {kind}, which no checkpoint holds",
        help="keep tensors and numbers in the state of a parameter, each by a key of its own",
    )


def kept_state(recipe: Recipe, group: ParameterGroup, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The optimizer's state of one parameter after an update: tensors on the meta device, or numbers on the CPU."""
    for device in ("meta", "cpu"):  # some look at their numbers
        value = nn.Parameter(_drawn(shape, dtype, device))
        value.grad = _drawn(shape, dtype, device)
        try:
            optimizer = recipe.make([([value], group)])
            before = snapshot(optimizer)
            optimizer.step()
        except Exception as error:
            if device == "meta":
                continue
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            remedy = "correct it, or choose another optimizer, or groups"
            raise user_error(
                f"{recipe.name} cannot update a tensor of shape {tuple(shape)}: {reason}",
                label="raised here",
                help=f"what it keeps is counted before launch by one update with a drawn gradient; {remedy}",
                span=users_line(error),
            ) from error
        if (inner := wrapped_with_state(optimizer)) is not None:
            kind = f"{_kind(inner[1])} with a state of its own"
            raise unkept_state_error(recipe.name, inner[0], kind)
        if len(places(optimizer)) != len(before):
            raise unkept_state_error(recipe.name, "param_groups", "a group or an optimizer made in an update")
        kept = dict(optimizer.state[value])
        for key, held in kept.items():
            if held is not None and not isinstance(held, Tensor | int | float):
                raise unkept_state_error(recipe.name, str(key), _kind(held))
        for other in optimizer.state:
            if other is not value:
                raise unkept_state_error(recipe.name, str(other), "a state of no parameter")
        for place, keys in zip(places(optimizer), changed(before, optimizer), strict=True):
            for key in sorted(keys):
                if not is_entry(place[key]):
                    raise unkept_state_error(recipe.name, key, _kind(place[key]))
        return kept
    raise AssertionError("the CPU answers")


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def most_kept(parameters: Mapping[str, Tensor], recipe: Recipe) -> tuple[int, int]:
    """Bytes that an update element by element keeps for an element, and for a tensor: of the group that has most."""
    most = 0, 0
    for group in recipe.groups:
        for dtype in {master_dtype(parameters[name].dtype) for name in group.names}:
            of_element, once = _kept_of(recipe, group, dtype)
            most = max(most[0], of_element), max(most[1], once)
    return most


def _kept_of(recipe: Recipe, group: ParameterGroup, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that an update element by element keeps for an element, and for a tensor."""
    few, more = (nbytes(kept_state(recipe, group, (size,), dtype)) for size in (3, 5))
    of_element = (more - few) // 2
    return of_element, few - 3 * of_element


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Numbers between 1/2 and 1, the same every time."""
    generator = None if device == "meta" else torch.Generator().manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(0.5, 1.0, generator=generator)


def state_bytes(parameters: Mapping[str, Tensor], recipe: Recipe) -> int:
    """Bytes that the optimizer keeps for all of these parameters, which train and are whole."""
    total = 0
    for group in recipe.groups:
        dtypes = {name: master_dtype(parameters[name].dtype) for name in group.names}
        if recipe.elementwise:
            for dtype, count in Counter(dtypes.values()).items():
                elements = sum(parameters[name].numel() for name in group.names if dtypes[name] == dtype)
                of_element, once = _kept_of(recipe, group, dtype)
                total += of_element * elements + once * count
            continue
        shapes = Counter((tuple(parameters[name].shape), dtypes[name]) for name in group.names)
        total += sum(count * nbytes(kept_state(recipe, group, *like)) for like, count in shapes.items())
    return total


def nbytes(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
