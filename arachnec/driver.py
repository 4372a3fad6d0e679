"""From a model file, clips and a cluster to an executable: a list of steps, each a function anyone can call.

``compile`` is what ``arachnec compile`` does; ``trace`` stops after the front end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arachnec.data.manifest import Manifest, read_manifest
from arachnec.ir.nodes import Clip, Cluster, Level, Module
from arachnec.ir.values import Attributes
from arachnec.models.file import ModelFile, load_model_file
from arachnec.passes.cluster_file import parse_cluster
from arachnec.passes.instrument import Instrument
from arachnec.passes.pipeline import Pipeline

if TYPE_CHECKING:
    from arachnec.passes.trace import Trace


@dataclass(frozen=True)
class Compiled:
    """A compiled iteration and everything that led to it."""

    model_file: ModelFile
    manifest: Manifest
    traced: Module  # every clip of the manifest
    pipeline: Pipeline
    module: Module  # iteration 0, lowered and checked
    planning_ms: float
    tracing_ms: float

    @property
    def report(self) -> dict[str, Any]:
        """What ``--json`` prints: see ``arachnec.report``."""
        from arachnec.report import plan_report

        return plan_report(self.module, self.planning_ms)

    def write(self, folder: str | Path) -> Path:
        """Write the executable folder that ``arachnec run`` takes; returns it."""
        from arachnec.executable import write_executable

        return write_executable(self, Path(folder))


def trace(model: str | Path, data: str | Path, cluster: str | Path, *, batch: int | None = None) -> Module:
    """The module at level ``traced``: stages, block graphs, and every clip of the manifest.

    Raises ``UserError`` for a model that cannot be traced, a clip the model cannot take, or a malformed file.
    """
    model_file = load_model_file(Path(model))
    manifest = read_manifest(Path(data), batch=batch)
    return front_end(trace_file(model_file, manifest), manifest, parse_cluster(cluster))


def trace_file(model_file: ModelFile, manifest: Manifest) -> Trace:
    from arachnec.passes.trace import trace_model

    return trace_model(model_file, [clip for clips in manifest.iterations for clip in clips])


def front_end(traced: Trace, manifest: Manifest, cluster: Cluster) -> Module:
    """Every clip of the manifest as one module; a clip's id in the IR is its position in the manifest."""
    clips: list[Clip] = []
    for number, iteration in enumerate(manifest.iterations):
        for clip in iteration:
            clips.append(
                Clip(
                    id=len(clips),
                    frames=clip.frames,
                    height=clip.height,
                    width=clip.width,
                    text=clip.text_tokens,
                    tokens=traced.tokens(clip),
                    attrs=Attributes.of(name=str(clip.id), iteration=number),
                )
            )
    return Module(
        name="manifest",
        level=Level.TRACED,
        cluster=cluster,
        clips=tuple(clips),
        stages=traced.stages,
        graphs=traced.graphs,
    )


def iteration_of(traced: Module, number: int) -> Module:
    """The global batch of one iteration; the block graphs stay behind."""
    clips = tuple(clip for clip in traced.clips if clip.attrs.get("iteration", 0) == number)
    return replace(traced, name=f"iteration_{number}", clips=clips, graphs=())


def plan_iteration(
    traced: Module, pipeline: Pipeline, number: int, instruments: Sequence[Instrument] = ()
) -> tuple[Module, float]:
    """The checked program of one iteration, and the milliseconds its passes took."""
    started = time.perf_counter()
    module = pipeline.run(iteration_of(traced, number), instruments=instruments)
    return module, (time.perf_counter() - started) * 1e3


def compile(
    model: str | Path,
    data: str | Path,
    cluster: str | Path,
    *,
    passes: str | Pipeline = "default",
    batch: int | None = None,
    instruments: Sequence[Instrument] = (),
) -> Compiled:
    """What ``arachnec compile`` does, up to the executable folder (``Compiled.write``).

    ``cluster`` is a TOML file or a short form such as ``2x8:h100-80g``; ``passes`` a pipeline, its text, or the name of
    one. Raises ``UserError`` for every mistake in the input.
    """
    model_file = load_model_file(Path(model))
    manifest = read_manifest(Path(data), batch=batch)
    machine = parse_cluster(cluster)
    pipeline = passes if isinstance(passes, Pipeline) else Pipeline.parse(passes)
    started = time.perf_counter()
    traced = front_end(trace_file(model_file, manifest), manifest, machine)
    tracing_ms = (time.perf_counter() - started) * 1e3
    module, planning_ms = plan_iteration(traced, pipeline, 0, instruments)
    return Compiled(model_file, manifest, traced, pipeline, module, planning_ms, tracing_ms)
