"""Done by importing it: what the first capture of a process imports and sets up, about half of its time."""

from __future__ import annotations

import gc
import warnings

import torch
from torch.export import Dim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _layer = torch.nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    _dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    torch.export.export(_layer, (torch.ones(2, 3, 4),), dynamic_shapes=_dynamic, strict=False).run_decompositions({})
gc.freeze()
