"""Batches that rank 0 draws from somebody's dataset, and tells the other ranks.

Every rank learns the ids, sizes and captions of a batch. Tensors that came with a clip go to the ranks whose programs
encode or train it, once the plan is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.data.batch_source import BatchSource
from arachnec.data.clip import VideoClip
from arachnec.executable.batches import Drawn, Mark
from arachnec.executable.folder import ClipRow, clip_of, row_of
from arachnec.ir.diagnostic import Mistake, UserError, render
from arachnec.ir.nodes import Clip, Module
from arachnec.ir.values import Attributes
from arachnec.runtime.agreement import share_text

META = torch.device("meta")
NOWHERE = Mark(0, "")
READING = ("encode", "forward")  # instructions that read a clip


class CannotDraw(UserError):
    """A batch that cannot be drawn: a mistake of the dataset, told on every rank at the same step."""


class _Row(msgspec.Struct, frozen=True):
    clip: ClipRow
    tokens: int
    values: list[tuple[str, str, list[int]]]  # name, precision, shape


class _Message(msgspec.Struct, frozen=True):
    """What rank 0 tells of one batch; without rows there are no more, with ``error`` there was a mistake."""

    number: int = 0
    rows: list[_Row] | None = None
    mark: Mark = NOWHERE
    error: str | None = None


@dataclass
class ToldBatches:
    """The batches of a ``source``, which only rank 0 has. ``tokens`` counts the tokens of a clip."""

    start: Mark  # where a resumed run begins
    source: BatchSource | None = None
    tokens: Callable[[VideoClip], int] | None = None
    told: bool = True

    def draw(self, step: int) -> Drawn | None:
        """The next batch, on rank 0. Raises ``UserError`` for one that cannot be drawn, or that the model refuses."""
        assert self.source is not None and self.tokens is not None
        clips = self.source.draw()
        if clips is None:
            return None
        planned = tuple(ir_clip(number, clip, self.tokens(clip), step) for number, clip in enumerate(clips))
        return Drawn(step, planned, dict(enumerate(clips)), mark_of(self.source))

    def mark(self, steps: int) -> Mark:
        return self.start


def mark_of(source: BatchSource) -> Mark:
    return Mark(source.clips, source.digest, source.state())


def ir_clip(id: int, clip: VideoClip, tokens: int, iteration: int) -> Clip:
    attrs = Attributes.of(name=clip.name, iteration=iteration)
    return Clip(id, clip.frames, clip.height, clip.width, clip.text_tokens, tokens, attrs)


def told(drawing: Future[Drawn | None] | None, group: dist.ProcessGroup | None) -> Drawn | None:
    """The batch that rank 0 has drawn, on every rank; others than rank 0 see the shapes of tensors only. Collective.

    Raises rank 0's mistake as ``CannotDraw`` on every rank.
    """
    if drawing is None:
        return _heard(msgspec.json.decode(share_text(None, group), type=_Message))
    try:
        drawn = drawing.result()
    except UserError as error:
        message = "\n".join(render(diagnostic) for diagnostic in error.diagnostics).removeprefix("error: ")
        share_text(msgspec.json.encode(_Message(error=message)).decode(), group)
        raise CannotDraw(*error.diagnostics) from None
    share_text(msgspec.json.encode(_said(drawn)).decode(), group)
    return drawn


def _said(drawn: Drawn | None) -> _Message:
    if drawn is None:
        return _Message()
    rows = [_Row(row_of(drawn.clips[c.id]), c.tokens, _specs(drawn.clips[c.id])) for c in drawn.planned]
    return _Message(drawn.number, rows, drawn.mark)


def _specs(clip: VideoClip) -> list[tuple[str, str, list[int]]]:
    return [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in clip.tensors.items()]


def _heard(message: _Message) -> Drawn | None:
    if message.error is not None:
        raise CannotDraw(Mistake(None, message.error))
    if message.rows is None:
        return None
    clips = {
        number: replace(
            clip := clip_of(row.clip),
            values={
                **clip.values,
                **{n: torch.empty(shape, dtype=getattr(torch, dtype), device=META) for n, dtype, shape in row.values},
            },
        )
        for number, row in enumerate(message.rows)
    }
    planned = tuple(
        ir_clip(number, clips[number], row.tokens, message.number) for number, row in enumerate(message.rows)
    )
    return Drawn(message.number, planned, clips, message.mark)


def delivered(clips: Mapping[int, VideoClip], module: Module, group: dist.ProcessGroup | None) -> dict[int, VideoClip]:
    """The clips of a program, with their tensors on the ranks that read them. Collective."""
    rank, readers = dist.get_rank(group), readers_of(module)
    whole: dict[int, VideoClip] = {}
    for id, clip in sorted(clips.items()):
        wanted = readers.get(id, frozenset())
        values = {name: value for name, value in clip.values.items() if name not in clip.tensors}
        for name, value in sorted(clip.tensors.items()):
            if rank == 0:
                values[name] = value
                for other in sorted(wanted - {0}):
                    dist.send(_bytes(value), other, group)
            elif rank in wanted:
                values[name] = torch.empty(value.shape, dtype=value.dtype)
                received = _bytes(values[name])
                dist.recv(received, 0, group)
                values[name] = received.view(value.dtype).view(value.shape)
        whole[id] = replace(clip, values=values)
    return whole


def readers_of(module: Module) -> dict[int, frozenset[int]]:
    """The ranks that encode or train each clip."""
    clips = {cascade.name: cascade.clips for cascade in module.cascades}
    readers: dict[int, set[int]] = {}
    for program in module.programs:
        for instruction in program.instructions:
            for clip in clips[instruction.target] if instruction.op in READING else ():
                readers.setdefault(clip, set()).add(program.rank)
    return {clip: frozenset(ranks) for clip, ranks in readers.items()}


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
