"""Which passes there are: a value that is passed along, never a global that is written to.

Built-in passes are found by the names of their files, without importing them: listing names is free of torch and z3.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.passes.infra.base import Pass

NO_PASS = ("trace",)  # makes the module that the first pass takes
ENTRY_POINTS = "arachnec.passes"


def pass_file_fails_error(path: str, reason: str) -> UserError:
    return user_error(f"{path} cannot be loaded: {reason}", help=f"run it with `python {path}` to see where")


@dataclass(frozen=True)
class Registry:
    """Pass name to ``"module:Class"`` or the class itself; a later entry of one name stands before an earlier one."""

    entries: tuple[tuple[str, str | type[Pass]], ...]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.entries))

    def __contains__(self, name: object) -> bool:
        return name in dict(self.entries)

    def get(self, name: str) -> type[Pass]:
        """The class of a pass. Raises KeyError where there is none of that name."""
        entry = dict(self.entries)[name]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        return cast(type[Pass], getattr(importlib.import_module(module), attribute))

    def with_passes(self, *kinds: type[Pass]) -> Registry:
        return Registry(self.entries + tuple((kind.name, kind) for kind in kinds))


def builtin() -> Registry:
    """A pass for every file of ``arachnec/passes``: ``schedule_z3.py`` holds class ``ScheduleZ3``, ``schedule-z3``."""
    folder = Path(__file__).parents[1]
    files = [file.name for file in pkgutil.iter_modules([str(folder)]) if not file.ispkg]
    return Registry(tuple(_entry(file) for file in files if file not in NO_PASS))


def _entry(file: str) -> tuple[str, str]:
    words = file.split("_")
    return "-".join(words), f"arachnec.passes.{file}:{''.join(word.capitalize() for word in words)}"


def installed() -> Registry:
    """The built-in passes and those of installed packages (entry points ``name = "module:Class"``)."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return Registry(tuple((entry.name, entry.value) for entry in points) + builtin().entries)


def load_file(path: str | Path, registry: Registry) -> Registry:
    """``registry`` and every pass that the Python file ``path`` defines. Raises UserError."""
    path = Path(path)
    if not path.is_file():
        raise user_error(f"there is no file {path}", help="--load takes a Python file that defines passes")
    name = f"arachnec_loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise pass_file_fails_error(path=str(path), reason="its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise pass_file_fails_error(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    kinds = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Pass) and kind.__module__ == name and not inspect.isabstract(kind)
    ]
    if not kinds:
        raise user_error(
            f"{path} defines no pass",
            help="a pass is a frozen dataclass derived from arachnec.passes.Pass, with `needs`, `gives` and `run`",
        )
    return registry.with_passes(*kinds)
