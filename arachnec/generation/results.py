"""The folder of results: files of finished requests, whole or not there, and a line for each switch that was seen.

``ID.safetensors`` has a request's ``latents``, and in its metadata the fingerprint of what made them: a run that is
started again leaves out what is there with the same fingerprint. ``ID.mp4`` is written before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arachnec.checkpoint.files import save_tensors, synced
from arachnec.data.requests import Request
from arachnec.data.video_file import write_video
from arachnec.executable.sampling_folder import Settings
from arachnec.models.sampler_file import SamplerFile
from arachnec.sampling.loop import Sampling

LATENTS = "latents"
ABOUT = "request"
EXECUTED = "executed.cascade"  # among the outcomes: the program as it was in its last round


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request. ``switched`` is K; ``distances`` how far its guided prediction moved before each step.

    ``failed`` is None, or why it has no files. ``seconds`` is when its latents were there, from the start of the run.
    ``video_bytes`` is the size of its video, 0 where it has none.
    """

    id: str
    steps: int
    switched: int | None
    distances: list[float | None]
    fingerprint: str
    seconds: float
    failed: str | None = None
    video_bytes: int = 0


@dataclass(frozen=True)
class Results:
    """The folder of the files, and what fingerprints are made of: ``digest`` is that of the user's code and of what it
    reads."""

    folder: Path
    settings: Settings
    digest: str

    @classmethod
    def of(cls, folder: Path, settings: Settings, sampler: SamplerFile, code: str) -> Results:
        """``code`` is the digest of the sampler file's source. Raises ``UserError`` where what it reads is wrong."""
        read = sampler.inputs(settings.models, sparse=bool(settings.sparse))
        return cls(folder, settings, hashlib.sha256(f"{code}{read}".encode()).hexdigest())

    def latents(self, request: Request) -> Path:
        return self.folder / f"{request.id}.safetensors"

    def video(self, request: Request) -> Path:
        return self.folder / f"{request.id}.mp4"

    def fingerprint(self, request: Request) -> str:
        """Of all that its latents follow from, as far as files say it."""
        fields = asdict(request)
        for name in ("encoded", "negative_encoded", "arrival"):
            del fields[name]
        settings = msgspec.to_builtins(self.settings)
        how = [settings["switch"], settings["models"], settings["history"], self.digest]
        text = json.dumps([fields, *how, *filter(None, [settings["sparse"]])])
        return hashlib.sha256(text.encode()).hexdigest()

    def outcome(self, request: Request) -> Outcome | None:
        """Of a request whose files are there; None where they are not, are cut off, or are of something else."""
        try:
            with safe_open(self.latents(request), framework="pt") as file:
                outcome = msgspec.json.decode((file.metadata() or {})[ABOUT], type=Outcome)
            size = self.video(request).stat().st_size if outcome.video_bytes else 0
        except (OSError, SafetensorError, KeyError, msgspec.MsgspecError, RecursionError):
            return None
        same = outcome.fingerprint == self.fingerprint(request) and outcome.video_bytes == size
        return outcome if same else None

    def unfinished(self, requests: Iterable[Request]) -> tuple[Request, ...]:
        return tuple(request for request in requests if self.outcome(request) is None)

    def write(self, request: Request, outcome: Outcome, latents: Tensor, pixels: Tensor | None) -> None:
        """Both files, the latents last: where they are, the request is finished."""
        if pixels is not None:
            part = self.video(request).with_suffix(".mp4.part")
            write_video(part, pixels[0])
            synced(part)
            outcome = msgspec.structs.replace(outcome, video_bytes=part.stat().st_size)
            part.replace(self.video(request))
        part = self.latents(request).with_suffix(".safetensors.part")
        about = {ABOUT: msgspec.json.encode(outcome).decode()}
        save_tensors({LATENTS: latents.detach().cpu().contiguous()}, part, about)
        synced(part)
        part.replace(self.latents(request))


SWITCHES = "switches.jsonl"
LINES, NEWEST = 10_000, 4 * 2**20  # of the newest lines, and bytes, that are read


class Seen(msgspec.Struct, frozen=True):
    """Where a request of so many steps has switched, by which rule and between which models."""

    models: tuple[str, ...]
    switch: str
    steps: int
    switched: int

    def of(self, sampling: Sampling) -> bool:
        """Whether it says something of requests that are sampled so."""
        return (self.models, self.switch) == (sampling.names, str(sampling.switch)) and self.steps > 0


def read_seen(folder: Path) -> tuple[Seen, ...]:
    """Those of earlier runs into this folder. A line that is none is left out: it is only a forecast."""
    path, seen = folder / SWITCHES, []
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - NEWEST))
        lines = file.read(NEWEST).splitlines()
    for line in lines[-LINES:]:
        try:
            seen.append(msgspec.json.decode(line, type=Seen))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return tuple(seen)


def record_seen(folder: Path, seen: Iterable[Seen]) -> None:
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in seen)
    if lines:
        with (folder / SWITCHES).open("ab") as file:
            file.write(lines)
