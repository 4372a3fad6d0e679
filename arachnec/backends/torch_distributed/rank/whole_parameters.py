"""The shapes of a model's parameters, on a rank that may have pieces of them, or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.torch_distributed.rank.cell_parameters import CellParameters
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank


def whole_parameters(
    parameters: Mapping[str, Tensor], cells: CellParameters | None, pipeline: PipelineRank | None
) -> Mapping[str, Tensor]:
    """All parameters of the model that train, by name, whole; on the meta device where this rank has not all."""
    if pipeline is not None:
        return trained_parameters(pipeline.cuts.model)
    if cells is None:
        return parameters
    flats = (flat for stage in cells.stages.values() for flat in stage.trained)
    slots = {
        slot.name: torch.empty(slot.shape, dtype=flat.layout.dtype, device="meta")
        for flat in flats
        for slot in flat.layout.slots
    }
    return {**cells.whole, **slots}
