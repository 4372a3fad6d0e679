"""What a run of requests is told: how they are sampled, and with which file. Written beside the program as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from arachnec.data.requests import Request

PLAN = "plan"
PROGRAM, REQUESTS, SETTINGS, REPORT = "program.cascade", "requests.json", "settings.json", "report.json"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``models`` in the order in which a request meets them; ``switch`` is the rule's text."""

    sampler: str
    models: tuple[str, ...]
    switch: str
    history: Literal["carry", "restart"] = "carry"
    cpu: bool = True

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


def write_plan(out: Path, program: str, requests: tuple[Request, ...], settings: Settings) -> None:
    """What every rank reads."""
    folder = out / PLAN
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROGRAM).write_text(program, encoding="utf-8")
    (folder / REQUESTS).write_bytes(msgspec.json.format(msgspec.json.encode([*map(StoredRequest.of, requests)])))
    (folder / SETTINGS).write_bytes(msgspec.json.format(msgspec.json.encode(settings)))


def read_settings(out: Path) -> tuple[Settings, tuple[Request, ...]]:
    folder = out / PLAN
    stored = msgspec.json.decode((folder / REQUESTS).read_bytes(), type=list[StoredRequest])
    settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=Settings)
    return settings, tuple(entry.request for entry in stored)
