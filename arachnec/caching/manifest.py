"""A manifest encoded beforehand: what is missing is planned and run, then clips are listed with their files.

docs/cache.md says how it is used.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from arachnec.caching.files import DIVIDED, Divided, EncodedFiles, identity_of, read_rows, together
from arachnec.caching.options import CacheOptions
from arachnec.caching.rank import SET_ASIDE, SetAside
from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_beforehand
from arachnec.data.manifest import Manifest
from arachnec.executable.folder import demand_folder, iteration_of, row_of, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Cluster
from arachnec.launch.local_ranks import crash_told, launch
from arachnec.launch.phases import Timeouts
from arachnec.models.file import ModelFile, load_model_file
from arachnec.models.initial_weights import encoder_folder
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.trace import trace_encoders, traced_module
from arachnec.tracing.sample import meta_encoders
from arachnec.tracing.sample_reads import require_one_caption

PIPELINE = "divide-encoders,partition{policy=encode},annotate,schedule-z3,place,lower,check"
PLAN, CLIPS = "plan", "clips.jsonl"  # names in the output folder
WORKER = "arachnec.caching.plan_worker"
CLIPS_OF_A_RANK = 16  # in a batch


def nothing_to_encode_error(path: str, reason: str, remedy: str) -> UserError:
    return user_error(f"{path} has nothing to encode with: {reason}", help=remedy)


@dataclass(frozen=True)
class Cached:
    """What ``arachnec cache`` did: clips that were encoded now, that were there before, and that were set aside;
    and which encoders ranks ran together for it."""

    manifest: Path
    encoded: int
    before: int
    set_aside: Mapping[str | int, str]
    divided: tuple[Divided, ...]
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        aside = [{"clip": clip, "reason": reason} for clip, reason in self.set_aside.items()]
        divided = msgspec.to_builtins(self.divided)
        counts = {"encoded": self.encoded, "before": self.before, "set_aside": aside, "divided": divided}
        return {"manifest": str(self.manifest), **counts, "seconds": round(self.seconds, 3)}

    @property
    def warnings(self) -> list[str]:
        """Of every clip that is left out."""
        return [f"clip {clip} is set aside: {reason}" for clip, reason in self.set_aside.items()]

    def lines(self, encoding: Encoding) -> list[str]:
        """The report for people, but for the warnings."""
        names, now = ", ".join(encoding.names), counted(self.encoded, "clip")
        done = f"encoded {now} with {names} in {self.seconds:.1f} s; {self.before} were there before"
        return [*(row.text() for row in self.divided), done, f"wrote {self.manifest}"]


@dataclass(frozen=True)
class Encoding:
    """What is encoded with what: the encoders ``names`` of a model file, with the weights in ``init``, on a cluster."""

    model_file: ModelFile
    names: tuple[str, ...]
    cluster: Cluster
    init: Path | None = None
    seed: int = 0

    @classmethod
    def of(cls, options: CacheOptions, clips: Sequence[VideoClip], cluster: Cluster) -> Encoding:
        """Raises ``UserError`` for encoders that the model file does not have."""
        model_file = load_model_file(options.model)
        wanted = [name.strip() for name in options.encoders.split(",") if name.strip()]
        names = encoders_named(model_file, wanted, clips)
        require_one_caption(clips, {name: e for name, e in meta_encoders(model_file).items() if name in names})
        return cls(model_file, names, cluster, options.init, options.seed)

    @property
    def notes(self) -> list[str]:
        """What a person should know before encoders run whose weights are not read from anywhere."""
        drawn = [name for name in self.names if self.init is None or not encoder_folder(self.init, name).is_dir()]
        origin = f"the weights of {', '.join(drawn)} are those that encoders() makes, not read by --init"
        return [f"note: {origin}"] if drawn else []


Run = Callable[[Encoding, EncodedFiles, Path], None]


def encoders_named(model_file: ModelFile, wanted: Sequence[str], clips: Sequence[VideoClip]) -> tuple[str, ...]:
    """The encoders to run: those ``wanted``, else all that have not run beforehand. Raises ``UserError`` for none."""
    known = list(meta_encoders(model_file))
    path, before = str(model_file.path), encoded_beforehand(clips)
    if not known:
        raise nothing_to_encode_error(path, "it has no encoders()", "docs/your_model.md says how they look")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        reason = f"there is no encoder `{unknown[0]}`"
        raise nothing_to_encode_error(path, reason, f"its encoders are {', '.join(known)}")
    names = tuple(name for name in known if name not in before and (not wanted or name in wanted))
    if not names:
        remedy = "train with this manifest as it is"
        raise nothing_to_encode_error(path, "the clips have all of it encoded beforehand", remedy)
    return names


def cache(encoding: Encoding, manifest: Manifest, output: Path, *, batch: int | None, run: Run) -> Cached:
    """Encode what is missing in ``output``, and write the manifest of all clips. ``run`` has ranks carry out a plan.

    Raises ``UserError`` for what cannot be planned, and where no clip could be encoded.
    """
    started = time.perf_counter()
    demand_folder(output)
    identity = identity_of(encoding.model_file, encoding.names, encoding.seed, encoding.init)
    files = EncodedFiles(output, identity, encoding.names)
    files.sweep()
    clips = manifest.clips
    missing = files.missing(clips)
    aside: dict[tuple[Path, ...], str] = {}
    divided: list[Divided] = []
    if missing:
        plan = encoding_plan(encoding, missing, output / PLAN, batch or CLIPS_OF_A_RANK * encoding.cluster.world)
        run(encoding, files, plan)
        aside = {
            tuple(files.of(missing[row.clip]).values()): row.reason for row in read_rows(plan / SET_ASIDE, SetAside)
        }
        divided = together(read_rows(plan / DIVIDED, Divided))
        shutil.rmtree(plan)
    told = {clip.id: aside[key] for clip in clips if (key := tuple(files.of(clip).values())) in aside}
    if len(told) == len(clips):
        clip, reason = next(iter(told.items()))
        raise user_error(
            f"none of the clips could be encoded: clip {clip}: {reason}",
            help="check the paths of the manifest, and that this host can read them",
        )
    written = _listed(manifest, files, told, output / CLIPS, _left(encoding))
    new = {tuple(files.of(clip).values()) for clip in missing}
    encoded = sum(tuple(files.of(clip).values()) in new for clip in clips) - len(told)
    before, seconds = len(clips) - encoded - len(told), time.perf_counter() - started
    return Cached(written, encoded, before, told, tuple(divided), seconds)


def _left(encoding: Encoding) -> bool:
    """Whether some encoder is left to run in training, which may read the video."""
    return len(encoding.names) < len(meta_encoders(encoding.model_file))


def encoding_plan(encoding: Encoding, clips: Sequence[VideoClip], folder: Path, batch: int) -> Path:
    """An executable of encoders alone; its first batch is planned."""
    shutil.rmtree(folder, ignore_errors=True)
    trace = trace_encoders(encoding.model_file, clips)
    iterations = [clips[first : first + batch] for first in range(0, len(clips), batch)]
    traced = traced_module(trace, iterations, encoding.cluster)
    stages = tuple(stage for stage in traced.stages if stage.name in encoding.names)
    traced = replace(traced, stages=stages, graphs=())
    pipeline = Pipeline.parse(PIPELINE)
    model = pipeline.run_model_part(traced)
    program = pipeline.run_iteration_part(iteration_of(model, 0))
    return write_executable(
        folder,
        program=program,
        traced=traced,
        model=model,
        pipeline=str(pipeline),
        model_file=encoding.model_file,
        clips=clips,
        training=Training(seed=encoding.seed),
    )


def on_this_machine(tell: Callable[[bytes], None], timeouts: Timeouts) -> Run:
    """All ranks are started here; ``tell`` gets each line that rank 0 reports."""

    def run(encoding: Encoding, files: EncodedFiles, plan: Path) -> None:
        init = [] if encoding.init is None else ["--init", str(encoding.init)]
        limits = msgspec.json.encode(timeouts).decode()
        arguments = [str(plan), str(files.folder), "--identity", files.identity, "--timeouts", limits, *init]
        with crash_told():
            launch(encoding.cluster.world, arguments, tell, worker=WORKER)

    return run


def _listed(manifest: Manifest, files: EncodedFiles, aside: Mapping[str | int, str], path: Path, videos: bool) -> Path:
    """Write the manifest: clips in their order and global batches, without those set aside."""
    several = len(manifest.iterations) > 1
    draft = path.with_suffix(".part")
    with draft.open("w", encoding="utf-8") as file:
        for number, clips in enumerate(manifest.iterations):
            for clip in clips:
                if clip.id not in aside:
                    row = _row(clip, files, videos) | ({"iteration": number} if several else {})
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    draft.replace(path)
    return path


def _row(clip: VideoClip, files: EncodedFiles, videos: bool) -> dict[str, Any]:
    sizes = {"frames": clip.frames, "height": clip.height, "width": clip.width, "text_tokens": clip.text_tokens}
    given = row_of(clip)
    row = {"id": clip.id, **sizes, "caption": list(clip.captions) or clip.caption, "fps": clip.fps}
    row |= {name: values for name in ("values", "files") if (values := getattr(given, name))}
    if videos and clip.path is not None:
        row |= {"path": str(clip.path.absolute()), "start": clip.start, "stride": clip.stride}
        row |= {"target_fps": clip.target_fps}
    before = {name: str(path.absolute()) for name, path in clip.cached.items()}
    now = {name: str(place.relative_to(files.folder)) for name, place in files.of(clip).items()}
    return {key: value for key, value in row.items() if value is not None} | {"encoded": before | now}
