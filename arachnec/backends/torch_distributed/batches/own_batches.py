"""From somebody's model and batches to an executable on every rank.

Rank 0 goes to where the run is resumed, looks at the next batch, traces the model for it, and compiles it. The other
ranks are told the files of the executable; no folder need be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachnec.backends.training_trace import demand_optimizer_fits, training_trace, validation_manifest, validation_of
from arachnec.checkpoint.folder import Position
from arachnec.cluster.topology import has_gpus
from arachnec.data.batch_source import BatchSource
from arachnec.executable.batches import Mark
from arachnec.executable.folder import Executable, iteration_of, read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, counted, render, user_error
from arachnec.ir.nodes import Cluster, Level
from arachnec.models.caption_tokens import CaptionCounter
from arachnec.models.file import ModelFile
from arachnec.models.given_module import source_of
from arachnec.optimizers.recipe import demand_torch_takes
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.trace import traced_module
from arachnec.runtime.agreement import share_text
from arachnec.runtime.told_batches import NOWHERE, ToldBatches, mark_of


class _Told(msgspec.Struct, frozen=True):
    """The executable's files by name, and where the source stands; or what is wrong."""

    files: dict[str, str] = {}
    mark: Mark = NOWHERE
    error: str | None = None


@dataclass(frozen=True)
class Compiling:
    """What an executable is made of on rank 0."""

    model_file: ModelFile
    cluster: Cluster
    passes: str
    training: Training


def own_executable(
    folder: Path, compiling: Compiling, source: BatchSource | None, resumed: Position | None
) -> tuple[Executable, ToldBatches]:
    """The executable in ``folder`` of every rank, and the batches to run it on. Collective; rank 0 has the ``source``.

    Raises ``UserError``, the same on every rank, for a model or a batch that cannot be planned.
    """
    if source is None:
        told = msgspec.json.decode(share_text(None), type=_Told)
        if told.error is not None:
            raise user_error(told.error)
        for name, text in told.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return read_executable(folder), ToldBatches(told.mark)
    try:
        start, batches = _compiled(folder, compiling, source, resumed)
    except UserError as error:
        message = "\n".join(render(d) for d in error.diagnostics).removeprefix("error: ")
        share_text(msgspec.json.encode(_Told(error=message)).decode())
        raise
    files = {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in folder.rglob("*") if p.is_file()}
    share_text(msgspec.json.encode(_Told(files, start)).decode())
    return read_executable(folder), batches


def _compiled(
    folder: Path, compiling: Compiling, source: BatchSource, resumed: Position | None
) -> tuple[Mark, ToldBatches]:
    model_file, training = compiling.model_file, compiling.training
    demand_torch_takes(training)
    captions = CaptionCounter(model_file, training.long_captions == "refuse")
    source.captions = captions.clip
    if resumed is not None:
        source.restore(resumed.steps * training.accumulate, resumed.clips, resumed.data, resumed.source)
    start = mark_of(source)
    clips = source.peek()
    if clips is None:
        raise user_error(
            f"the batches ended after {counted(-(-source.batches // training.accumulate), 'step')}, where the "
            "checkpoint goes on",
            help="what was to be trained is trained; to go on, give a dataset with more batches, or steps=N",
        )
    pipeline = Pipeline.parse(compiling.passes)
    pipeline.demand(Level.TRACED, Level.LOWERED)
    held_back = validation_manifest(clips, training)
    held_back = held_back and captions.manifest(held_back)
    trace = training_trace(model_file, clips, training, gpu=has_gpus(compiling.cluster))
    trace.counter.try_all(clips)  # later batches are counted, and so tried, while steps run
    traced = traced_module(trace, [clips], compiling.cluster)
    model = pipeline.run_model_part(traced)
    demand_optimizer_fits(trace, model, model_file, training)
    program = pipeline.run_iteration_part(iteration_of(model, 0))
    write_executable(
        folder,
        program=program,
        traced=traced,
        pipeline=str(pipeline),
        model_file=model_file,
        clips=clips,
        model=model,
        training=training,
        source=None if model_file.module is None else source_of(model_file),
        validation=validation_of(trace, held_back),
    )
    return start, ToldBatches(start, source, trace.tokens)
