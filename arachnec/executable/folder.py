"""The executable: the folder that ``arachnec compile`` writes and ``arachnec run`` reads.

=================== ========================================================================================
program.cascade     the lowered module of iteration 0; may be edited by hand, since every run checks it again
traced.cascade      cluster, stages, graphs and every clip of the manifest with its iteration: what later steps are
                    planned from, with the passes of scope `model` first
model.cascade       cluster, stages and graphs after those passes; every program is held to them, fused regions are run
executable.json     pipeline, training options, fingerprint, versions
model.py            the model file as it was, and beside it the modules of its folder that it imports: the only code
clips.jsonl         the clips, by their ids in the IR
validation.jsonl    those of the validation manifest and their tokens, where there is one
profile.json        the measured costs the plan was made with, where there are some
timeline.html       the plan to be looked at: see docs/show_and_explain.md
=================== ========================================================================================

Nothing in it is a pickle. Every file is checked against a schema and a size limit when it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from arachnec.data.clip import VideoClip
from arachnec.data.parquet_clips import LongManifest
from arachnec.executable.part_files import demand_readable, json_part, not_executable_error, read_part, text_of
from arachnec.executable.training_options import Training, verified
from arachnec.ir.diagnostic import Diagnostic, UserError, counted, user_error
from arachnec.ir.limits import MOST_CLIPS, MOST_MODEL_FILES, MOST_PASS_FILES
from arachnec.ir.nodes import Clip, Graph, Level, Module, integer
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import check_module
from arachnec.models.file import ModelFile, load_model_file
from arachnec.version import __version__

FORMAT = 1
PROGRAM, TRACED, MODEL_IR, HEADER = "program.cascade", "traced.cascade", "model.cascade", "executable.json"
MODEL, CLIPS = "model.py", "clips.jsonl"
VALIDATION = "validation.jsonl"  # where there is a validation manifest; fingerprinted, too
REPORT = "report.json"  # for people; nothing is proved by it
FINGERPRINTED = (MODEL, CLIPS, TRACED, MODEL_IR)  # the program may be edited: it is proved again
MEASURED, MEASURED_PROGRAM = "measured.json", "measured.cascade"  # of the last step of the last run, and its program
OF_RUNS = (MEASURED, MEASURED_PROGRAM, "measured.svg")
# An option that names a file: costs, orders of a pipeline, layers in DAPPLE's format, densities; and its name here.
FILES = {
    "profile": ("profile", ".json"),
    "orders": ("orders", ".csv"),
    "layers": ("layers", ".txt"),
    "file": ("sparsity", ".json"),
}
# Other passes may have a `file` that they write.
_QUOTED = r'"(?:\\.|[^"\\])*"'
_OF_SPARSIFY = rf'(?P<before>\bsparsify\s*\{{(?:{_QUOTED}|[^"{{}}])*?)'
FILE_OPTION = re.compile(
    rf"(?:{_OF_SPARSIFY}\b(?P<file>file)|\b(?P<option>profile|orders|layers))\s*=\s*(?P<value>{_QUOTED}|[^,{{}}]+)"
)
LIBRARIES = ("torch", "diffusers", "transformers")


@dataclass(frozen=True)
class Changed(Diagnostic):
    title = "{file} in {folder} is not the one this executable was compiled with"
    help = "compile again: the plan was proved for the file as it was"
    folder: str
    file: str


class _Planning(msgspec.Struct, frozen=True):
    planning_ms: Annotated[float, msgspec.Meta(ge=0)]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``executable.json``."""

    format: int
    pipeline: str
    iterations: Annotated[int, msgspec.Meta(ge=1)]
    training: Training
    fingerprint: dict[str, str]
    versions: dict[str, str]
    load: tuple[str, ...] = ()  # files in this folder that add passes
    modules: tuple[str, ...] = ()  # files in this folder that the model file imports
    origin: str | None = None  # the model file that this folder's is a copy of
    long: LongManifest | None = None  # what is drawn from it; the clips here are then those of its first batch
    untried: tuple[tuple[int, int, int, int], ...] = ()  # clip shapes that the model was not yet run at


class ClipRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of ``clips.jsonl``; its number is the clip's id in the IR."""

    id: str | int
    frames: int
    height: int
    width: int
    text_tokens: int
    caption: str | None = None
    path: str | None = None
    start: int = 0
    encoded: dict[str, str] = {}
    title: str = ""
    captions: tuple[str, ...] = ()
    values: dict[str, Any] = {}
    files: dict[str, str | tuple[str, ...]] = {}  # of the values those that are paths
    fps: float | None = None
    target_fps: float | None = None
    stride: int = 1


@dataclass(frozen=True)
class Executable:
    """An executable folder as it was read."""

    folder: Path
    header: Header
    program: Module  # iteration 0, lowered; not checked yet
    traced: Module
    model: Module  # cluster, stages and graphs after the passes of scope `model`, without clips
    clips: tuple[VideoClip, ...]  # by id in the IR
    digests: dict[str, str]  # of every part, as it is now; all ranks must agree on all of them
    validation: str = ""  # the text of validation.jsonl

    @property
    def training(self) -> Training:
        return self.header.training

    def fused_graphs(self) -> tuple[Graph, ...]:
        """The block graphs, where the pipeline fused them; none else."""
        return self.model.graphs if any(graph.fused for graph in self.model.graphs) else ()

    def changed_since(self) -> list[str]:
        """The user's files, the model file and what it imports from its folder, that this folder's copies are no longer
        equal to. One that is gone has not changed."""
        if self.header.origin is None:
            return []
        origin = Path(self.header.origin)
        now = {MODEL: origin} | {name: origin.parent / name for name in self.header.modules}
        return [str(p) for name, p in now.items() if p.is_file() and digest_of(p.read_bytes()) != self.digests[name]]

    def model_file(self) -> ModelFile:
        """Import ``model.py``. This runs its code."""
        return load_model_file(self.folder / MODEL, origin=self.header.origin, modules=self.header.modules)


