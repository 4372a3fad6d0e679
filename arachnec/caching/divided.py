"""Which encoders were divided over ranks while a manifest was encoded, and for clips of which shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from arachnec.cost.compute import is_divided
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module

DIVIDED = "divided.jsonl"


class Divided(msgspec.Struct, frozen=True):
    """An encoder that so many ranks ran together, for so many clips of one shape."""

    encoder: str
    ranks: int
    frames: int
    height: int
    width: int
    clips: int

    def text(self) -> str:
        shape = f"{self.frames}x{self.height}x{self.width}"
        return f"{self.encoder} was divided over {self.ranks} ranks for {counted(self.clips, 'clip')} of {shape}"


def divided_in(module: Module, clips: Mapping[int, VideoClip]) -> list[Divided]:
    """What a batch's program divides."""
    stages = {stage.name: stage for stage in module.stages}
    ranks_of = {
        step.target: len(step.peers) for program in module.programs for step in program.instructions if step.peers
    }
    rows = [
        Divided(cascade.stage, ranks, clip.frames, clip.height, clip.width, 1)
        for cascade in module.cascades
        if (ranks := ranks_of.get(cascade.name, 1)) > 1 and is_divided(cascade, stages[cascade.stage], ranks)
        for clip in (clips[number] for number in cascade.clips)
    ]
    return together(rows)


def together(rows: Iterable[Divided]) -> list[Divided]:
    """One row for each encoder, number of ranks and shape, in the order in which they came."""
    counts: Counter[Divided] = Counter()
    for row in rows:
        counts[msgspec.structs.replace(row, clips=0)] += row.clips
    return [msgspec.structs.replace(row, clips=count) for row, count in counts.items()]


def write_divided(folder: Path, rows: Iterable[Divided]) -> None:
    """Add what a batch divided to what is known beside the plan."""
    with (folder / DIVIDED).open("ab") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")


def read_divided(folder: Path) -> list[Divided]:
    """What all batches divided."""
    lines = (folder / DIVIDED).read_bytes().splitlines() if (folder / DIVIDED).is_file() else []
    return together(msgspec.json.decode(line, type=Divided) for line in lines)
