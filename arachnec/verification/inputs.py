"""Rules 2 and 3, of cascades: their ranks split them alike, and have the inputs, which are of their own clips.

The executor takes the split of a forward from the instruction. Ranks that disagree on it exchange messages of other
sizes, or wait for partners that are elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.stage_handoffs import STAGED
from arachnec.analysis.uses import COMPUTE, Values, gib, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, counted
from arachnec.ir.nodes import Cascade, Clip, Instruction, Phase, Program, quantity
from arachnec.ir.printer import value_text
from arachnec.ir.stage_sizes import is_encoder
from arachnec.ir.values import Value
from arachnec.kernels.attention.attention_backend import PREFERENCE

TOLERANCE_MS = 1e-3  # of planned times that were printed, added and subtracted


@dataclass(frozen=True)
class Overlap(Diagnostic):
    title = (
        "rank {rank} is in two cascades at once: `{instruction}` is planned at {start:g} ms, "
        "`{before}` until {until:g} ms"
    )
    label = "starts at {start:g} ms"
    help = "a rank does one thing at a time, in the order of its list"
    rank: int
    instruction: str
    before: str
    start: float
    until: float


@dataclass(frozen=True)
class MissingInput(Diagnostic):
    title = "rank {rank} has `{instruction}`, and %{value} is not there yet"
    label = "needs %{value}"
    help = "compute %{value} on rank {rank} or receive it, before this instruction"
    rank: int
    instruction: str
    value: str


@dataclass(frozen=True)
class UsedAfterFree(Diagnostic):
    title = "rank {rank} has `{instruction}`, and %{value} has been freed"
    label = "needs %{value}"
    help = "move `free %{value}` behind its last use on rank {rank}"
    rank: int
    instruction: str
    value: str


@dataclass(frozen=True)
class NothingSaved(Diagnostic):
    title = "rank {rank} has `{instruction}` before it has run %{source}"
    label = "reads what %{source} saves"
    help = "run %{source} on rank {rank} first, once"
    rank: int
    instruction: str
    source: str


@dataclass(frozen=True)
class AlreadyThere(Diagnostic):
    title = "rank {rank} has `{instruction}`, and %{value} is there already"
    label = "a second %{value}"
    help = "a rank gets a value once; behind a `replan` what it has freed may come again"
    rank: int
    instruction: str
    value: str


def check_inputs(values: Values) -> Iterator[Diagnostic]:
    for program in values.module.programs:
        yield from _times(program)
        yield from _presence(values, program)


def _times(program: Program) -> Iterator[Diagnostic]:
    before: Instruction | None = None
    until = 0.0
    for instruction in program.instructions:
        if instruction.op not in COMPUTE or "start" not in instruction.attrs:
            continue
        start = quantity(instruction.attrs["start"])
        if start < until - max(TOLERANCE_MS, 1e-9 * until):
            earlier = "the start of the iteration" if before is None else written(before)
            yield Overlap(instruction.span, program.rank, written(instruction), earlier, start, until)
        before, until = instruction, start + gib(instruction, "time")


def _presence(values: Values, program: Program) -> Iterator[Diagnostic]:
    held: set[str] = set()
    freed: set[str] = set()
    saved: set[str] = set()
    received: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)  # a value between stages may come in parts
    for instruction in program.instructions:
        if not held.issuperset(values.reads(instruction)) or not saved.issuperset(values.saved_reads(instruction)):
            yield from _needs(values, program.rank, instruction, held, freed, saved)
        if instruction.op == "replan":
            freed.clear()
        if instruction.op == "free":
            held.discard(instruction.target)
            freed.add(instruction.target)
        value = values.makes(instruction)
        if value is not None:
            part = instruction.op == "receive" and values.cascades[instruction.target].phase in STAGED
            again = value in held and (not part or value not in received or instruction.peers in received[value])
            if again or value in freed:
                yield AlreadyThere(instruction.span, program.rank, written(instruction), value)
            held.add(value)
            if part:
                received[value].add(instruction.peers)
        if values.saves(instruction):
            saved.add(instruction.target)


def _needs(
    values: Values, rank: int, instruction: Instruction, held: set[str], freed: set[str], saved: set[str]
) -> Iterator[Diagnostic]:
    for value in values.reads(instruction):
        if value in held:
            continue
        kind = UsedAfterFree if value in freed else MissingInput
        yield kind(instruction.span, rank, written(instruction), value)
    for source in values.saved_reads(instruction):
        if source not in saved:
            yield NothingSaved(instruction.span, rank, written(instruction), source)


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


SPLIT = ("ulysses", "ring", "shards", "side", "recompute")
SAMPLED = ("steps", "branches", "switch", "ulysses", "ring", "shards", "side", "unconditional")  # of a denoise


@dataclass(frozen=True)
class SplitUnlikeCascade(Diagnostic):
    title = "rank {rank} runs `{instruction}` with {attribute} = {value}, and %{cascade} has {right}"
    label = "{attribute} is {value}"
    help = "all ranks of a cascade split it alike: {remedy}"
    rank: int
    instruction: str
    attribute: str
    value: str
    cascade: str
    right: str
    remedy: str


def check_forwards(values: Values) -> Iterator[Diagnostic]:
    families: dict[str, Value | None] = {
        cascade.name: cascade.attrs["attention"] for cascade in values.module.cascades if "attention" in cascade.attrs
    }
    for program in values.module.programs:
        for step in program.instructions:
            if step.op not in ("forward", "denoise"):
                continue
            cascade = values.cascades[step.target]
            for name in SPLIT if step.op == "forward" else SAMPLED:
                value, right = step.attrs.get(name), cascade.attrs.get(name)  # absent is a choice of its own
                if value == right:
                    continue
                remedy = f"write `{name} = {_shown(right)}`" if right is not None else f"leave `{name}` out"
                texts = _shown(value), cascade.name, _shown(right), remedy
                yield SplitUnlikeCascade(step.span, program.rank, written(step), name, *texts)
            family = step.attrs.get("attention")
            if family is not None and family not in PREFERENCE:
                span = step.attrs.span("attention") or step.span
                yield Mistake(
                    span,
                    f"rank {program.rank} runs `{written(step)}` with attention {_shown(family)}, which no kernel "
                    "family is called",
                    label=f"attention is {_shown(family)}",
                    help=f"write one of {', '.join(PREFERENCE)}, or leave `attention` out",
                )
            if families.setdefault(cascade.name, family) != family:
                yield Mistake(
                    step.span,
                    f"rank {program.rank} runs `{written(step)}` with attention {_shown(family)}, and others with "
                    f"{_shown(families[cascade.name])}",
                    label=f"{_shown(family)} here",
                    help="all ranks of a cascade run its attention with one kernel family",
                )


def _shown(value: Value | None) -> str:
    return "none" if value is None else value_text(value)
