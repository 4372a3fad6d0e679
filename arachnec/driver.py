"""From a model file, clips and a cluster to an executable: a list of steps, each a function anyone can call.

``compile`` is what ``arachnec compile`` does; ``trace`` stops after the front end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from arachnec.backends.simulator import Simulation, simulate
from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import has_gpus, machines, node_of
from arachnec.data.batch_source import BatchSource
from arachnec.data.manifest import Batch, Manifest, demand_plannable, read_manifest
from arachnec.data.parquet_clips import LongManifest, is_long, read_long_manifest
from arachnec.executable.batches import mixed_manifest, require_batch
from arachnec.executable.folder import REPORT, iteration_of, write_executable
from arachnec.executable.training_options import Training, bad_value
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cluster, Level, Module
from arachnec.models.caption_tokens import CaptionCounter
from arachnec.models.file import MODEL_FILE, ModelFile, demand_python_file, load_model_file
from arachnec.passes.infra.instruments import Instrument, ReportProgress
from arachnec.passes.infra.named_pipelines import ORIGINAL_CLIPS
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.report import clips_trained, plan_report, simulation_report
from arachnec.views.executable_page import PAGE, executable_page

if TYPE_CHECKING:
    from arachnec.passes.trace import Trace


@dataclass(frozen=True)
class Compiled:
    """A compiled iteration and everything that led to it."""

    model_file: ModelFile
    manifest: Manifest
    traced: Module  # every clip of the manifest
    model: Module  # the same after the passes of scope `model`
    pipeline: Pipeline
    module: Module  # iteration 0, lowered and checked
    planning_ms: float
    tracing_ms: float
    training: Training
    warnings: tuple[str, ...] = ()  # what sharing a clip among ranks costs apart from attention
    limits: tuple[str, ...] = ()  # notes of the videos; what it costs that one graph does not serve all clips
    validation: str = ""  # the clips of the validation manifest, as the executable has them
    long: LongManifest | None = None  # what a run draws from, where ``manifest`` is its first batch only
    untried: tuple[tuple[int, int, int, int], ...] = ()  # clip shapes that a run tries before their step
    notes: tuple[str, ...] = ()  # how the clips were read

    @property
    def report(self) -> dict[str, Any]:
        """What ``--json`` prints: see ``arachnec.report``."""
        return {**plan_report(self.module, self.planning_ms), "warnings": [*self.limits, *self.warnings]}

    def write(self, folder: str | Path, *, training: Training | None = None, load: Sequence[Path] = ()) -> Path:
        """Write the executable folder that ``arachnec run`` takes, with the plan as a page to be looked at; returns it.

        ``load`` are files that add passes; ``training`` options stand instead of those it was compiled with.
        """
        page = executable_page(self.module, pipeline=str(self.pipeline), clips=self.manifest.clips)
        return write_executable(
            Path(folder),
            program=self.module,
            traced=self.traced,
            model=self.model,
            pipeline=str(self.pipeline),
            model_file=self.model_file,
            clips=self.manifest.clips,
            training=training or self.training,
            load=load,
            validation=self.validation,
            long=self.long,
            untried=self.untried,
            extra={REPORT: json.dumps(self.report, indent=2) + "\n", PAGE: page},
        )


def trace(
    model: str | Path,
    data: str | Path,
    cluster: str | Path,
    *,
    batch: Batch = None,
    columns: str = "",
    reporter: Reporter = unreported,
) -> Module:
    """The module at level ``traced``: stages, block graphs, and every clip of the manifest.

    Raises ``UserError`` for a model that cannot be traced, a clip the model cannot take, or a malformed file.
    """
    demand_python_file(model, MODEL_FILE)
    machine = parse_cluster(cluster)
    manifest = require_batch(demand_plannable(read_manifest(Path(data), batch, columns)), batch, machine)
    model_file = load_model_file(Path(model))
    manifest = CaptionCounter(model_file).manifest(manifest)
    traced = trace_file(model_file, manifest, gpu=has_gpus(machine), reporter=reporter)
    return front_end(traced, manifest, machine)


def trace_file(
    model_file: ModelFile,
    manifest: Manifest,
    training: Training | None = None,
    *,
    gpu: bool = False,
    reporter: Reporter = unreported,
) -> Trace:
    """The model as the options train it: in their precision, with the state of their optimizer; its memory that of a
    processor's kernels, or of a ``gpu``'s.

    Of each clip shape one clip's file is held against what the manifest says, where the file is here. Raises
    ``UserError``.
    """
    from arachnec.backends.training_trace import training_trace

    clips = [clip for clips in manifest.iterations for clip in clips]
    return training_trace(model_file, clips, training or Training(), gpu=gpu, reporter=reporter)


def front_end(traced: Trace, manifest: Manifest, cluster: Cluster) -> Module:
    """Every clip of the manifest as one module; a clip's id in the IR is its position in the manifest."""
    from arachnec.passes.trace import traced_module

    return traced_module(traced, manifest.iterations, cluster)


