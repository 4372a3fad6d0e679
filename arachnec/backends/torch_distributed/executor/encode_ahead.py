"""The next step's first encoders, run while this step's gradients are on their way.

An encoder is frozen and reads a clip, nothing else: what it makes does not depend on the step in which it runs. So a
rank that has nothing to do but wait may encode what its next program begins with, as far as memory goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from arachnec.analysis.receive_prefetch import planned_memory
from arachnec.analysis.uses import Values
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Module, Program
from arachnec.runtime.device_runtime import OnHost

BEFORE = ("gather", "encode", "send", "receive", "free")  # what a program begins with while no model has run


@dataclass
class Ahead:
    """What may be encoded ahead for one program, and what has been."""

    module: Module
    todo: list[Cascade]
    clips: Mapping[int, VideoClip] = field(default_factory=dict)  # of that program's step
    values: dict[str, OnHost] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Module, program: Program, limit: float, clips: Mapping[int, VideoClip] | None = None) -> Ahead:
        """The longest beginning of the program's encoders whose values fit ``limit`` GiB together from the start on."""
        values = Values(module)
        todo: list[Cascade] = []
        for name in encoders_first(program):
            names = {chosen.name for chosen in todo} | {name}
            cascade = values.cascades[name]
            if cascade.inputs or max(planned_memory(values, program, names)) > limit:
                break
            todo.append(cascade)
        return cls(module, todo, clips or {})

    def run(self, encode: Callable[[Cascade], OnHost], waiting: Callable[[], bool]) -> None:
        """Encode one after the other for as long as there is something to wait for."""
        while self.todo and waiting():
            cascade = self.todo.pop(0)
            self.values[cascade.name] = encode(cascade)


def encoders_first(program: Program) -> list[str]:
    """The cascades that a rank encodes by itself before it does anything else."""
    names: list[str] = []
    for instruction in program.instructions:
        if instruction.op not in BEFORE or (instruction.op == "encode" and len(instruction.peers) > 1):
            break
        if instruction.op == "encode":
            names.append(instruction.target)
    return names
