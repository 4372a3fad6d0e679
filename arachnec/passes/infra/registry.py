"""Which passes there are: a value that is passed along, never a global that is written to.

Built-in passes are found by this table without importing them, so that listing names is free of torch and z3.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.passes.infra.base import Pass

BUILTIN = {
    "choose-layout": "arachnec.passes.choose_layout:ChooseLayout",
    "sparsify": "arachnec.passes.sparsify:Sparsify",
    "partition": "arachnec.passes.partition:Partition",
    "shard-parameters": "arachnec.passes.shard_parameters:ShardParameters",
    "shard-optimizer": "arachnec.passes.shard_optimizer:ShardOptimizer",
    "offload": "arachnec.passes.offload:Offload",
    "stages": "arachnec.passes.stages:Stages",
    "stages-dapple": "arachnec.passes.stages_dapple:StagesDapple",
    "stages-adaptis": "arachnec.passes.stages_adaptis:StagesAdaptis",
    "segment": "arachnec.passes.segment:Segment",
    "annotate": "arachnec.passes.annotate:Annotate",
    "schedule-static": "arachnec.passes.schedule_static:ScheduleStatic",
    "schedule-same-bucket": "arachnec.passes.schedule_same_bucket:ScheduleSameBucket",
    "schedule-dynamic-cp": "arachnec.passes.schedule_dynamic_cp:ScheduleDynamicCp",
    "schedule-flexsp": "arachnec.passes.schedule_flexsp:ScheduleFlexsp",
    "schedule-knapformer": "arachnec.passes.schedule_knapformer:ScheduleKnapformer",
    "schedule-genetic": "arachnec.passes.schedule_genetic:ScheduleGenetic",
    "schedule-pipeline": "arachnec.passes.schedule_pipeline:SchedulePipeline",
    "schedule-z3": "arachnec.passes.schedule_z3:ScheduleZ3",
    "schedule-sampling": "arachnec.passes.schedule_sampling:ScheduleSampling",
    "place": "arachnec.passes.place:Place",
    "bucket": "arachnec.passes.bucket:Bucket",
    "fuse": "arachnec.passes.fuse:Fuse",
    "lower": "arachnec.passes.lower:Lower",
    "recost": "arachnec.passes.recost:Recost",
    "check": "arachnec.passes.check:Check",
}
ENTRY_POINTS = "arachnec.passes"


@dataclass(frozen=True)
class NoPassFile(Diagnostic):
    title: ClassVar[str] = "there is no file {path}"
    help: ClassVar[str] = "--load takes a Python file that defines passes"
    path: str


@dataclass(frozen=True)
class PassFileFails(Diagnostic):
    title: ClassVar[str] = "{path} cannot be loaded: {reason}"
    help: ClassVar[str] = "run it with `python {path}` to see where"
    path: str
    reason: str


@dataclass(frozen=True)
class NoPassInFile(Diagnostic):
    title: ClassVar[str] = "{path} defines no pass"
    help: ClassVar[str] = (
        "a pass is a frozen dataclass derived from arachnec.passes.Pass, with `needs`, `gives` and `run`"
    )
    path: str


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
    return Registry(tuple(BUILTIN.items()))


def installed() -> Registry:
    """The built-in passes and those of installed packages (entry points ``name = "module:Class"``)."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return Registry(tuple((entry.name, entry.value) for entry in points) + builtin().entries)


def load_file(path: str | Path, registry: Registry) -> Registry:
    """``registry`` and every pass that the Python file ``path`` defines. Raises UserError."""
    path = Path(path)
    if not path.is_file():
        raise UserError(NoPassFile(None, path=str(path)))
    name = f"arachnec_loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(PassFileFails(None, path=str(path), reason="its name does not end in .py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(PassFileFails(None, path=str(path), reason=f"{type(error).__name__}: {error}")) from error
    kinds = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Pass) and kind.__module__ == name and not inspect.isabstract(kind)
    ]
    if not kinds:
        raise UserError(NoPassInFile(None, path=str(path)))
    return registry.with_passes(*kinds)
