"""Arguments and results as trees of tensors. In: any value. Out: its leaves, of dataclasses their attributes.

torch flattens tuples, lists, dicts, named tuples and classes that a library registered. Blocks and models also take and
give plain dataclasses, which are registered here when they are first met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """``pytree.tree_flatten``, after ``register_dataclasses``."""
    register_dataclasses(value)
    return pytree.tree_flatten(value)


def register_dataclasses(value: Any) -> None:
    """Make torch's pytrees flatten every plain dataclass and ``SimpleNamespace`` in ``value``, to any depth."""
    while kinds := {type(leaf) for leaf in pytree.tree_leaves(value) if _is_plain_record(leaf)}:
        for kind in kinds:
            pytree.register_pytree_node(
                kind, _attributes, partial(_rebuilt, kind), flatten_with_keys_fn=_attributes_with_keys
            )


def _is_plain_record(leaf: Any) -> bool:
    if isinstance(leaf, (type, Tensor, nn.Module)):
        return False
    return dataclasses.is_dataclass(leaf) or type(leaf) is SimpleNamespace


def _named(value: Any) -> dict[str, Any]:
    """The fields that are set, then what else the instance keeps; a cached property computes itself again."""
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    kept = getattr(value, "__dict__", {})
    others = [n for n in kept if n not in fields and not isinstance(getattr(type(value), n, None), cached_property)]
    return {name: getattr(value, name) for name in (*fields, *sorted(others)) if hasattr(value, name)}


def _attributes(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    named = _named(value)
    return list(named.values()), tuple(named)


def _attributes_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[str, ...]]:
    named = _named(value)
    return [(pytree.GetAttrKey(name), part) for name, part in named.items()], tuple(named)


def _rebuilt(kind: type, parts: Sequence[Any], names: tuple[str, ...]) -> Any:
    """An instance with these attributes. ``__init__`` and ``__post_init__`` ran when the first one was made."""
    instance = SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(instance, name, part)
    return instance
