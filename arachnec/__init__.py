"""A compiler for training video diffusion transformers on clips of mixed resolution and duration.

``arachnec.trace``, ``arachnec.compile``, ``arachnec.ir`` and ``arachnec.passes.Pipeline`` say in Python what the
command line says, and no less.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arachnec.version import __version__

if TYPE_CHECKING:
    from arachnec import ir, passes
    from arachnec.driver import compile, trace

__all__ = ["__version__", "compile", "ir", "passes", "trace"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import and `arachnec --help` needs none of it.
    if name in {"compile", "trace"}:
        return getattr(importlib.import_module("arachnec.driver"), name)
    if name in {"ir", "passes"}:
        return importlib.import_module(f"arachnec.{name}")
    raise AttributeError(f"module 'arachnec' has no attribute {name!r}")
