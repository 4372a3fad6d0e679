"""Rule 3, of the cascades themselves: each reads the encodings of its own clips, and is as long as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values, rank_list
from arachnec.ir.diagnostic import Diagnostic, counted
from arachnec.ir.nodes import Cascade, Clip, Phase
from arachnec.ir.stage_sizes import is_encoder

READERS = (Phase.TRAIN, Phase.FORWARD)


@dataclass(frozen=True)
class NotItsEncoding(Diagnostic):
    title = "%{cascade} trains clips {clips}, and of @{encoder} it reads {read}"
    label = "not the encodings of its clips"
    help = "each of its clips is in one of its inputs of `encode @{encoder}`, and each of these has some of its clips"
    cascade: str
    clips: str
    encoder: str
    read: str


@dataclass(frozen=True)
class NotItsClips(Diagnostic):
    title = "%{cascade} is {said}, and its clip {clip} has {right}"
    label = "clip {clip} has {right}"
    help = "a cascade's clips are of one shape, and its tokens are theirs"
    cascade: str
    said: str
    clip: int
    right: str


def check_cascade_inputs(values: Values) -> Iterator[Diagnostic]:
    clips = {clip.id: clip for clip in values.module.clips}
    encoders = [stage.name for stage in values.module.stages if is_encoder(stage)]
    for cascade in values.module.cascades:
        yield from _lengths(cascade, clips)
        if cascade.phase in READERS and cascade.stage not in encoders:
            for encoder in encoders:
                yield from _encodings(values, cascade, encoder)


def _lengths(cascade: Cascade, clips: dict[int, Clip]) -> Iterator[Diagnostic]:
    for number in cascade.clips:
        clip = clips.get(number)
        if clip is not None and (clip.tokens, clip.text) != (cascade.tokens, cascade.text):
            said, right = _length(cascade.tokens, cascade.text), _length(clip.tokens, clip.text)
            yield NotItsClips(cascade.span, cascade.name, said, number, right)
            return


def _length(tokens: int, text: int) -> str:
    return f"{counted(tokens, 'token')} and {text} of text"


def _encodings(values: Values, cascade: Cascade, encoder: str) -> Iterator[Diagnostic]:
    sources = (values.cascades.get(name) for name in cascade.inputs)
    read = [source.clips for source in sources if source is not None and source.stage == encoder]
    counts, own = Counter(clip for clips in read for clip in clips), set(cascade.clips)
    if any(counts[clip] != 1 for clip in own) or any(own.isdisjoint(clips) for clips in read):
        shown = ", ".join(f"clips {rank_list(clips)}" for clips in read) or "none"
        yield NotItsEncoding(cascade.span, cascade.name, rank_list(cascade.clips), encoder, shown)
