"""What kind of work an operation is, by its name: the table that fusion goes by.

Memory-intensive operations (element-wise, reductions, joins and writes of slices) can share a kernel; views cost
nothing and follow their readers; everything else computes too much to be worth it, or is not known, and stays apart.
"""

from __future__ import annotations

from enum import Enum

from arachnec.ir.nodes import GraphOp


class Kind(Enum):
    """What fusion may do with an operation; of those that stay outside, why."""

    VIEW = "a view"
    POINTWISE = "element-wise"
    REDUCTION = "a reduction"
    JOIN = "a write of slices"
    HEAVY = "products, convolutions and attention are kernels of their own"
    GLOBAL = "it takes numbers of all rows before any row is done"
    LOOKUP = "reads by an index are not fused"
    SOURCE = "tensors made of sizes alone are not fused"
    RANDOM = "random numbers stay those that the model would draw"
    OTHER = "not in the table of operations that share kernels"


_VIEWS = """reshape view _unsafe_view unsqueeze squeeze expand expand_as permute transpose t slice select unbind split
    split_with_sizes chunk narrow flatten unflatten alias detach view_as_complex view_as_real movedim diagonal"""
_POINTWISE = """add sub rsub mul div pow neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan
    tanh
    atan atan2 sigmoid silu gelu relu leaky_relu elu softplus mish hardswish hardsigmoid hardtanh erf erfc square
    maximum minimum clamp clamp_min clamp_max where to _to_copy type_as clone copy lerp addcmul addcdiv masked_fill
    logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not eq ne lt le gt ge isnan isinf floor ceil round
    trunc fmod remainder float half bfloat16 contiguous glu zeros_like ones_like full_like sgn frac nan_to_num threshold
    log_sigmoid hypot xlogy polar complex conj"""
_REDUCTIONS = """layer_norm native_layer_norm rms_norm _fused_rms_norm softmax _softmax log_softmax _log_softmax
    mean sum amax amin var std var_mean std_mean norm linalg_vector_norm logsumexp"""
_JOINS = "cat stack slice_scatter select_scatter constant_pad_nd pad repeat repeat_interleave flip roll"
_HEAVY = """linear mm bmm matmul addmm baddbmm einsum scaled_dot_product_attention convolution conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention dot mv addmv outer fft_fft fft_rfft"""
_GLOBAL = """group_norm native_group_norm batch_norm native_batch_norm instance_norm cumsum cumprod sort argsort topk
    argmax argmin unique nonzero"""
_LOOKUP = (
    "embedding index index_select gather take scatter scatter_add index_add index_put masked_select take_along_dim"
)
_SOURCE = "arange zeros ones full empty new_zeros new_ones new_full new_empty empty_like eye linspace scalar_tensor"
_RANDOM = "rand randn randint rand_like randn_like bernoulli dropout native_dropout multinomial randperm normal"

_KINDS = {
    name: kind
    for kind, names in (
        (Kind.VIEW, _VIEWS),
        (Kind.POINTWISE, _POINTWISE),
        (Kind.REDUCTION, _REDUCTIONS),
        (Kind.JOIN, _JOINS),
        (Kind.HEAVY, _HEAVY),
        (Kind.GLOBAL, _GLOBAL),
        (Kind.LOOKUP, _LOOKUP),
        (Kind.SOURCE, _SOURCE),
        (Kind.RANDOM, _RANDOM),
    )
    for name in names.split()
}

DTYPE_BYTES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "i1": 1,
    "complex64": 8, "complex128": 16, "c64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def stem(op: GraphOp) -> str:
    """``aten.layer_norm.default`` to ``layer_norm``."""
    return op.target.removeprefix("aten.").split(".")[0].rstrip("_") or op.target


def kind_of(op: GraphOp) -> Kind:
    """The kind of an operation of the captured graph. Names outside torch's own operator library are ``OTHER``."""
    if op.target == "getitem":
        return Kind.VIEW
    if not op.target.startswith("aten."):
        return Kind.OTHER
    return _KINDS.get(stem(op), Kind.OTHER)


def reduced_dims(op: GraphOp, rank: int) -> tuple[int, ...]:
    """The dimensions of its first operand, of ``rank`` dimensions, that a reduction runs over, counted from 0."""
    if "normalized_shape" in op.attrs:
        shape = op.attrs["normalized_shape"]
        return tuple(range(rank - len(shape), rank)) if isinstance(shape, tuple) else (rank - 1,)
    if stem(op) in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        return (rank - 1,)
    dim = op.attrs.get("dim")
    dims = dim if isinstance(dim, tuple) else (dim,)
    dims_of_op = tuple(d % rank for d in dims if type(d) is int and rank)
    return dims_of_op or tuple(range(rank))  # no dimension given: all of them


def values_read(op: GraphOp) -> list[str]:
    """The operands whose numbers an operation reads, each once: of some it only asks the shape or the type."""
    operands = list(dict.fromkeys(op.operands))
    if stem(op) == "type_as":
        return operands[:1]
    return [] if stem(op) in ("zeros_like", "ones_like", "full_like") else operands
