"""Floor 2: passes over the cascade IR, one file each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arachnec.passes.pipeline import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        return importlib.import_module("arachnec.passes.pipeline").Pipeline
    raise AttributeError(f"module 'arachnec.passes' has no attribute {name!r}")
