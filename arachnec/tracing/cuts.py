"""A dataflow cut into stages. In: the blocks of every stage. Out: who calls what, and what goes from stage to stage.

A unit outside the blocks runs where the forward comes to it: with the block before it, or with the first. A tensor that
several later stages need is handed from each stage to the next, so that a stage hears from its neighbours alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from arachnec.ir.diagnostic import UserError
from arachnec.tracing.dataflow import CannotFollow, Dataflow, Output, Source


@dataclass(frozen=True, eq=False)
class Cut:
    """``parts`` are the paths of each stage's blocks, in the order in which they run."""

    flow: Dataflow
    parts: tuple[tuple[str, ...], ...]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of every call. Raises ``UserError`` where the model comes back to the blocks of an earlier one."""
        of = {path: number for number, part in enumerate(self.parts) for path in part}
        stages, now = [], 0
        for call in self.flow.calls:
            if call.is_block:
                if of[call.path] < now:
                    raise UserError(CannotFollow(None, call.path, "is called again after blocks of a later stage"))
                now = of[call.path]
            stages.append(now)
        return tuple(stages)

    @cached_property
    def _needs(self) -> tuple[frozenset[Source], ...]:
        """What the units of every stage, and at the end the prediction, are computed from."""
        needs: list[set[Source]] = [set() for _ in self.parts]
        for call, stage in zip(self.flow.calls, self.stages, strict=True):
            needs[stage] |= call.reads
        needs[-1] |= self.flow.prediction
        return tuple(map(frozenset, needs))

    def handed_on(self, stage: int) -> tuple[Output, ...]:
        """What goes from a stage to the next one."""
        return self._handed_on[stage]

    @cached_property
    def _handed_on(self) -> tuple[tuple[Output, ...], ...]:
        handed: list[tuple[Output, ...]] = []
        for stage in range(len(self.parts)):
            later = frozenset().union(*self._needs[stage + 1 :])
            handed.append(tuple(sorted(x for x in later if isinstance(x, Output) and self.stages[x.call] <= stage)))
        return tuple(handed)

    @cached_property
    def parameters(self) -> tuple[frozenset[str], ...]:
        """The parameters that every stage computes with; those that nobody reads are the first one's."""
        owned: list[set[str]] = [{x for x in needs if isinstance(x, str)} for needs in self._needs]
        for call, stage in zip(self.flow.calls, self.stages, strict=True):
            owned[stage] |= set(call.parameters)
        return tuple(map(frozenset, owned))

    def bytes_on(self, stage: int) -> int:
        """Of what goes from a stage to the next one."""
        return sum(self.flow.form(output).bytes for output in self.handed_on(stage))

    def block_bytes_on(self, stage: int) -> int:
        """Of this, what blocks have made."""
        of_blocks = (output for output in self.handed_on(stage) if self.flow.calls[output.call].is_block)
        return sum(self.flow.form(output).bytes for output in of_blocks)


def single_blocks(layers: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Every block a stage of its own."""
    return tuple((layer,) for layer in layers)