def plan_model(traced: Module, pipeline: Pipeline, instruments: Sequence[Instrument] = ()) -> tuple[Module, float]:
    """The module after the passes of scope ``model``, and the milliseconds they took."""
    started = time.perf_counter()
    model = pipeline.run_model_part(traced, instruments)
    return model, (time.perf_counter() - started) * 1e3


def plan_iteration(
    model: Module, pipeline: Pipeline, number: int, instruments: Sequence[Instrument] = ()
) -> tuple[Module, float]:
    """The checked program of one iteration, and the milliseconds its passes took. ``model`` is from ``plan_model``."""
    started = time.perf_counter()
    module = pipeline.run_iteration_part(iteration_of(model, number), instruments)
    return module, (time.perf_counter() - started) * 1e3


def compile(
    model: str | Path,
    data: str | Path | None,
    cluster: str | Path,
    *,
    passes: str | Pipeline = "default",
    batch: Batch = None,
    training: Training | None = None,
    init: Path | None = None,
    instruments: Sequence[Instrument] = (),
    reporter: Reporter = unreported,
) -> Compiled:
    """What ``arachnec compile`` does, up to the executable folder (``Compiled.write``).

    ``cluster`` is a TOML file or a short form such as ``2x8:h100-80g``; ``passes`` a pipeline, its text, or the name of
    one; ``data`` is None where the training options have a ``mix``; the weights in ``init`` are held against the model;
    ``reporter`` is given what is being done. Raises ``UserError`` for every mistake in the input.
    """
    training = training or Training()
    demand_python_file(model, MODEL_FILE)
    machine = parse_cluster(cluster)
    listed = _listed(data, batch, training, machine)
    pipeline = passes if isinstance(passes, Pipeline) else Pipeline.parse(passes)
    pipeline.demand(Level.TRACED, Level.LOWERED)
    # what is above imports no torch: a path or a word that is wrong is told at once
    from arachnec.backends.staged_model import demand_own_parameters
    from arachnec.backends.training_trace import demand_optimizer_fits, validation_manifest, validation_of
    from arachnec.models.initial_weights import demand_fit
    from arachnec.optimizers.recipe import demand_torch_takes
    from arachnec.sampling.during_training import sampler_and_requests

    model_file = load_model_file(Path(model))
    captions = CaptionCounter(model_file, training.long_captions == "refuse")
    manifest, shapes, long = _planned(listed, data, batch, training, captions)
    if init is not None:
        demand_fit(init, Path(model))
    demand_torch_takes(training)
    sampler_and_requests(training.sampling)  # mistakes in them are told now, not on the ranks
    held_back = validation_manifest(manifest.clips, training)
    held_back = held_back and captions.manifest(held_back)
    started = time.perf_counter()
    trace = trace_file(model_file, shapes, training, gpu=has_gpus(machine), reporter=reporter)
    if long is not None:
        tokens = [(*clip.shape, trace.tokens(clip)) for clip in shapes.iterations[-1]]
        long = msgspec.structs.replace(long, shapes=tuple(tokens))
    traced = front_end(trace, manifest, machine)
    validation = validation_of(trace, held_back)
    tracing_ms = (time.perf_counter() - started) * 1e3
    instruments = (*instruments, ReportProgress(reporter))
    model_module, model_ms = plan_model(traced, pipeline, instruments)
    demand_optimizer_fits(trace, model_module, model_file, training)
    demand_own_parameters(model_module, model_file, training, shapes.clips)
    module, iteration_ms = plan_iteration(model_module, pipeline, 0, instruments)
    return Compiled(
        model_file=model_file,
        manifest=manifest,
        traced=traced,
        model=model_module,
        pipeline=pipeline,
        module=module,
        planning_ms=model_ms + iteration_ms,
        tracing_ms=tracing_ms,
        training=training,
        warnings=trace.warnings,
        limits=(*trace.limits, *trace.unknowns),
        validation=validation,
        long=long,
        untried=trace.untried,
        notes=(*manifest.notes, *captions.notes),
    )


def _planned(
    listed: Manifest | None, data: str | Path | None, batch: Batch, training: Training, captions: CaptionCounter
) -> tuple[Manifest, Manifest, LongManifest | None]:
    """The clips that are planned, those that the model is tried with, and the manifest where it is too long to list:
    then its first batch, and that and a clip of every shape."""
    if listed is not None:
        listed = captions.manifest(listed)
        return listed, listed, None
    assert data is not None, "only a file is too long to list"
    long, of_shapes = read_long_manifest(Path(data), batch, training.columns, captions)
    first = BatchSource(long.drawn(None, stratified=False), long.batch, captions=captions.clip).draw()
    assert first is not None, "a long manifest has clips"
    planned = demand_plannable(Manifest((first,), Path(data)))
    return planned, Manifest((first, tuple(of_shapes)), Path(data)), long


