"""Rule 6, of what instructions claim to copy: as much as their stages say, or more.

In: a program, whose instructions carry the bytes that come from host memory and go there, and the GiB of blocks' inputs
that stay. Out: where these are less than what follows from the stage, the cascade and the instruction's own lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values, written
from arachnec.cost.host_copies import reduce_copies, step_copies, with_host_copies
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.host_placement import in_host
from arachnec.ir.nodes import Instruction, Stage, integer
from arachnec.ir.values import Attributes, Quantity

WORDS = {"host": " GiB", "from_host": "", "to_host": ""}  # with their units as they are written
TOLERANCE = 1e-6  # of a size that was printed


@dataclass(frozen=True)
class HostCopyTooSmall(Diagnostic):
    title = "rank {rank} has `{instruction}` with {word} = {claimed}, and it is {right}"
    label = "{word} = {claimed}"
    help = "that follows from what @{stage} has in its `host`: write at least `{word} = {right}`"
    rank: int
    instruction: str
    word: str
    claimed: str
    right: str
    stage: str


def check_host_copies(values: Values) -> Iterator[Diagnostic]:
    stages = {stage.name: stage for stage in values.module.stages if in_host(stage)}
    if not stages:
        return
    for program in values.module.programs:
        copying = with_host_copies(program.instructions, values.cascades, stages)
        for step, right in zip(program.instructions, copying, strict=True):
            cascade = values.cascades.get(step.target)
            stage = stages.get(step.target if cascade is None else cascade.stage)
            if stage is None:
                continue
            least = right.attrs if cascade is not None else _of_gradients(step, stage)
            for word, unit in WORDS.items():
                claimed, size = _size(step.attrs, word), _size(least, word)
                if claimed < size * (1 - TOLERANCE):
                    texts = f"{claimed:.10g}{unit}", f"{size:.10g}{unit}"
                    yield HostCopyTooSmall(step.span, program.rank, written(step), word, *texts, stage.name)


def _of_gradients(step: Instruction, stage: Stage) -> Attributes:
    """What a reduce or an optimizer step of the stage copies."""
    if step.op == "step":
        return step_copies(stage)
    if step.op == "reduce" and "tied" not in step.attrs:
        return reduce_copies(stage, step.peers, integer(step.attrs["bytes"]))
    return Attributes()


def _size(attrs: Attributes, word: str) -> float:
    size = attrs.get(word, 0)
    return size.value if isinstance(size, Quantity) else float(integer(size))
