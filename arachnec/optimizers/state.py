"""What an optimizer keeps for a parameter: found by one update of a tensor like it, before anything is allocated.

The update is tried on the meta device first, where it takes no memory, and with drawn numbers where an optimizer looks
at them: a parameter or a gradient of zeros is a special case to some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.users_code import users_line
from arachnec.optimizers.entries import changed, is_entry, places, snapshot, wrapped_with_state
from arachnec.optimizers.recipe import ParameterGroup, Recipe, master_dtype

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
            few, more = (nbytes(kept_state(recipe, group, (size,), dtype)) for size in (3, 5))
            of_element = (more - few) // 2
            most = max(most[0], of_element), max(most[1], few - 3 * of_element)
    return most


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
                few, more = (nbytes(kept_state(recipe, group, (size,), dtype)) for size in (3, 5))
                per_element = (more - few) // 2
                total += per_element * elements + (few - 3 * per_element) * count
            continue
        shapes = Counter((tuple(parameters[name].shape), dtypes[name]) for name in group.names)
        total += sum(count * nbytes(kept_state(recipe, group, *like)) for like, count in shapes.items())
    return total


def nbytes(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