def _prefixed(reporter: Reporter, what: str) -> Reporter:
    """What is reported, after what it is of."""
    return lambda doing: reporter(f"{what}: {doing}")


def _listed(data: str | Path | None, batch: Batch, training: Training, machine: Cluster) -> Manifest | None:
    """The clips; None where the manifest is too long to list."""
    if not training.mix.manifests:
        if data is None:
            raise user_error(
                "nothing says which clips to train on",
                help="give --data with a manifest, or several as `mix` of the training options",
            )
        if is_long(Path(data)):
            return None
        return demand_plannable(require_batch(read_manifest(Path(data), batch, training.columns), batch, machine))
    if data is not None or batch is not None:
        raise UserError(
            bad_value("mix", training.mix.paths, "clips are given twice", "leave out --data and --batch, or `mix`")
        )
    return demand_plannable(mixed_manifest(training))


@dataclass(frozen=True)
class Compared:
    """The program that one pipeline makes of an iteration, and what the simulator says of it."""

    name: str
    module: Module
    simulation: Simulation
    planning_ms: float

    @property
    def report(self) -> dict[str, Any]:
        """One row of ``compare --json``; ``original_clips`` says what the original of a baseline leaves out."""
        trained = clips_trained(self.module)
        return {
            "pipeline": self.name,
            **simulation_report(self.module, self.simulation, self.planning_ms),
            "memory_limit_gib": self._memory_limit(),
            "clips_dropped": sum(1 for clip in self.module.clips if not trained[clip.id]),
            "clips_repeated": sum(count - 1 for count in trained.values()),
            "original_clips": ORIGINAL_CLIPS.get(self.name),
        }

    def _memory_limit(self) -> float:
        """GiB of the device that holds most, where nodes differ."""
        cluster = self.module.cluster
        assert cluster is not None
        peaks = zip(self.simulation.peak_memory_gib, (program.rank for program in self.module.programs), strict=True)
        _, fullest = max(peaks, default=(0.0, 0))
        return machines(cluster)[node_of(cluster, fullest)].memory


def compare(
    model: str | Path,
    data: str | Path,
    cluster: str | Path,
    pipelines: Mapping[str, Pipeline],
    *,
    batch: Batch = None,
    columns: str = "",
    instruments: Sequence[Instrument] = (),
    reporter: Reporter = unreported,
) -> tuple[list[Compared], list[dict[str, str]]]:
    """What every pipeline makes of iteration 0, simulated, and why some pipelines cannot train it.

    Raises ``UserError`` where no pipeline can.
    """
    for pipeline in pipelines.values():
        pipeline.demand(Level.TRACED, Level.LOWERED)
    traced = trace(model, data, cluster, batch=batch, columns=columns, reporter=reporter)
    return compared(traced, pipelines, instruments, reporter)


def compare_requests(
    sampler: str | Path,
    data: str | Path,
    cluster: str | Path,
    pipelines: Mapping[str, Pipeline],
    *,
    switch: str | None = None,
    instruments: Sequence[Instrument] = (),
    reporter: Reporter = unreported,
) -> tuple[list[Compared], list[dict[str, str]]]:
    """What every pipeline makes of the requests of a sampler file, simulated, and why some cannot.

    ``switch`` is the rule by which the second model takes over, by default the file's. Raises ``UserError`` where no
    pipeline can.
    """
    from arachnec.data.requests import read_requests

    requests, machine = read_requests(data), parse_cluster(cluster)
    for pipeline in pipelines.values():
        pipeline.demand(Level.TRACED, Level.LOWERED)
    from arachnec.generation.plan import asked
    from arachnec.generation.plan import traced as trace_requests

    sampling, _ = asked(Path(sampler), switch, None, "carry")
    traced = trace_requests(sampling, requests, reporter=reporter).module(machine)
    return compared(traced, pipelines, instruments, reporter)


def compared(
    traced: Module,
    pipelines: Mapping[str, Pipeline],
    instruments: Sequence[Instrument] = (),
    reporter: Reporter = unreported,
) -> tuple[list[Compared], list[dict[str, str]]]:
    """What every pipeline makes of iteration 0 of a traced module, simulated, and why some cannot.

    Raises ``UserError`` where none can.
    """
    rows: list[Compared] = []
    refused: list[tuple[str, UserError]] = []
    for number, (name, pipeline) in enumerate(pipelines.items(), 1):
        what = f"pipeline {number} of {len(pipelines)}, {name}"
        watching = (*instruments, ReportProgress(_prefixed(reporter, what)))
        try:
            model_module, model_ms = plan_model(traced, pipeline, watching)
            module, iteration_ms = plan_iteration(model_module, pipeline, 0, watching)
        except UserError as error:
            refused.append((name, error))
            continue
        rows.append(Compared(name, module, simulate(module), model_ms + iteration_ms))
    if not rows:
        raise refused[0][1]
    return rows, [{"pipeline": name, "reason": str(error)} for name, error in refused]
