"""The process groups that a program's instructions need."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.handoffs import directed_pairs
from arachnec.backends.torch_distributed.interpreter import grid_of
from arachnec.ir.nodes import Cascade, Instruction, Module
from arachnec.kernels.attention.process_groups import subgroups

Channels = Mapping[tuple[int, int], dist.ProcessGroup]


def wanted_groups(module: Module) -> list[tuple[int, ...]]:
    """Every process group that collectives of cascades use; the same list on every rank."""
    cascades = {cascade.name: cascade for cascade in module.cascades}
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(group for step in steps for group in _groups_of(step, cascades)))


def wanted_sums(module: Module) -> list[tuple[int, ...]]:
    """The ranks of every gradient sum; the same list on every rank."""
    steps = [step for program in module.programs for step in program.instructions]
    return list(dict.fromkeys(step.peers for step in steps if step.op == "reduce"))


def directed_channels(module: Module, existing: Channels, device: torch.device) -> Channels:
    """A group for each (from, to) of the program's handoffs that has none yet. Collective.

    Only NCCL needs them: it runs what two ranks send each other, in both directions, one after the other in the order
    it was posted, so a receive posted early would hold up a send the other way. gloo matches each direction by itself.
    """
    if device.type != "cuda":
        return {}
    missing = [pair for pair in directed_pairs(module.programs) if pair not in existing]
    return {pair: dist.new_group(sorted(pair)) for pair in missing}


def _groups_of(step: Instruction, cascades: Mapping[str, Cascade]) -> tuple[tuple[int, ...], ...]:
    if len(step.peers) < 2:
        return ()
    if step.op == "encode":
        return (step.peers,)
    if step.op == "forward":
        _, ulysses, ring = grid_of(step, cascades[step.target])
        return subgroups(step.peers, ulysses, ring)
    return ()
