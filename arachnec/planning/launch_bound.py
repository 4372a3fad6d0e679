"""How many short clips a micro-batch takes so that launches are not what it waits for.

A forward of few tokens takes as long as its kernels take to launch (``block_overhead`` of the device, for each block),
whatever it computes. So short clips of equal shape share a micro-batch until computing takes ``ENOUGH`` times as long
as launching, however short the longest clip of all is; unless memory does not hold so many without recomputation, or
ranks would be left without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arachnec.cluster.device_specs import block_overhead_of
from arachnec.ir.nodes import Clip, Module, Stage, quantity
from arachnec.ir.stage_sizes import blocks_run, formula_in
from arachnec.planning.cell_batches import most_in_memory

ENOUGH = 2.0  # times as long as a forward's launches: they are hidden


@dataclass(frozen=True)
class Launches:
    """``wanted`` TFLOP of each rank's part of a micro-batch: enough to hide its launches, or as much as there is for
    every rank."""

    wanted: float

    @classmethod
    def of(cls, module: Module, stage: Stage, several: int) -> Launches | None:
        """Where there is work for ``several`` micro-batches a rank that hide their launches, these may be smaller than
        an even share. None where nothing says what launches and clips take."""
        flops, cluster = formula_in(stage, "flops"), module.cluster
        if flops is None or cluster is None or "flops" not in cluster.attrs:
            return None
        launches = block_overhead_of(cluster) * max(1, blocks_run(stage))
        enough = ENOUGH * launches * 1e-3 * quantity(cluster.attrs["flops"])
        work = math.fsum(flops(B=1, S=clip.tokens, T=clip.text) for clip in module.clips) / cluster.world
        if enough <= 0 or work <= 0:
            return None
        rounds = max(1, math.floor(work / enough))
        return cls(enough if rounds >= several else work / rounds)

    def clips_on_a_rank(self, module: Module, stage: Stage, clip: Clip) -> int:
        """How many such clips share a micro-batch, for each of its ranks; 1 or fewer where one is enough."""
        flops = formula_in(stage, "flops")
        assert flops is not None
        one = flops(B=1, S=clip.tokens, T=clip.text)
        held = most_in_memory(module, stage, clip, 1)
        # rounded up: an even share leaves no rest for another round
        return math.ceil(min(self.wanted / one - 1e-9, held - 1)) if one > 0 else 1
