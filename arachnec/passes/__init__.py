"""Floor 2: passes over the cascade IR, one file each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arachnec.passes.base import Duration, Pass
    from arachnec.passes.pipeline import Pipeline

__all__ = ["Duration", "Pass", "Pipeline"]

_HOMES = {"Duration": "base", "Pass": "base", "Pipeline": "pipeline"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"arachnec.passes.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'arachnec.passes' has no attribute {name!r}")
