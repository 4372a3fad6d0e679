"""Definitions and uses: what every instruction of a lowered program reads, makes and saves.

A *value* has the name of its cascade. ``encode``, ``denoise``, ``decode``, ``receive``, ``forward`` of phase forward
and ``backward`` of phase backward make one on every rank that runs them. It lasts until ``free``.

A ``forward`` of a trained stage also *saves* tensors for its backward, and a split ``backward`` for its ``weight``.
They last until the last ``backward`` or ``weight`` of the same stage that has the cascade as an input. The inputs of
a forward are needed as long as what it saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from arachnec.ir.nodes import STAGE_OPS, Cascade, Instruction, Module, Phase, Program, integers, quantity

COMPUTE = ("encode", "forward", "backward", "weight", "denoise", "decode")
GRADIENT = (Phase.BACKWARD, Phase.WEIGHT)
PHASES = {
    "encode": (Phase.ENCODE,),
    "forward": (Phase.TRAIN, Phase.FORWARD),
    "backward": (Phase.TRAIN, Phase.BACKWARD),
    "weight": (Phase.WEIGHT,),
    "denoise": (Phase.DENOISE,),
    "decode": (Phase.DECODE,),
}


BACKWARDS = ("backward", "weight")
"""Which make gradients of parameters."""


READS_GRADIENTS = ("norm", "step", "learn")
"""Of a stage, and after the all-reduces above them: they read whole gradients, or stand behind what does."""


@dataclass(frozen=True)
class Values:
    """The values of one lowered module."""

    module: Module

    @cached_property
    def cascades(self) -> dict[str, Cascade]:
        return {cascade.name: cascade for cascade in self.module.cascades}

    @cached_property
    def trained(self) -> frozenset[str]:
        return frozenset(stage.name for stage in self.module.stages if stage.trained)

    @cached_property
    def _saved(self) -> dict[str, tuple[str, ...]]:
        """For every cascade that computes gradients, the cascades whose saved tensors it reads."""
        return {cascade.name: tuple(self._saved_inputs(cascade)) for cascade in self.module.cascades}

    def _saved_inputs(self, cascade: Cascade) -> Iterator[str]:
        if cascade.phase is Phase.TRAIN:
            yield cascade.name
        if cascade.phase not in GRADIENT:
            return
        for name in cascade.inputs:
            source = self.cascades.get(name)
            if source and source.phase in (Phase.FORWARD, Phase.BACKWARD) and source.stage == cascade.stage:
                yield name

    def saves(self, instruction: Instruction) -> bool:
        """Whether this keeps tensors for a later backward or weight on its rank."""
        cascade = self.cascades.get(instruction.target)
        if instruction.op == "forward":
            return cascade is not None and cascade.stage in self.trained
        return instruction.op == "backward" and cascade is not None and cascade.phase is Phase.BACKWARD

    def saved_reads(self, instruction: Instruction) -> tuple[str, ...]:
        """The cascades whose saved tensors this instruction reads, on its own rank."""
        if instruction.op not in BACKWARDS:
            return ()
        return self._saved[instruction.target]

    def reads(self, instruction: Instruction) -> tuple[str, ...]:
        """The values this instruction needs on its rank."""
        op, target = instruction.op, instruction.target
        if op in ("send", "free"):
            return (target,)
        if op not in COMPUTE:
            return ()
        cascade = self.cascades[target]
        saved = self.saved_reads(instruction)
        own = tuple(name for name in cascade.inputs if name not in saved)
        # A backward needs its forward's inputs too: autograd, or recomputation, reads them again.
        forwards = (self.cascades[name] for name in saved if name != target)
        again = tuple(i for forward in forwards if forward.phase is Phase.FORWARD for i in forward.inputs)
        return own + again

    def makes(self, instruction: Instruction) -> str | None:
        """The value that is on this rank once the instruction is done."""
        op, target = instruction.op, instruction.target
        if op in ("encode", "denoise", "decode", "receive"):
            return target
        if op == "forward" and self.cascades[target].phase is Phase.FORWARD:
            return target
        # a rank's gradient of its stage's input
        if op == "backward" and self.cascades[target].phase is Phase.BACKWARD:
            return target
        return None

    def last_saved_reads(self, program: Program) -> dict[str, int]:
        """For every cascade, the number of the last instruction of this program that reads what it saved."""
        return {
            name: index
            for index, instruction in enumerate(program.instructions)
            for name in self.saved_reads(instruction)
        }


def split_backwards(module: Module) -> frozenset[str]:
    """The cascades of phase backward that leave their weight gradients to a cascade of phase weight."""
    phases = {cascade.name: cascade.phase for cascade in module.cascades}
    weights = (cascade for cascade in module.cascades if cascade.phase is Phase.WEIGHT)
    return frozenset(name for weight in weights for name in weight.inputs if phases.get(name) is Phase.BACKWARD)


def gib(instruction: Instruction, name: str) -> float:
    value = instruction.attrs.get(name)
    return 0.0 if value is None else quantity(value)


def bucket_of(instruction: Instruction) -> tuple[tuple[int, ...], bool] | None:
    """The layers of a reduce and whether it holds the rest; None for a reduce of all of its stage's gradients."""
    attrs = instruction.attrs
    if "layers" not in attrs and "rest" not in attrs:
        return None
    return integers(attrs.get("layers", ())), attrs.get("rest") is True


def moved_by(instruction: Instruction) -> Hashable:
    """What of its stage's gradients or parameters a collective moves: a bucket, layers, what parts share, or all."""
    return bucket_of(instruction), instruction.attrs.get("tied")


def overlapped_reduces(program: Program) -> dict[int, list[int]]:
    """Index of a backward, or of its ``weight``, to the indices of the reduces that start inside it.

    Those are the reduces with ``early``; each belongs to the last of these above it.
    """
    by_backward: dict[int, list[int]] = {}
    last: int | None = None
    for index, instruction in enumerate(program.instructions):
        if instruction.op in BACKWARDS:
            last = index
        elif instruction.op == "reduce" and "early" in instruction.attrs and last is not None:
            by_backward.setdefault(last, []).append(index)
    return by_backward


def written(instruction: Instruction) -> str:
    """The instruction as the IR writes it, without attributes except those that say what it moves."""
    sigil = "@" if instruction.op in STAGE_OPS else "%"
    word = {"send": " to ", "receive": " from "}.get(instruction.op, " on ")
    peers = instruction.peers
    where = ""
    if peers:
        where = word + (str(peers[0]) if word != " on " and len(peers) == 1 else rank_list(peers))
    named = [f"{n} = {rank_list(integers(instruction.attrs[n]))}" for n in ("layers", "tied") if n in instruction.attrs]
    named += ["rest = true"] if instruction.attrs.get("rest") is True else []
    parts = f" {{ {', '.join(named)} }}" if named else ""
    return f"{instruction.op} {sigil}{instruction.target}{where}{parts}"


@lru_cache(maxsize=1024)
def rank_list(ranks: tuple[int, ...]) -> str:
    """``[0..3, 7]``, as the IR writes it."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{r[0]}..{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return "[" + ", ".join(parts) + "]"
