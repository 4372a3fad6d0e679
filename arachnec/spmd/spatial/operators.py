"""What ranks do for every operator that they can share: the table."""

from __future__ import annotations

import torch

from arachnec.spmd.spatial.peers import Peers
from arachnec.spmd.spatial.pointwise import alike, cat, pointwise, stack
from arachnec.spmd.spatial.reductions import (
    attention,
    group_norm,
    linear,
    matrix_product,
    matrix_product_and,
    moments,
    reduction,
    running_norm,
    trailing_norm,
    vector_norm,
)
from arachnec.spmd.spatial.shape_rules import (
    along_one,
    expand,
    index_select,
    new,
    parts,
    permute,
    pixel_shuffle,
    pixel_unshuffle,
    repeat,
    select,
    slice_,
    squeeze,
    transpose,
    unbind,
    unsqueeze,
    view,
)
from arachnec.spmd.spatial.split_tensor import Rule, Sharing
from arachnec.spmd.spatial.windows import (
    average_pool,
    convolution,
    enlarge,
    pad,
    reflection_pad,
    replication_pad,
)

RULES: tuple[tuple[Rule, str], ...] = (
    (pointwise, "copy_ fill_ zero_ where masked_fill clamp"),
    (alike, "clone detach alias contiguous lift_fresh _to_copy empty_like zeros_like ones_like full_like"),
    (new, "new_zeros new_ones new_empty new_full new_empty_strided"),
    (cat, "cat"),
    (stack, "stack"),
    (view, "view _unsafe_view reshape _reshape_alias"),
    (permute, "permute"),
    (transpose, "transpose t"),
    (pixel_unshuffle, "pixel_unshuffle"),
    (pixel_shuffle, "pixel_shuffle"),
    (unsqueeze, "unsqueeze"),
    (squeeze, "squeeze"),
    (expand, "expand"),
    (slice_, "slice"),
    (select, "select"),
    (parts, "split split_with_sizes"),
    (unbind, "unbind"),
    (repeat, "repeat"),
    (along_one, "_softmax _log_softmax cumsum"),
    (index_select, "index_select"),
    (convolution, "convolution"),
    (average_pool, "avg_pool2d avg_pool3d"),
    (pad, "constant_pad_nd"),
    (replication_pad, "replication_pad1d replication_pad2d replication_pad3d"),
    (reflection_pad, "reflection_pad1d reflection_pad2d reflection_pad3d"),
    (enlarge, "upsample_nearest1d upsample_nearest2d upsample_nearest3d"),
    (enlarge, "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"),
    (group_norm, "native_group_norm"),
    (trailing_norm, "native_layer_norm _fused_rms_norm"),
    (running_norm, "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm"),
    (reduction, "mean sum amax amin"),
    (vector_norm, "linalg_vector_norm"),
    (moments, "var var_mean"),
    (matrix_product, "mm bmm"),
    (matrix_product_and, "addmm baddbmm"),
    (linear, "linear"),
)


def sharing(peers: Peers, grid: tuple[int, ...]) -> Sharing:
    """The ranks of a grid with all that they know how to share."""
    operators: dict[object, Rule] = {
        getattr(torch.ops.aten, name): rule for rule, names in RULES for name in names.split()
    }
    functions: dict[object, Rule] = {torch.nn.functional.scaled_dot_product_attention: attention}
    return Sharing(peers, grid, operators, functions, pointwise)
