"""Which kernel family a forward's attention takes: what the program names, where this device can run it."""

from __future__ import annotations

import torch

from arachnec.analysis.communicators import grid
from arachnec.ir.nodes import Instruction, Module, Stage
from arachnec.kernels.attention.attention_backend import attention_backend
from arachnec.kernels.attention.fused_attention import capability_of
from arachnec.lowering.attention import demand_known, head_size

DTYPES = {"fp32": "f32", "bf16": "bf16"}


def attention_of(forward: Instruction, stage: Stage, dtype: str, device: torch.device) -> str | None:
    """The family for the forward's unmasked self-attention; None where the stage does not say its heads.

    ``dtype`` is the run's precision. What was named for another precision is chosen anew. Raises UserError for a name
    that no family has.
    """
    named = forward.attrs.get("attention")
    if named is not None:
        demand_known(named, forward)
    size, precision = head_size(stage), DTYPES[dtype]
    if stage.attrs.get("dtype", precision) != precision:
        named = None
    preferred = None if named is None else str(named)
    if size is None:
        return preferred
    return attention_backend(capability_of(device), precision, size, preferred=preferred)


def attention_by_grid(module: Module, dtype: str, device: torch.device) -> dict[str, str]:
    """The family of every grid that the module's programs use: ``ulysses 4 x ring 2`` to ``cudnn``."""
    stages = {stage.name: stage for stage in module.stages}
    cascades = {cascade.name: cascade for cascade in module.cascades}
    families: dict[str, set[str]] = {}
    for program in module.programs:
        for step in program.instructions:
            if step.op == "forward":
                family = attention_of(step, stages[cascades[step.target].stage], dtype, device)
                families.setdefault(_grid(step), set()).add(family or "chosen by each call")
    return {words: ", ".join(sorted(names)) for words, names in sorted(families.items())}


def _grid(forward: Instruction) -> str:
    ulysses, ring = grid(forward)
    return f"ulysses {ulysses} x ring {ring}"
