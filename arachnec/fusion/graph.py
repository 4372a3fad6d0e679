"""A graph indexed for fusion: kinds of work by name, readers and producers as bit sets, rows of operations, bytes of
values.

A set of operations is an integer whose bit i stands for operation i of the graph; paths through the graph are tested
with a few ``&`` and ``|``. *Core* operations launch a kernel and are memory-intensive; views stand between them.

Memory-intensive operations (element-wise, reductions, joins and writes of slices) can share a kernel; views cost
nothing and follow their readers; everything else computes too much to be worth it, or is not known, and stays apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import sympy

from arachnec.fusion.shape_constraints import ShapeConstraints
from arachnec.ir.nodes import Graph, GraphOp


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


_NAMES = {
    Kind.VIEW: """reshape view _unsafe_view unsqueeze squeeze expand expand_as permute transpose t slice select
        unbind split split_with_sizes chunk narrow flatten unflatten alias detach view_as_complex view_as_real
        movedim diagonal""",
    Kind.POINTWISE: """add sub rsub mul div pow neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal
        sin cos tan tanh atan atan2 sigmoid silu gelu relu leaky_relu elu softplus mish hardswish hardsigmoid
        hardtanh erf erfc square maximum minimum clamp clamp_min clamp_max where to _to_copy type_as clone copy
        lerp addcmul addcdiv masked_fill logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not eq
        ne lt le gt ge isnan isinf floor ceil round trunc fmod remainder float half bfloat16 contiguous glu
        zeros_like ones_like full_like sgn frac nan_to_num threshold log_sigmoid hypot xlogy polar complex conj""",
    Kind.REDUCTION: """layer_norm native_layer_norm rms_norm _fused_rms_norm softmax _softmax log_softmax
        _log_softmax mean sum amax amin var std var_mean std_mean norm linalg_vector_norm logsumexp""",
    Kind.JOIN: "cat stack slice_scatter select_scatter constant_pad_nd pad repeat repeat_interleave flip roll",
    Kind.HEAVY: """linear mm bmm matmul addmm baddbmm einsum scaled_dot_product_attention convolution conv1d conv2d
        conv3d conv_transpose1d conv_transpose2d conv_transpose3d _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention dot mv addmv outer fft_fft
        fft_rfft""",
    Kind.GLOBAL: """group_norm native_group_norm batch_norm native_batch_norm instance_norm cumsum cumprod sort
        argsort topk argmax argmin unique nonzero""",
    Kind.LOOKUP: """embedding index index_select gather take scatter scatter_add index_add index_put masked_select
        take_along_dim""",
    Kind.SOURCE: """arange zeros ones full empty new_zeros new_ones new_full new_empty empty_like eye linspace
        scalar_tensor""",
    Kind.RANDOM: "rand randn randint rand_like randn_like bernoulli dropout native_dropout multinomial randperm normal",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

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


ONE = sympy.Integer(1)


@dataclass(frozen=True)
class Space:
    """What an operation runs over: ``rows`` that differ from shape to shape, each ``width`` elements long."""

    rows: sympy.Expr
    width: sympy.Expr


class FusionGraph:
    """The operations of one graph, indexed. Nothing of it changes after it was made."""

    def __init__(self, graph: Graph, sizes: ShapeConstraints) -> None:
        self.graph, self.sizes = graph, sizes
        self.ops = graph.ops
        self.index = {op.name: i for i, op in enumerate(graph.ops)}
        self.dtypes = {item.name: item.type.dtype for item in graph.inputs}
        self.dtypes |= {op.name: op.type.dtype for op in graph.ops if op.type is not None}
        self.before = [[self.index[x] for x in op.operands if x in self.index] for op in self.ops]
        self.after: list[list[int]] = [[] for _ in self.ops]
        for i, producers in enumerate(self.before):
            for p in dict.fromkeys(producers):
                self.after[p].append(i)
        self.results = sum(1 << self.index[name] for name in dict.fromkeys(graph.outputs) if name in self.index)
        self._layouts: dict[str, tuple[int, ...] | None] = {}
        self.kinds = [self._kind(op) for op in self.ops]
        self.above, self.below = self._paths()
        self.spaces = [self._space(i) for i in range(len(self.ops))]
        self.core = sum(1 << i for i, kind in enumerate(self.kinds) if kind in FUSIBLE)
        self.views = sum(1 << i for i, kind in enumerate(self.kinds) if kind is Kind.VIEW)

    def _kind(self, op: GraphOp) -> Kind:
        kind = kind_of(op)
        if not op.operands and kind in (*FUSIBLE, Kind.VIEW):
            kind = Kind.SOURCE
        if kind is not Kind.VIEW:
            rank = len(self.sizes.shapes.get(op.name, ()))
            # fused attention lays its result out as [B, S, H, D], so that the transpose back is dense
            self._layouts[op.name] = (0, 2, 1, 3) if "attention" in stem(op) and rank == 4 else None
            return kind
        order = self._layouts.get(op.operands[0]) if op.operands else None
        if stem(op) in ("permute", "transpose", "t") and op.name in self.sizes.shapes:
            self._layouts[op.name] = _permuted(op, order, len(self.sizes.shapes[op.name]))
            return kind
        if stem(op) in ("reshape", "_unsafe_view", "view", "flatten"):
            merges = len(self.sizes.shapes.get(op.name, ())) < len(self.sizes.shapes.get(op.operands[0], ()))
            self._layouts[op.name] = None
            return Kind.POINTWISE if order is not None and merges else kind  # it has to copy
        same_rank = len(self.sizes.shapes.get(op.name, ())) == len(self.sizes.shapes.get(op.operands[0], ()))
        self._layouts[op.name] = order if same_rank else None
        return kind

    def _paths(self) -> tuple[list[int], list[int]]:
        above, below = [0] * len(self.ops), [0] * len(self.ops)
        for i, producers in enumerate(self.before):
            for p in producers:
                above[i] |= above[p] | 1 << p
        for i in reversed(range(len(self.ops))):
            for c in self.after[i]:
                below[i] |= below[c] | 1 << c
        return above, below

    def _space(self, i: int) -> Space:
        """Rows are the sizes that clips change; a row is everything of one token."""
        op = self.ops[i]
        name = op.operands[0] if self.kinds[i] is Kind.REDUCTION and op.operands else op.name
        return self._space_of(name, is_permuted=stem(op) in ("permute",))

    def _space_of(self, name: str, *, is_permuted: bool = False) -> Space:
        dims = self.sizes.shapes.get(name, ())
        rows, width = ONE, ONE
        for dim in dims:
            if dim.free_symbols:
                rows *= dim
            else:
                width *= dim
        fixed_tokens = len(dims) > 2 and all(not d.free_symbols for d in dims[1:]) and not is_permuted
        if fixed_tokens:  # a caption of constant length: its tokens are rows all the same
            rows, width = rows * dims[1], width / dims[1]
        return Space(sympy.expand(rows), sympy.expand(width))

    def rows_of(self, name: str) -> sympy.Expr:
        """The rows of a value, an operation's or an input of the graph."""
        return self._space_of(name).rows

    def reduces_rows(self, i: int) -> bool:
        """Whether a reduction runs over what is rows for others: over tokens, or over clips."""
        op = self.ops[i]
        if self.kinds[i] is not Kind.REDUCTION or not op.operands:
            return False
        dims = self.sizes.shapes.get(op.operands[0], ())
        return any(dims[d].free_symbols or (d == 1 and len(dims) > 2) for d in reduced_dims(op, len(dims)))

    def consumers(self, i: int) -> Iterator[int]:
        """Operations that read the result of ``i``, directly or through views that are no copies."""
        for c in self.after[i]:
            if self.views >> c & 1:
                yield from self.consumers(c)
            else:
                yield c

    def producers(self, i: int) -> Iterator[int]:
        """Operations whose results ``i`` reads, directly or through views."""
        for p in self.before[i]:
            if self.views >> p & 1:
                yield from self.producers(p)
            else:
                yield p

    def base(self, name: str) -> str:
        """The value that a chain of views looks at."""
        while name in self.index and self.views >> self.index[name] & 1 and self.ops[self.index[name]].operands:
            name = self.ops[self.index[name]].operands[0]
        return name

    def bytes_of(self, name: str) -> sympy.Expr:
        """Bytes behind a value: of the smallest tensor on its chain of views."""
        smallest: sympy.Expr | None = None
        while True:
            if name in self.dtypes:
                size = self.sizes.count(name) * DTYPE_BYTES.get(self.dtypes[name], 4)
                if smallest is None or self.sizes.at(size) < self.sizes.at(smallest):
                    smallest = size
            i = self.index.get(name)
            if i is None or not self.views >> i & 1 or not self.ops[i].operands:
                return sympy.Integer(0) if smallest is None else smallest
            name = self.ops[i].operands[0]

    def escapes(self, i: int, region: int) -> bool:
        """Whether the value of ``i`` is read outside ``region``, or is a result of the graph."""
        if self.results >> i & 1:
            return True
        return any(self.escapes(c, region) if self.views >> c & 1 else not region >> c & 1 for c in self.after[i])

    def with_views(self, core: int) -> int:
        """``core`` with the views between its operations, and those in front that nobody else reads."""
        above, below = self._around(core)
        region = core | above & below & self.views
        for i in reversed(list(bits(above & self.views & ~region))):
            if self.after[i] and all(region >> c & 1 for c in self.after[i]) and not self.results >> i & 1:
                region |= 1 << i
        return region

    def between(self, region: int) -> int:
        """Operations outside ``region`` on a path out of it and back."""
        above, below = self._around(region)
        return above & below & ~region

    def _around(self, region: int) -> tuple[int, int]:
        """What its operations are made of, and what is made of them."""
        above = below = 0
        for i in bits(region):
            above |= self.above[i]
            below |= self.below[i]
        return above, below


FUSIBLE = (Kind.POINTWISE, Kind.REDUCTION, Kind.JOIN)


def bits(mask: int) -> Iterator[int]:
    """The members of a set, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _permuted(op: GraphOp, order: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    """Which dimension lies where in memory after a transpose; None where they lie in order."""
    dims = list(range(rank))
    if "dims" in op.attrs and isinstance(op.attrs["dims"], tuple):
        dims = [int(d) % rank for d in op.attrs["dims"] if type(d) is int]
    else:
        a, b = (op.attrs.get(key, fallback) for key, fallback in (("dim0", 0), ("dim1", 1)))
        if type(a) is int and type(b) is int and rank > 1:
            dims[a % rank], dims[b % rank] = dims[b % rank], dims[a % rank]
    before = order or tuple(range(rank))
    if len(before) != rank or len(dims) != rank:
        return None
    now = tuple(dims.index(d) for d in before)  # the dimensions of the result, outermost in memory first
    return None if now == tuple(range(rank)) else now
