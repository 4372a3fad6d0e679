"""Which kernel family a forward's attention takes: what the program names, where this device can run it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from arachnec.analysis.communicators import grid
from arachnec.ir.nodes import Instruction, Module, Stage
from arachnec.kernels.attention.attention_backend import attention_backend
from arachnec.kernels.attention.fused_attention import capability_of
from arachnec.lowering.programs import demand_known, head_size
from arachnec.tracing.graph import dtype_name


def precision_of(model: nn.Module) -> str:
    """That of most parameters, whatever their size: a rank may not hold them now. An executable may be planned for
    another, and a run that asks for none leaves the model as it was built."""
    counts = Counter(parameter.dtype for parameter in model.parameters())
    return dtype_name(counts.most_common(1)[0][0]) if counts else "f32"


def attention_of(forward: Instruction, stage: Stage, dtype: str, device: torch.device) -> str | None:
    """The family for the forward's unmasked self-attention; None where the stage does not say its heads.

    ``dtype`` is the precision of the model that runs. What was named for another is chosen anew. Raises UserError for a
    name that no family has.
    """
    named = forward.attrs.get("attention")
    if named is not None:
        demand_known(named, forward)
    size = head_size(stage)
    if stage.attrs.get("dtype", dtype) != dtype:
        named = None
    preferred = None if named is None else str(named)
    if size is None:
        return preferred
    return attention_backend(capability_of(device), dtype, size, preferred=preferred)


def attention_by_grid(module: Module, dtype: str, device: torch.device) -> dict[str, str]:
    """The family of every grid that the module's programs use: ``ulysses 4 x ring 2`` to ``cudnn``."""
    stages = {stage.name: stage for stage in module.stages}
    cascades = {cascade.name: cascade for cascade in module.cascades}
    families: dict[str, set[str]] = {}
    for program in module.programs:
        for step in program.instructions:
            if step.op == "forward":
                family = attention_of(step, stages[cascades[step.target].stage], dtype, device)
                ulysses, ring = grid(step)
                words = f"ulysses {ulysses} x ring {ring}"
                families.setdefault(words, set()).add(family or "chosen by each call")
    return {words: ", ".join(sorted(names)) for words, names in sorted(families.items())}
