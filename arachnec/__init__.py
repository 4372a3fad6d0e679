"""A compiler for training video diffusion transformers on clips of mixed resolution and duration.

``arachnec.trace``, ``arachnec.compile``, ``arachnec.ir`` and ``arachnec.passes.Pipeline`` say in Python what the
command line says, and no less. ``arachnec.Engine`` trains in a loop of your own (docs/own_loop.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arachnec.version import __version__

if TYPE_CHECKING:
    from arachnec import ir, passes
    from arachnec.backends.torch_distributed.engine import Engine
    from arachnec.data.clip import VideoClip
    from arachnec.data.parquet_clips import ParquetClips
    from arachnec.data.video import read_frames
    from arachnec.driver import compile, trace

__all__ = ["Engine", "ParquetClips", "VideoClip", "__version__", "compile", "ir", "passes", "read_frames", "trace"]
HOMES = {
    "Engine": "arachnec.backends.torch_distributed.engine",
    "ParquetClips": "arachnec.data.parquet_clips",
    "VideoClip": "arachnec.data.clip",
    "compile": "arachnec.driver",
    "read_frames": "arachnec.data.video",
    "trace": "arachnec.driver",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import and `arachnec --help` needs none of it.
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    if name in {"ir", "passes"}:
        return importlib.import_module(f"arachnec.{name}")
    raise AttributeError(f"module 'arachnec' has no attribute {name!r}")
