"""The executable of requests: the folder that ``arachnec compile`` writes for a sampler file.

=================== ========================================================================================
program.cascade     the lowered module; may be edited by hand, since every run checks it again
traced.cascade      cluster, stages and requests, from which they are planned again
executable.json     how requests are sampled, pipeline, fingerprint, versions
sampler.py          the sampler file as it was, and beside it the modules of its folder that it imports: the only code
requests.json       the requests, by their numbers in the IR
profile.json        the measured costs the plan was made with, where there are some
timeline.html       the plan to be looked at: see docs/show_and_explain.md
=================== ========================================================================================

It is read as an executable that trains is: every file against a schema and a size limit, and none is a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from arachnec.data.requests import Request
from arachnec.executable.folder import (
    FORMAT,
    HEADER,
    PROGRAM,
    TRACED,
    Changed,
    demand_inside,
    digest_of,
    modules_of,
    own_profiles,
    versions,
    write_parts,
)
from arachnec.executable.part_files import json_part, not_executable_error, read_part, text_of
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import check_module
from arachnec.models.sampler_file import SamplerFile, load_sampler_file

SAMPLER, REQUESTS = "sampler.py", "requests.json"
FINGERPRINTED = (SAMPLER, REQUESTS, TRACED)  # the program may be edited: it is proved again


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``sampler`` is the file that the folder's is a copy of; ``models`` stand in the order in which a request meets
    them; ``switch`` is the rule's text; ``sparse`` is that of the pass ``sparsify``, empty where it is left out."""

    sampler: str
    models: tuple[str, ...]
    switch: str
    history: Literal["carry", "restart"] = "carry"
    sparse: str = ""

    @property
    def restart(self) -> bool:
        return self.history == "restart"


class StoredRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request as the ranks read it, with the defaults that the file's reader gave it."""

    id: str | int
    caption: str | None
    frames: int
    height: int
    width: int
    steps: int
    guidance: float
    seed: int
    arrival: float
    text_tokens: int
    negative_prompt: str | None

    @classmethod
    def of(cls, request: Request) -> StoredRequest:
        return cls(*(getattr(request, name) for name in cls.__struct_fields__))

    @property
    def request(self) -> Request:
        return Request(**{name: getattr(self, name) for name in self.__struct_fields__})


class SamplingHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``executable.json``."""

    format: int
    pipeline: str
    settings: Settings
    fingerprint: dict[str, str]
    versions: dict[str, str]
    load: tuple[str, ...] = ()  # files in this folder that add passes
    modules: tuple[str, ...] = ()  # files in this folder that the sampler file imports

    @property
    def digest(self) -> str:
        """Of the user's code, as ``sampler_digest`` has it."""
        return _digest_of({name: self.fingerprint[name] for name in (SAMPLER, *self.modules)})


@dataclass(frozen=True)
class SamplingExecutable:
    """The folder as it was read. ``program`` is parsed, but neither verified nor checked."""

    folder: Path
    header: SamplingHeader
    program: Module
    traced: Module
    requests: tuple[Request, ...]  # by their numbers in the IR

    def sampler_file(self) -> SamplerFile:
        """Import ``sampler.py``. This runs its code."""
        return load_sampler_file(
            self.folder / SAMPLER, origin=self.header.settings.sampler, modules=self.header.modules
        )


def sampler_digest(sampler: SamplerFile) -> str:
    """SHA-256 of a sampler file and of what it imports from its folder: latents follow from both."""
    texts = {
        SAMPLER: sampler.path.read_text(encoding="utf-8"),
        **modules_of(sampler.path, sampler.modules, taken=set()),
    }
    return _digest_of({name: digest_of(text.encode()) for name, text in texts.items()})


def _digest_of(digests: Mapping[str, str]) -> str:
    """One for all; of a file alone its own."""
    return digests[SAMPLER] if len(digests) == 1 else digest_of(msgspec.json.encode(sorted(digests.items())))


def write_sampling_executable(
    folder: Path,
    *,
    program: Module,
    traced: Module,
    pipeline: str,
    sampler: SamplerFile,
    requests: Sequence[Request],
    settings: Settings,
    load: Sequence[Path] = (),
    extra: Mapping[str, str] | None = None,
) -> Path:
    """Write the folder; returns it. ``extra`` are more files by name, such as the report."""
    if program.level is not Level.LOWERED or traced.level is not Level.TRACED:
        raise ValueError("an executable needs a lowered program and a traced module")
    pipeline, profiles = own_profiles(pipeline)
    stored = msgspec.json.encode([*map(StoredRequest.of, requests)])
    texts = {
        PROGRAM: print_module(program),
        TRACED: print_module(traced),
        SAMPLER: sampler.path.read_text(encoding="utf-8"),
        REQUESTS: msgspec.json.format(stored).decode() + "\n",
    }
    texts |= profiles | {path.name: path.read_text(encoding="utf-8") for path in load}
    texts |= modules_of(sampler.path, sampler.modules, taken=set(texts))
    header = SamplingHeader(
        format=FORMAT,
        pipeline=pipeline,
        settings=settings,
        fingerprint={name: digest_of(texts[name].encode()) for name in (*FINGERPRINTED, *sampler.modules)},
        versions=versions(),
        load=tuple(path.name for path in load),
        modules=sampler.modules,
    )
    texts[HEADER] = msgspec.json.format(msgspec.json.encode(header)).decode() + "\n"
    write_parts(folder, {**texts, **(extra or {})})
    return folder


def read_sampling_header(folder: Path) -> SamplingHeader:
    """``executable.json``. Raises ``UserError`` where it is missing or malformed."""
    header = json_part(folder, HEADER, read_part(folder, HEADER), SamplingHeader)
    if header.format != FORMAT:
        reason = f"its format is {header.format}, this arachnec reads {FORMAT}"
        raise not_executable_error(str(folder), reason)
    demand_inside(folder, SAMPLER, header.pipeline, header.load, header.modules)
    return header


def read_sampling_executable(folder: Path) -> SamplingExecutable:
    """Read the folder. Raises ``UserError`` for a missing, oversized, malformed or altered part."""
    header = read_sampling_header(folder)
    raw = {name: read_part(folder, name) for name in (PROGRAM, *FINGERPRINTED, *header.load, *header.modules)}
    for name in (*FINGERPRINTED, *header.modules):
        if header.fingerprint.get(name) != digest_of(raw[name]):
            raise UserError(Changed(None, str(folder), name))
    program, traced = (parse_module(text_of(folder, name, raw[name]), str(folder / name)) for name in (PROGRAM, TRACED))
    check_module(traced)
    stored = json_part(folder, REQUESTS, raw[REQUESTS], list[StoredRequest])
    requests = tuple(row.request for row in stored)
    for clip in traced.clips:
        own = requests[clip.id] if 0 <= clip.id < len(requests) else None
        # a sampler file may pad captions
        if own is None or own.shape[:3] != (clip.frames, clip.height, clip.width) or own.text_tokens > clip.text:
            reason = f"request {clip.id} of {REQUESTS} is not the one of {TRACED}"
            raise not_executable_error(str(folder), reason)
    return SamplingExecutable(folder, header, program, traced, requests)
