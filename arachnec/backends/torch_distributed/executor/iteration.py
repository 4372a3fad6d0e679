"""One iteration on one rank: what it is to do, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from arachnec.analysis.receive_prefetch import Prefetched, prefetch_receives
from arachnec.analysis.uses import Values
from arachnec.backends.cascade_step import not_finite
from arachnec.backends.torch_distributed.batches.set_aside import LeftOut
from arachnec.backends.torch_distributed.executor.shared_clips import Digest, Makers, own_part, own_program
from arachnec.backends.torch_distributed.executor.stage_messages import StageMessages
from arachnec.backends.torch_distributed.plans.supported import demand_supported
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Module, Program
from arachnec.runtime.device_runtime import OnHost
from arachnec.runtime.handoffs import TensorSpec


@dataclass(frozen=True)
class Share:
    """What an iteration is of an optimizer step over several: whether it ``begins`` it, whether it ``ends`` it with the
    update, and the part of the step's ``clips`` that are its own. Of those before ``left_out`` were set aside. One that
    ``measures`` is run for its loss alone."""

    begins: bool = True
    ends: bool = True
    part: float = 1.0
    clips: int = 0  # 0: the iteration's own
    left_out: int = 0
    measures: bool = False


WHOLE = Share()


@dataclass(frozen=True)
class Iteration:
    """What a rank is to do in one iteration."""

    module: Module
    program: Program
    clips: Mapping[int, VideoClip]
    specs: Mapping[str, TensorSpec]  # of every value received, by cascade
    step: int
    prefetched: Prefetched
    given: Mapping[str, OnHost]  # what was encoded in an earlier step, by cascade
    share: Share = WHOLE
    messages: StageMessages | None = None  # of a model in stages, where they were worked out before
    compares: Makers = field(default_factory=dict)  # batches whose digests the ranks compare

    @classmethod
    def of(
        cls,
        module: Module,
        rank: int,
        clips: Mapping[int, VideoClip],
        specs: Mapping[str, TensorSpec],
        step: int,
        given: Mapping[str, OnHost] | None = None,
        messages: StageMessages | None = None,
    ) -> Iteration:
        """Raises ``UserError`` for an instruction that this back end does not know."""
        program = program_of(module, rank)
        demand_supported(module, [program])
        limit = module.cluster.memory if module.cluster else 0.0
        given = given or {}
        prefetched = prefetch_receives(Values(module), program, limit, given)
        return cls(module, own_program(program), clips, specs, step, prefetched, given, messages=messages)


@dataclass
class Run:
    """What one rank's step came to."""

    loss: float = 0.0  # this rank's share of the objective
    norm: Tensor | None = None  # of the gradient before clipping
    values: dict[str, OnHost] = field(default_factory=dict)  # that are here, or on their way
    losses: dict[str, Tensor] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)  # of the objective, by cascade
    rows: dict[str, Tensor] = field(default_factory=dict)  # whether each clip of a cascade is finite
    left_out: LeftOut = field(default_factory=LeftOut)
    digests: dict[tuple[int, ...], Digest] = field(default_factory=dict)  # of batches to compare, by their clips
    lacked_keys: bool = False  # nothing was updated: more keys were chosen than there was room for

    def not_finite(self, iteration: Iteration, rank: int) -> list[str | int]:
        """The clips, by name, whose loss on this rank is not finite. Waits for the device."""
        own = {c.name: own_part(c, rank).clips for c in iteration.module.cascades if c.name in self.shares}
        named = {name: [iteration.clips[clip].id for clip in clips] for name, clips in own.items()}
        return not_finite(self.shares, self.rows, named)


def program_of(module: Module, rank: int) -> Program:
    return next((p for p in module.programs if p.rank == rank), Program(rank, ()))
