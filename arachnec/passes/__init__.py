"""Passes over the cascade IR, one file each, and what somebody who writes one imports.

``from arachnec.passes import CostModel, Count, Duration, Pass, Pipeline, Scope, registry, validate_schedule,
with_times``. Each is imported when it is first asked for, so that listing the passes stays free of torch and z3.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arachnec.cost.model import CostModel
    from arachnec.passes.infra import base as registry
    from arachnec.passes.infra.base import Count, Duration, Pass, Scope
    from arachnec.passes.infra.pipeline import Pipeline
    from arachnec.planning.formulate import with_times
    from arachnec.planning.validate import validate_schedule

__all__ = ["CostModel", "Count", "Duration", "Pass", "Pipeline", "Scope", "registry", "validate_schedule", "with_times"]

_HOMES = {
    "CostModel": "arachnec.cost.model",
    "Count": "arachnec.passes.infra.base",
    "Duration": "arachnec.passes.infra.base",
    "Pass": "arachnec.passes.infra.base",
    "Pipeline": "arachnec.passes.infra.pipeline",
    "Scope": "arachnec.passes.infra.base",
    "validate_schedule": "arachnec.planning.validate",
    "with_times": "arachnec.planning.formulate",
}


def __getattr__(name: str) -> Any:
    if name == "registry":
        return importlib.import_module("arachnec.passes.infra.base")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'arachnec.passes' has no attribute {name!r}")