def write_executable(
    folder: Path,
    *,
    program: Module,
    traced: Module,
    pipeline: str,
    model_file: ModelFile,
    clips: Sequence[VideoClip],
    model: Module | None = None,
    training: Training | None = None,
    load: Sequence[Path] = (),
    extra: Mapping[str, str] | None = None,
    source: str | None = None,
    validation: str = "",
    long: LongManifest | None = None,
    untried: Sequence[tuple[int, int, int, int]] = (),
) -> Path:
    """Write the folder; returns it.

    ``clips`` in the order of their ids in the IR; ``model`` as the passes of scope ``model`` left the traced module,
    where there are any. ``extra`` are more files by name, such as the report; ``source`` stands for the model file's
    text where the model is none of a file; ``validation`` is the text of validation.jsonl. A run draws from a ``long``
    manifest, where there is one, and tries the clip shapes that are ``untried``. Raises ``UserError`` for training
    options out of range, ValueError for modules of the wrong level.
    """
    if program.level is not Level.LOWERED or traced.level is not Level.TRACED:
        raise ValueError("an executable needs a lowered program and a traced module")
    training = verified(training or Training())
    pipeline, profiles = own_profiles(pipeline)
    texts = {
        PROGRAM: print_module(program),
        TRACED: print_module(traced),
        MODEL_IR: print_module(replace(model or traced, name="model", clips=())),
        MODEL: model_file.path.read_text(encoding="utf-8") if source is None else source,
        CLIPS: "".join(msgspec.json.encode(row_of(clip)).decode() + "\n" for clip in clips),
    }
    if validation:
        texts[VALIDATION] = validation
    texts |= profiles | {path.name: path.read_text(encoding="utf-8") for path in load}
    texts |= modules_of(model_file.path, model_file.modules, taken=set(texts))
    named = (*FINGERPRINTED, VALIDATION, *model_file.modules)
    header = Header(
        format=FORMAT,
        pipeline=pipeline,
        iterations=max(1, len(batch_sizes(traced)) if long is None else -(-long.clips // long.batch)),
        training=training,
        fingerprint={name: digest_of(texts[name].encode()) for name in texts if name in named},
        versions=versions(),
        load=tuple(path.name for path in load),
        modules=model_file.modules,
        origin=str(model_file.path),
        long=long,
        untried=tuple(untried),
    )
    texts[HEADER] = msgspec.json.format(msgspec.json.encode(header)).decode() + "\n"
    write_parts(folder, {**texts, **(extra or {})})
    return folder


def modules_of(path: Path, modules: Sequence[str], taken: Set[str]) -> dict[str, str]:
    """The texts of what a model or sampler file imports from its folder. Raises ``UserError`` for a name that is
    taken."""
    for name in modules:
        if name in taken:
            raise user_error(
                f"the model file imports `{name}` from its folder, and the executable has a file of that name",
                help="give that module another name",
            )
    return {name: (path.parent / name).read_text(encoding="utf-8") for name in modules}


def planning_ms(folder: Path) -> float | None:
    """What planning took when the executable was compiled; None where no report says so."""
    try:
        return msgspec.json.decode(read_part(folder, REPORT), type=_Planning).planning_ms
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, UserError, OSError):
        return None


def demand_folder(folder: Path) -> None:
    """Raises OSError for a folder that is not there and cannot be made, or not be written to; leaves nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def write_parts(folder: Path, texts: Mapping[str, str]) -> None:
    """All of the files or none: what was there stays until the new ones are complete. Raises ``UserError`` for one that
    is too large to be read."""
    demand_readable(folder, texts)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as draft:
        for name, text in texts.items():
            (Path(draft) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(draft) / name).write_text(text, encoding="utf-8")
        for stale in OF_RUNS:  # of a program that is no longer this folder's
            (folder / stale).unlink(missing_ok=True)
        for name in sorted(texts, key=lambda name: name == HEADER):  # without a header it is no executable
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(draft) / name).replace(folder / name)


def own_profiles(pipeline: str) -> tuple[str, dict[str, str]]:
    """The pipeline's text with every file it names under a name in the folder, and those files' texts."""
    texts: dict[str, str] = {}

    def renamed(option: re.Match[str]) -> str:
        path = Path(unquoted(option["value"]))
        if not path.is_file():
            return option[0]  # the name of device specs
        key = option["file"] or option["option"]
        stem, suffix = FILES[key]
        own = {name: text for name, text in texts.items() if name.startswith(stem)}
        text = path.read_text(encoding="utf-8")
        earlier = next((name for name, other in own.items() if other == text), None)
        name = earlier or (f"{stem}_{len(own)}{suffix}" if own else f"{stem}{suffix}")
        texts[name] = text
        return f"{option['before'] or ''}{key}={name}"

    return FILE_OPTION.sub(renamed, pipeline), texts


def read_executable(folder: Path) -> Executable:
    """Read the folder; the program is parsed, but neither verified nor checked.

    Raises ``UserError`` for a missing, oversized, malformed or altered part.
    """
    if not (folder / HEADER).is_file():
        reason = f"it has no {HEADER}" if folder.is_dir() else "there is no such folder"
        raise not_executable_error(str(folder), reason)
    header = read_header(folder)
    more = [VALIDATION] if VALIDATION in header.fingerprint else []
    raw = {name: read_part(folder, name) for name in (PROGRAM, *FINGERPRINTED, *more, *header.load, *header.modules)}
    digests = {name: digest_of(data) for name, data in raw.items()}
    for name in (*FINGERPRINTED, *header.modules):
        if name not in header.fingerprint:
            raise not_executable_error(str(folder), f"its fingerprint leaves out {name}")
    for name, digest in header.fingerprint.items():
        if digests.get(name) != digest:
            raise UserError(Changed(None, str(folder), name))
    program, traced, model = (
        parse_module(text_of(folder, name, raw[name]), str(folder / name)) for name in (PROGRAM, TRACED, MODEL_IR)
    )
    check_module(model)
    _demand_traced_graphs(folder, model, traced)
    return Executable(
        folder=folder,
        header=header,
        program=program,
        traced=traced,
        model=model,
        clips=_matching(folder, _clips(folder, raw[CLIPS]), traced),
        validation=text_of(folder, VALIDATION, raw[VALIDATION]) if more else "",
        digests=digests | {"versions": digest_of(repr(sorted(versions().items())).encode())},
    )


def _demand_traced_graphs(folder: Path, model: Module, traced: Module) -> None:
    """Passes mark what is fused of the graphs that were traced, and change nothing else of them."""
    if not model.graphs and not traced.graphs:
        return
    check_module(traced)
    of_model, of_trace = ({graph.name: _as_traced(graph) for graph in module.graphs} for module in (model, traced))
    if of_model != of_trace:
        name = min(n for n in of_model.keys() | of_trace.keys() if of_model.get(n) != of_trace.get(n))
        raise not_executable_error(str(folder), f"{MODEL_IR} has another graph `{name}` than {TRACED}")


def _as_traced(graph: Graph) -> Graph:
    return replace(graph, fused=(), attrs=graph.attrs.updated(alone=None))


def iteration_of(model: Module, number: int) -> Module:
    """One global batch of a traced module, without its graphs."""
    clips = tuple(clip for clip in model.clips if _iteration_of(clip) == number)
    return replace(model, name=f"iteration_{number}", clips=clips, graphs=())


def batch_sizes(model: Module) -> list[int]:
    """Clips of every global batch of a traced module."""
    counts = Counter(_iteration_of(clip) for clip in model.clips)
    return [counts[number] for number in sorted(counts)]


def data_digest(model: Module, clips: Sequence[VideoClip]) -> str:
    """SHA-256 of the clips, by their own ids, and of the global batches they are in."""
    rows = [(clips[clip.id].id, *clips[clip.id].shape, _iteration_of(clip)) for clip in model.clips]
    return digest_of(json.dumps(sorted(rows, key=str)).encode())


def _iteration_of(clip: Clip) -> int:
    return integer(clip.attrs.get("iteration", 0))


def versions() -> dict[str, str]:
    """What the ranks must agree on besides the files."""
    versions = {"arachnec": __version__, "python": platform.python_version()}
    return versions | {name: version for name in LIBRARIES if (version := _version_of(name)) is not None}


@cache
def _version_of(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def samples(folder: Path) -> bool:
    """Whether a folder is an executable that samples, and not one that trains."""

    class Kind(msgspec.Struct):
        settings: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    if not (folder / HEADER).is_file():
        return False
    try:
        return msgspec.json.decode(read_part(folder, HEADER), type=Kind).settings is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # whoever reads it says what is wrong


def read_header(folder: Path) -> Header:
    """``executable.json`` of an executable that trains. Raises ``UserError`` where it is missing or malformed."""
    data = read_part(folder, HEADER)
    if samples(folder):
        raise user_error(
            f"{folder} is an executable that samples, and trains nothing",
            help="give one that was compiled from a model file; `arachnec run` samples with this one",
        )
    header = json_part(folder, HEADER, data, Header)
    if header.format != FORMAT:
        raise not_executable_error(str(folder), f"its format is {header.format}, this arachnec reads {FORMAT}")
    demand_inside(folder, MODEL, header.pipeline, header.load, header.modules)
    verified(header.training)
    return header


def demand_inside(folder: Path, main: str, pipeline: str, load: Sequence[str], modules: Sequence[str]) -> None:
    """Raises ``UserError`` for a header that names a file outside of its folder; ``main`` is that of the user's
    functions."""
    if any(Path(name).name != name for name in load):
        raise not_executable_error(str(folder), "it loads passes from outside of its folder")
    if any(not _is_inside(name, main) for name in modules) or len(modules) > MOST_MODEL_FILES:
        raise not_executable_error(str(folder), f"its {main} imports from outside of its folder")
    if len(load) > MOST_PASS_FILES:
        raise not_executable_error(str(folder), f"it loads more than {MOST_PASS_FILES} files of passes")
    for option in FILE_OPTION.finditer(pipeline):
        if Path(profile := unquoted(option["value"])).name != profile:
            raise not_executable_error(str(folder), "it reads a file from outside of its folder")


def unquoted(value: str) -> str:
    """An option's text without quotes and spaces around it. One that is no string stands for itself: the pipeline's
    reader says so."""
    try:
        return str(json.loads(value)) if value.startswith('"') else value.strip()
    except ValueError:
        return value


def _is_inside(name: str, main: str) -> bool:
    parts = PurePosixPath(name).parts
    return name.endswith(".py") and bool(parts) and not name.startswith("/") and ".." not in parts and name != main


def read_clips(folder: Path) -> tuple[VideoClip, ...]:
    """The clips, by their ids in the IR. Raises ``UserError`` where ``clips.jsonl`` is missing or malformed."""
    return _clips(folder, read_part(folder, CLIPS))


def _clips(folder: Path, data: bytes) -> tuple[VideoClip, ...]:
    clips: list[VideoClip] = []
    for number, line in enumerate(io.BytesIO(data), start=1):  # one at a time
        if number > MOST_CLIPS:
            raise not_executable_error(str(folder), f"{CLIPS} lists more than {MOST_CLIPS} clips")
        try:
            row = msgspec.json.decode(line, type=ClipRow)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise not_executable_error(str(folder), f"{CLIPS}, line {number}: {error}") from None
        clips.append(clip_of(row))
    return tuple(clips)


def clip_of(row: ClipRow) -> VideoClip:
    """The clip that a row describes."""
    place = None if row.path is None else Path(row.path)
    cached = {name: Path(path) for name, path in row.encoded.items()}
    sizes = row.frames, row.height, row.width, row.text_tokens
    files = {n: Path(p) if isinstance(p, str) else tuple(map(Path, p)) for n, p in row.files.items()}
    return VideoClip(
        row.id,
        *sizes,
        row.caption,
        place,
        row.start,
        cached=cached,
        values={**row.values, **files},
        title=row.title,
        captions=row.captions,
        fps=row.fps,
        target_fps=row.target_fps,
        stride=row.stride,
    )


def _matching(folder: Path, clips: tuple[VideoClip, ...], traced: Module) -> tuple[VideoClip, ...]:
    """The clips themselves, where they are those that the traced module lists. Raises ``UserError``."""
    if len(clips) != len(traced.clips):
        reason = f"{CLIPS} lists {counted(len(clips), 'clip')}, {TRACED} {len(traced.clips)}"
        raise not_executable_error(str(folder), reason)
    for planned in traced.clips:
        clip = clips[planned.id] if 0 <= planned.id < len(clips) else None
        if clip is None or clip.shape != (planned.frames, planned.height, planned.width, planned.text):
            reason = f"clip {planned.id} of {CLIPS} is not the one of {TRACED}"
            raise not_executable_error(str(folder), reason)
    return clips


def row_of(clip: VideoClip) -> ClipRow:
    """A clip as a row, without tensors."""
    place = None if clip.path is None else str(clip.path.absolute())
    cached = {name: str(path.absolute()) for name, path in clip.cached.items()}
    plain = {name: value for name, value in clip.values.items() if name not in clip.tensors}
    files: dict[str, str | tuple[str, ...]] = {
        name: str(value) for name, value in plain.items() if isinstance(value, Path)
    }
    files |= {name: tuple(map(str, value)) for name, value in plain.items() if isinstance(value, tuple)}
    return ClipRow(
        clip.id,
        *clip.shape,
        clip.caption,
        place,
        clip.start,
        cached,
        title=clip.title,
        captions=clip.captions,
        values={name: value for name, value in plain.items() if name not in files},
        files=files,
        fps=clip.fps,
        target_fps=clip.target_fps,
        stride=clip.stride,
    )


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
