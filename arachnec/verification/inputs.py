"""Rules 2 and 3, of cascades: their ranks split them alike, and have the inputs, which are of their own clips.

The executor takes the split of a forward from the instruction. Ranks that disagree on it exchange messages of other
sizes, or wait for partners that are elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from arachnec.analysis.stage_handoffs import STAGED
from arachnec.analysis.uses import COMPUTE, Values, gib, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, counted
from arachnec.ir.nodes import Cascade, Clip, Instruction, Phase, Program, quantity
from arachnec.ir.printer import value_text
from arachnec.ir.stage_sizes import is_encoder
from arachnec.ir.values import Value
from arachnec.kernels.attention.attention_backend import PREFERENCE

TOLERANCE_MS = 1e-3  # of planned times that were printed, added and subtracted


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
            yield Mistake(
                instruction.span,
                f"rank {program.rank} is in two cascades at once: `{written(instruction)}` is planned at "
                f"{start:g} ms, `{earlier}` until {until:g} ms",
                kind="overlap",
                label=f"starts at {start:g} ms",
                help="a rank does one thing at a time, in the order of its list",
            )
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
                yield Mistake(
                    instruction.span,
                    f"rank {program.rank} has `{written(instruction)}`, and %{value} is there already",
                    kind="already there",
                    label=f"a second %{value}",
                    help="a rank gets a value once; behind a `replan` what it has freed may come again",
                )
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
        if value in freed:
            yield Mistake(
                instruction.span,
                f"rank {rank} has `{written(instruction)}`, and %{value} has been freed",
                kind="used after free",
                label=f"needs %{value}",
                help=f"move `free %{value}` behind its last use on rank {rank}",
            )
        else:
            yield Mistake(
                instruction.span,
                f"rank {rank} has `{written(instruction)}`, and %{value} is not there yet",
                kind="missing input",
                label=f"needs %{value}",
                help=f"compute %{value} on rank {rank} or receive it, before this instruction",
            )
    for source in values.saved_reads(instruction):
        if source not in saved:
            yield Mistake(
                instruction.span,
                f"rank {rank} has `{written(instruction)}` before it has run %{source}",
                kind="nothing saved",
                label=f"reads what %{source} saves",
                help=f"run %{source} on rank {rank} first, once",
            )


READERS = (Phase.TRAIN, Phase.FORWARD)


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
            yield Mistake(
                cascade.span,
                f"%{cascade.name} is {said}, and its clip {number} has {right}",
                kind="not its clips",
                label=f"clip {number} has {right}",
                help="a cascade's clips are of one shape, and its tokens are theirs",
            )
            return


def _length(tokens: int, text: int) -> str:
    return f"{counted(tokens, 'token')} and {text} of text"


def _encodings(values: Values, cascade: Cascade, encoder: str) -> Iterator[Diagnostic]:
    sources = (values.cascades.get(name) for name in cascade.inputs)
    read = [source.clips for source in sources if source is not None and source.stage == encoder]
    counts, own = Counter(clip for clips in read for clip in clips), set(cascade.clips)
    if any(counts[clip] != 1 for clip in own) or any(own.isdisjoint(clips) for clips in read):
        shown = ", ".join(f"clips {rank_list(clips)}" for clips in read) or "none"
        yield Mistake(
            cascade.span,
            f"%{cascade.name} trains clips {rank_list(cascade.clips)}, and of @{encoder} it reads {shown}",
            kind="not its encoding",
            label="not the encodings of its clips",
            help=(
                f"each of its clips is in one of its inputs of `encode @{encoder}`, and each of these has some of "
                "its clips"
            ),
        )


SPLIT = ("ulysses", "ring", "shards", "side", "recompute")
SAMPLED = ("steps", "branches", "switch", "ulysses", "ring", "shards", "side", "unconditional")  # of a denoise


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
                found, expected = _shown(value), _shown(right)
                yield Mistake(
                    step.span,
                    f"rank {program.rank} runs `{written(step)}` with {name} = {found}, and %{cascade.name} has "
                    f"{expected}",
                    kind="split unlike cascade",
                    label=f"{name} is {found}",
                    help=f"all ranks of a cascade split it alike: {remedy}",
                )
            family = step.attrs.get("attention")
            if family is not None and family not in PREFERENCE:
                span = step.attrs.span("attention") or step.span
                yield Mistake(
                    span,
                    f"rank {program.rank} runs `{written(step)}` with attention {_shown(family)}, which no kernel "
                    "family is called",
                    kind="unknown kernel family",
                    label=f"attention is {_shown(family)}",
                    help=f"write one of {', '.join(PREFERENCE)}, or leave `attention` out",
                )
            if families.setdefault(cascade.name, family) != family:
                yield Mistake(
                    step.span,
                    f"rank {program.rank} runs `{written(step)}` with attention {_shown(family)}, and others with "
                    f"{_shown(families[cascade.name])}",
                    kind="other kernel family",
                    label=f"{_shown(family)} here",
                    help="all ranks of a cascade run its attention with one kernel family",
                )


def _shown(value: Value | None) -> str:
    return "none" if value is None else value_text(value)
