"""What an instruction lists of its stage's layers is there. Rules 4 to 6 compute with the sizes of these layers.

In: a program whose names are known. Out: a layer that its stage does not have, or fewer than one that is whole at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, integer
from arachnec.ir.parameter_cells import last_layer

# Which lists an instruction may have, and whether they may name what lies outside the blocks: one more number.
LISTS = {"gather": True, "release": True, "scatter": True, "offload": False, "reload": False}


@dataclass(frozen=True)
class UnknownLayer(Diagnostic):
    title = "rank {rank} has `{instruction}` {word} layer {layer}, and @{stage} has {layers} layers"
    label = "no layer {layer}"
    help = "write numbers of {known}"
    rank: int
    instruction: str
    word: str
    layer: int
    stage: str
    layers: int
    known: str


@dataclass(frozen=True)
class NoneHeld(Diagnostic):
    title = "rank {rank} has `{instruction}` with held = {held}"
    label = "held = {held}"
    help = "a layer that computes is whole: write 1 or more, or leave `held` out"
    rank: int
    instruction: str
    held: int


def check_listed_layers(values: Values) -> Iterator[UnknownLayer | NoneHeld]:
    last = {stage.name: last_layer(stage) for stage in values.module.stages}
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "gather":
                yield from _unknown(program.rank, step, "layers", step.target, last[step.target] + 1)
            elif step.op in ("forward", "backward", "weight"):
                stage = values.cascades[step.target].stage
                for word, value in step.attrs.pairs:
                    if word in LISTS:
                        yield from _unknown(program.rank, step, word, stage, last[stage] + LISTS[word])
                    elif word == "held" and integer(value) < 1:
                        span = step.attrs.span("held") or step.span
                        yield NoneHeld(span, program.rank, written(step), integer(value))


def _unknown(rank: int, step: Instruction, word: str, stage: str, end: int) -> Iterator[UnknownLayer]:
    """The first layer of a list from ``end`` on."""
    listed = layers_listed(step, word)
    if listed and not 0 <= min(listed) <= max(listed) < end:
        layer = next(number for number in listed if not 0 <= number < end)
        known = f"0 to {end - 1}" if end else "layers that there are: it has none"
        span = step.attrs.span(word) or step.span
        verb = word if word != "layers" else "of"
        yield UnknownLayer(span, rank, written(step), verb, layer, stage, end, known)
