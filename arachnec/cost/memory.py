"""GiB that cascades hold on their ranks, and GiB that there are for them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from arachnec.analysis.communicators import most_resident_gib
from arachnec.cluster.device_kinds import Devices
from arachnec.cost.compute import Runs, is_divided, on_busiest_rank, runs_of, share_saved
from arachnec.cost.sparse_attention import lists_gib
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.host_placement import IN_FLIGHT, inputs_in_host
from arachnec.ir.nodes import Cascade, Clip, Module, Phase, Stage, formula
from arachnec.ir.parameter_cells import gathered_gib, scattered_gib, whole_gib
from arachnec.ir.sampling import CODING, as_forward, branches_of, is_sampling, on_one_side
from arachnec.ir.stage_sizes import block_count, evaluated, formula_in, gib, largest_share, term_value
from arachnec.ir.values import Formula

GIB = 2**30
GRADIENT = (Phase.BACKWARD, Phase.WEIGHT)
RESERVE = 0.06  # of a device's memory: communicators, fragmentation, what no formula knows


@dataclass(frozen=True)
class Memory:
    """What fits on the devices of a module's cluster."""

    module: Module
    devices: Devices
    _held: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False, compare=False)
    _received: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def stages(self) -> Mapping[str, Stage]:
        return {stage.name: stage for stage in self.module.stages}

    def of(self, cascade: Cascade, ranks: int, recompute: int, side: int = 1) -> float:
        """GiB that each of the cascade's ``ranks`` holds while it runs ``side`` clips side by side, so many blocks
        recomputed, without its ``state``."""
        key = (*_sizes_of(cascade), self.received(cascade, side), ranks, recompute, side, *self._grid_of(cascade))
        if key not in self._held:
            self._held[key] = self._of(cascade, ranks, recompute, side)
        return self._held[key]

    def _of(self, cascade: Cascade, ranks: int, recompute: int, side: int) -> float:
        stage = self.stages[cascade.stage]
        if cascade.phase in CODING:
            received = self.received(cascade) if cascade.phase is Phase.DECODE else 0.0
            return received + encoding_workspace(stage, cascade, ranks) + self.output(cascade)
        received = self.received(cascade, side)
        if cascade.phase is Phase.WEIGHT:  # its gradients are part of the state
            return received + scattered_gib(stage)
        cascade = on_one_side(cascade, side)
        share = largest_share(cascade, ranks // side)
        if cascade.phase in (Phase.TRAIN, Phase.FORWARD):  # a backward of its own finds the lists of keys saved
            received += lists_gib(stage, cascade, ranks // side, self._clip_of(cascade))
        if cascade.phase is Phase.TRAIN and "head" in stage.attrs and "recomputing" in stage.attrs:
            return received + evaluated(stage, "batch", cascade) + most_while_training(stage, cascade, share, recompute)
        total = gathered_gib(stage) + received
        if cascade.phase in (Phase.TRAIN, Phase.FORWARD):  # a backward of its own finds it saved
            total += saved_for_backward(stage, cascade, share, recompute)
            # what lies outside the blocks runs on whole sequences
            total += evaluated(stage, "shell", cascade) - divided(stage, "shell", cascade, share)
            total += evaluated(stage, "batch", cascade)
        if cascade.phase in (Phase.FORWARD, Phase.DENOISE):
            total += self.output(cascade)
        if cascade.phase is Phase.DENOISE:  # what lies outside the blocks runs on whole sequences
            forward = as_forward(cascade)
            total += lists_gib(stage, forward, ranks // side, self._clip_of(cascade))
            total += evaluated(stage, "shell", forward) + evaluated(stage, "batch", forward)
        if recompute and cascade.phase in (Phase.FORWARD, Phase.BACKWARD):  # a block that is run again saves all, then
            again = divided(stage, "recomputing", cascade, share)
            part = share_saved(runs_on(stage, cascade, share), recompute)
            total += again if cascade.phase is Phase.BACKWARD else -again * part
        return total + divided(stage, "workspace", as_forward(cascade), share)

    def host_inputs(self, cascade: Cascade, ranks: int, recompute: int, side: int = 1) -> float:
        """GiB of blocks' inputs that each of its ranks keeps in its host's memory until the backward has ended."""
        cascade = on_one_side(cascade, side)
        return offloaded(self.stages[cascade.stage], cascade, largest_share(cascade, ranks // side), recompute)

    def kept(self, cascade: Cascade, ranks: int, recompute: int, side: int = 1) -> float:
        """GiB of this that stay until the backward of a cascade of phase forward has ended."""
        stage, part = self.stages[cascade.stage], on_one_side(cascade, side)
        workspace = divided(stage, "workspace", part, largest_share(cascade, ranks // side))
        return self.of(cascade, ranks, recompute, side) - workspace - gathered_gib(stage)

    def received(self, cascade: Cascade, side: int = 1) -> float:
        """GiB of what its inputs hand off to each of its ranks; what the stage itself has saved is no handoff.

        Of an earlier stage every side gets what is its own.
        """
        key = (*_sizes_of(cascade), cascade.inputs, side)
        if key not in self._received:
            self._received[key] = self._sum_received(cascade, side)
        return self._received[key]

    def _sum_received(self, cascade: Cascade, side: int) -> float:
        producers = [self._named[name] for name in cascade.inputs if name in self._named]
        if cascade.phase in GRADIENT:
            return sum(self.handed(producer, cascade) / side for producer in producers)
        shared = cascade.phase is Phase.DENOISE  # branches read the same
        sizes = ((producer, self._outputs[producer.name]) for producer in producers)
        return sum(size if shared or producer.phase is Phase.ENCODE else size / side for producer, size in sizes)

    def handed(self, producer: Cascade, consumer: Cascade) -> float:
        """GiB that ``consumer`` reads of ``producer``'s value.

        A backward hands on the gradient of its stage's input, which is as large as the output of the consumer's stage.
        """
        if consumer.phase in GRADIENT and producer.stage == consumer.stage and producer.phase is not Phase.ENCODE:
            return 0.0
        return self.output(consumer if producer.phase in GRADIENT else producer)

    def _clip_of(self, cascade: Cascade) -> Clip | None:
        """One of its clips, whose shape is that of all; None for one that the module does not list."""
        return self._clips.get(cascade.clips[0]) if cascade.clips else None

    def _grid_of(self, cascade: Cascade) -> tuple[int, ...]:
        """Of a cascade with sparse layers its clips' pixels: the lists depend on the grid beside sizes."""
        clip = self._clip_of(cascade) if sparse_layers(cascade) else None
        return () if clip is None else (clip.frames, clip.height, clip.width)

    @cached_property
    def _clips(self) -> dict[int, Clip]:
        return {clip.id: clip for clip in self.module.clips}

    @cached_property
    def _named(self) -> dict[str, Cascade]:
        return {cascade.name: cascade for cascade in self.module.cascades}

    @cached_property
    def _outputs(self) -> dict[str, float]:
        return {cascade.name: self.output(cascade) for cascade in self.module.cascades}

    def output(self, cascade: Cascade) -> float:
        """GiB of what a stage hands off to each rank of a consumer."""
        return evaluated(self.stages[cascade.stage], "output", cascade)

    @cached_property
    def _everywhere(self) -> float:
        """GiB of the stages that lie on every rank."""
        return math.fsum(gib(stage.attrs.get("state")) for stage in self.module.stages if stage.name not in self._apart)

    @cached_property
    def _apart(self) -> frozenset[str]:
        """Stages that lie on the ranks of their cascades alone."""
        return stages_apart(self.module)

    def resident_with(self, stage: str) -> float:
        """GiB always on the ranks that hold this stage."""
        return self._everywhere + (gib(self.stages[stage].attrs.get("state")) if stage in self._apart else 0.0)

    @cached_property
    def resident(self) -> float:
        """GiB always on the ranks that hold most: parameters, gradients and optimizer state of their stages."""
        return max((self.resident_with(stage.name) for stage in self.module.stages), default=0.0)

    @cached_property
    def prepared(self) -> float:
        """GiB of the batch of a rank's next cascade, which is made ahead: the largest there is."""
        trained = (cascade for cascade in self.module.cascades if self.stages[cascade.stage].trained)
        return max((evaluated(self.stages[cascade.stage], "batch", cascade) for cascade in trained), default=0.0)

    @cached_property
    def communicators(self) -> float:
        """GiB of the communicators that the run makes at its start, on the rank that has most."""
        return most_resident_gib(self.devices.cluster, self.module.stages)

    def reserve(self, memory: float) -> float:
        """GiB that stay free of a device of so many: communicators, and what no formula knows."""
        return max(RESERVE * memory, self.communicators)

    def spare(self, memory: float) -> float:
        """GiB of the reserve that may hold values while they wait."""
        return self.reserve(memory) - self.communicators

    @cached_property
    def state(self) -> float:
        """GiB that no cascade may use on the ranks that hold most: ``resident``, the next batch and a reserve."""
        return self.resident + self.prepared + self.reserve(self.devices.cluster.memory)

    @cached_property
    def room(self) -> float:
        """GiB that cascades may use on every rank."""
        return self.devices.cluster.memory - self.state

    def room_on(self, ranks: Sequence[int] | None, degree: int, stage: str | None = None) -> float:
        """GiB that a cascade may use on these ranks, or on the ``degree`` ranks with most memory, where they hold a
        ``stage``; without it, where they hold most."""
        resident = self.resident if stage is None else self.resident_with(stage)
        if not self.devices.kinds:
            memory = self.devices.cluster.memory
            return memory - (resident + self.prepared + self.reserve(memory))
        memory = self.devices.memory_of(ranks, degree)
        return memory - self.reserve(memory) - resident - self.prepared

    def can_recompute(self, cascade: Cascade) -> bool:
        return cascade.phase in (Phase.TRAIN, Phase.FORWARD) and "saved_recompute" in self.stages[cascade.stage].attrs

    def recompute_at(
        self, cascade: Cascade, degree: int, ranks: Sequence[int] | None = None, side: int = 1
    ) -> int | None:
        """How many blocks the cascade must recompute to fit the memory at this degree; None where not even all help.

        Without ``ranks`` those with most memory count.
        """
        room, most = self.room_on(ranks, degree, cascade.stage), self.of(cascade, degree, 0, side)
        if most <= room:
            return 0
        blocks = block_count(self.stages[cascade.stage])
        if not self.can_recompute(cascade) or self.of(cascade, degree, blocks, side) > room:
            return None
        fewer = range(1, blocks)  # what is held never grows with them
        return 1 + bisect_left(fewer, True, key=lambda count: self.of(cascade, degree, count, side) <= room)


def _sizes_of(cascade: Cascade) -> tuple[object, ...]:
    """What a stage's formulas and its phase make of a cascade's memory depends on nothing else of it."""
    sizes = cascade.stage, cascade.phase, cascade.batch, cascade.tokens, cascade.text
    return *sizes, branches_of(cascade), cascade.attrs.get("sparse"), cascade.attrs.get("shards")


def encoding_workspace(stage: Stage, cascade: Cascade, ranks: int) -> float:
    """GiB that the busiest of an encoder's ranks needs while it runs; ranks that share a clip divide all but a part."""
    own = on_busiest_rank(cascade, stage, ranks)
    alone = evaluated(stage, "workspace", own)
    if not is_divided(cascade, stage, ranks):
        return alone
    held = min(alone, evaluated(stage, "held", own))
    return held + (alone - held) / ranks


def most_while_training(stage: Stage, cascade: Cascade, share: float, recompute: int) -> float:
    """GiB at the fuller of two moments, on a rank that has this ``share`` of the tokens.

    At the end of the forward everything is kept, and what lies behind the last block runs on whole sequences. It is
    gone when the first gradients of blocks are made. The blocks that were not recomputed come first in the backward,
    so that what they kept gives room to a block that runs again.
    """
    saved, further = divided(stage, "saved", cascade, share), 0.0
    if recompute and "saved_recompute" in stage.attrs:
        again = divided(stage, "recomputing", cascade, share)
        by_all = saved - (divided(stage, "saved_recompute", cascade, share) - again)
        by_all += inputs_gone(stage, cascade, share)
        part = share_saved(runs_on(stage, cascade, share), recompute) * by_all
        saved, further = saved - part, max(0.0, again - (by_all - part))
    saved += evaluated(stage, "shell", cascade) - divided(stage, "shell", cascade, share)
    kept, alive = head_of(stage, cascade)
    behind = max(divided(stage, "workspace", cascade, share), alive - kept) + whole_gib(stage)
    blocks = further + divided(stage, "workspace", cascade, share) + gathered_gib(stage) - kept
    return saved + max(behind, blocks)


def head_of(stage: Stage, cascade: Cascade) -> tuple[float, float]:
    """GiB behind the last block: kept for the backward, and the most alive while it runs."""
    values = stage.attrs["head"]
    assert isinstance(values, tuple)
    kept, alive = (formula(value)(B=cascade.batch, S=cascade.tokens, T=cascade.text) for value in values)
    return kept, alive


def saved_for_backward(stage: Stage, cascade: Cascade, share: float, recompute: int) -> float:
    """GiB kept by a rank that has this ``share`` of the tokens, so many blocks recomputed."""
    saved = divided(stage, "saved", cascade, share)
    if not recompute or "saved_recompute" not in stage.attrs:
        return saved
    least = divided(stage, "saved_recompute", cascade, share)
    least -= inputs_gone(stage, cascade, share)
    return saved - share_saved(runs_on(stage, cascade, share), recompute) * (saved - least)


def inputs_gone(stage: Stage, cascade: Cascade, share: float) -> float:
    """GiB that inputs in host memory spare the device where every block runs again: all but those on their way."""
    blocks = block_count(stage)
    return offloaded(stage, cascade, share, blocks) * max(0, blocks - IN_FLIGHT) / blocks


def offloaded(stage: Stage, cascade: Cascade, share: float, recompute: int) -> float:
    """GiB in its host's memory of a rank that has this ``share`` of the tokens: inputs of blocks that run again."""
    if not inputs_in_host(stage) or cascade.phase not in (Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD):
        return 0.0
    return divided(stage, "host_inputs", cascade, share) * recompute / block_count(stage)


def runs_on(stage: Stage, cascade: Cascade, share: float) -> Runs:
    """What recomputing each block saves on a rank that has this ``share`` of the tokens."""
    return runs_of(stage, lambda formula: divided_formula(formula, cascade, share))


def stages_apart(module: Module) -> frozenset[str]:
    """Stages of a pipeline or a sampling chain: their parameters lie where their cascades run, and nowhere else.

    Encoders and stages of ``train`` cascades lie on every rank, so that the next iteration may place these anywhere.
    """
    if is_sampling(module):
        return frozenset(stage.name for stage in module.stages)
    phases: dict[str, set[Phase]] = {stage.name: set() for stage in module.stages}
    for cascade in module.cascades:
        phases.setdefault(cascade.stage, set()).add(cascade.phase)
    return frozenset(
        stage.name
        for stage in module.stages
        if "part_of" in stage.attrs or (phases[stage.name] and not phases[stage.name] & {Phase.TRAIN, Phase.ENCODE})
    )


def divided(stage: Stage, name: str, cascade: Cascade, share: float) -> float:
    """A stage's formula ``name`` for a cascade on a rank that has this ``share`` of the tokens; 0 without a formula."""
    value = formula_in(stage, name)
    return 0.0 if value is None else divided_formula(value, cascade, share)


def divided_formula(formula: Formula, cascade: Cascade, share: float) -> float:
    """A formula for a cascade on a rank that has this ``share`` of the tokens."""
    return math.fsum(term_value(term, cascade) * (share if "S" in dict(term.powers) else 1.0) for term in formula.terms)
