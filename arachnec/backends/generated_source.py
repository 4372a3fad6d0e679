"""Triton source for a region that no hand-written kernel computes, from its operations.

One template: a program takes a run of rows; a row's lanes lie in a tile [outer, inner]. Element-wise operations are
written where they are read (``loop``), reductions along a row are over the inner axis or both (``row``), and sums over
rows stay in registers over the run and are written once, as partials (``column``). Rows too wide for a tile are
gone over in blocks, once for each reduction and once to write (two passes). Arithmetic is fp32, or fp64 where the
region's is; values are rounded where they are stored and where the region rounds them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.backends.generated_index import Index, Lanes, Unsupported
from arachnec.backends.generated_operations import (
    CASTS,
    FULL,
    POINTWISE,
    RESHAPES,
    SAME,
    SUMS,
    TYPES,
    args_of,
    bounds,
    dim_of,
    is_symbolic,
    keeps_first,
    lanes_of,
    lead_dims,
    needed,
    option,
    static_dims,
    static_runs,
    sums_rows,
)

aten, prims = torch.ops.aten, torch.ops.prims

Place = tuple["int | Index", ...]  # for each dimension the number of a row's coordinate, or an index in the row


@dataclass(frozen=True)
class ColumnSum:
    """A sum over rows: of ``node``'s operand, whose shape is ``static`` besides rows; ``kept``: one for each i0."""

    node: fx.Node
    static: tuple[int, ...]
    kept: bool


@dataclass(frozen=True)
class Source:
    """A kernel's text. ``inputs`` and ``stores`` are the nodes that it reads and writes, ``columns`` its sums.

    ``rows``: the sizes that rows are counted by, as (input, dimension); ``wide``: it goes over rows in blocks.
    """

    name: str
    text: str
    inputs: tuple[fx.Node, ...]
    stores: tuple[fx.Node, ...]
    columns: tuple[ColumnSum, ...]
    rows: tuple[tuple[int, int], ...]
    lanes: Lanes
    wide: bool

    @property
    def kept(self) -> bool:
        return any(column.kept for column in self.columns)


@dataclass
class _Writer:
    """Writes the text: ``body`` is what is written for a row; values are written once for each place."""

    lanes: Lanes
    domain: tuple[str, ...]
    precision: str
    wide: bool
    known: list[dict[Any, str]] = field(default_factory=lambda: [{}])
    lines: list[list[str]] = field(default_factory=lambda: [[]])
    reads: dict[fx.Node, int] = field(default_factory=dict)
    count: int = 0

    def new(self, text: str, depth: int = -1) -> str:
        name = f"v{self.count}"
        self.count += 1
        self.lines[depth].append(f"{name} = {text}")
        return name

    # indices

    def text_of(self, index: Index) -> str:
        """An index in the kernel's lanes: ``p`` and ``q`` are the coordinates of a tile."""
        terms = [] if not index.offset else [str(index.offset)]
        factors = list(index.factors)
        first = len(factors) - self.lanes.inner
        for axis, (start, stop) in (("p", (0, first)), ("q", (first, len(factors)))):
            sizes = self.lanes.sizes[start:stop]
            inner = [math.prod(sizes[k + 1 :]) if size > 1 else 0 for k, size in enumerate(sizes)]
            scale = next((f // s for f, s in zip(factors[start:stop], inner, strict=True) if s), 0)
            if scale and [scale * s for s in inner] == factors[start:stop]:
                terms.append(axis if scale == 1 else f"{scale} * {axis}")
                continue
            for k, factor in enumerate(factors[start:stop]):
                if factor:
                    step, size = math.prod(sizes[k + 1 :]), sizes[k]
                    lane = axis if step == 1 else f"{axis} // {step}"
                    lane = lane if k == 0 else f"({lane}) % {size}"
                    terms.append(f"({lane})" if factor == 1 else f"{factor} * ({lane})")
        return " + ".join(terms) or "0"

    def place_of(self, value: Tensor) -> Place:
        """Every element of a row of ``value``."""
        if lead_dims(value) != self.domain:
            raise Unsupported(f"its results run over {lead_dims(value)} and over {self.domain}")
        parts = iter(self.lanes.split(static_dims(value)))
        lead = iter(range(len(self.domain)))
        return tuple(next(lead) if is_symbolic(size) else next(parts) for size in value.shape)

    def broadcast(self, place: Place, value: Tensor) -> Place:
        """The place of an operand of an element-wise operation."""
        there = place[len(place) - value.ndim :]
        zero = Index((0,) * len(self.lanes.sizes), 0)
        return tuple(
            zero if not is_symbolic(size) and size == 1 else at for size, at in zip(value.shape, there, strict=True)
        )

    # values

    def value(self, node: Any, place: Place) -> str:
        if not isinstance(node, fx.Node):
            return repr(float(node)) if isinstance(node, (int, float)) and type(node) is not bool else repr(node)
        if not isinstance(node.meta.get("val"), Tensor):
            raise Unsupported(f"`{node.name}` is a number that only a run knows")
        key = (node, place)
        for scope in (self.known[0], self.known[-1]):  # those of a block around this one come after it
            if key in scope:
                return scope[key]
        name = self._made(node, place)
        lane = any(isinstance(at, Index) and at.used for at in place)
        self.known[-1 if lane else 0][key] = name
        return name

    def _made(self, node: fx.Node, place: Place) -> str:
        if node.op == "placeholder":
            return self._load(node, place)
        target, args = node.target, args_of(node)
        if target in POINTWISE:
            return self._pointwise(node, place)
        if target in SAME:
            return self.value(args[0], place)
        if target in CASTS:
            return self._cast(node, self.value(args[0], place))
        if target in FULL:
            fill = {aten.full.default: 1, aten.full_like.default: 1}.get(target)
            number = args[fill] if fill else float(target is aten.ones_like.default)
            return repr(float(number))
        if target in SUMS or target is prims.var.default:
            return self._reduction(node, place)
        if target in (aten.cat.default, aten.slice_scatter.default, aten.select_scatter.default):
            return self._joined(node, place)
        if target is aten.pow.Tensor_Scalar:
            return self._power(node, place)
        if target is operator.getitem:
            return self._part(node, place)
        return self.value(args[0], self._before(node, place))

    def _part(self, node: fx.Node, place: Place) -> str:
        """One of the parts that a split gives."""
        split, index = args_of(node)
        assert isinstance(split, fx.Node) and isinstance(index, int)
        if split.target not in (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default):
            raise Unsupported(f"`{split.target}`")
        source = args_of(split)[0]
        assert isinstance(source, fx.Node)
        shape = source.meta["val"].shape
        dim = dim_of(split, len(shape))
        if is_symbolic(shape[dim]):
            raise Unsupported(f"`{split.name}` splits rows")
        zero = Index((0,) * len(self.lanes.sizes), 0)
        if split.target is aten.unbind.int:
            return self.value(source, (*place[:dim], zero + index, *place[dim:]))
        sizes = [int(part.shape[dim]) for part in split.meta["val"]]
        at = place[dim]
        assert isinstance(at, Index)
        return self.value(source, _at(place, dim, at + sum(sizes[:index])))

    def _pointwise(self, node: fx.Node, place: Place) -> str:
        values = []
        for argument in args_of(node):
            if isinstance(argument, fx.Node) and not isinstance(argument.meta.get("val"), Tensor):
                raise Unsupported(f"`{argument.name}` is a number that only a run knows")
            there = self.broadcast(place, argument.meta["val"]) if isinstance(argument, fx.Node) else ()
            values.append(self.value(argument, there))
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            values[1] = f"({alpha} * {values[1]})"
        lane = any(isinstance(at, Index) and at.used for at in place)
        return self.new(POINTWISE[node.target].format(*values), -1 if lane else 0)

    def _power(self, node: fx.Node, place: Place) -> str:
        base, exponent = self.value(args_of(node)[0], place), args_of(node)[1]
        if exponent not in (0, 1, 2, 3, -1, 0.5, -0.5):
            raise Unsupported(f"a power of {exponent}")
        forms = {0: "1.0", 1: base, 2: f"{base} * {base}", 3: f"{base} * {base} * {base}", -1: f"1.0 / {base}",
                 0.5: f"tl.sqrt({base})", -0.5: f"1.0 / tl.sqrt({base})"}  # fmt: skip
        lane = any(isinstance(at, Index) and at.used for at in place)
        return self.new(forms[exponent], -1 if lane else 0)

    def _cast(self, node: fx.Node, value: str) -> str:
        dtype = node.meta["val"].dtype
        if dtype in (torch.bfloat16, torch.float16):
            return f"({value}).to({TYPES[dtype]}).to({self.precision})"
        if not dtype.is_floating_point:
            raise Unsupported(f"a cast to {dtype}")
        return value

    def _load(self, node: fx.Node, place: Place) -> str:
        value = node.meta["val"]
        if not value.dtype.is_floating_point:
            raise Unsupported(f"an input of {value.dtype}")
        number = self.reads.setdefault(node, len(self.reads))
        terms, used = [], False
        for dim, at in enumerate(place):
            if isinstance(at, Index):
                if at.used or at.offset:
                    terms.append(f"({self.text_of(at)}) * x{number}_{dim}")
                    used |= bool(at.used)
            else:
                step = f"i{at} * x{number}_{dim}"  # a product: Triton takes no hints about arguments
                terms.append(f"(tl.multiple_of({step}, {max(16 // value.element_size(), 1)}) if DENSE else {step})")
        address = " + ".join([f"x{number}", *terms])
        if not used:
            return self.new(f"tl.load({address}).to({self.precision})", 0)
        return self.new(f"tl.load({address} + 0 * (p + q), mask=inside, other=0.0).to({self.precision})")

    def _reduction(self, node: fx.Node, place: Place) -> str:
        operand = node.all_input_nodes[0]
        value = operand.meta["val"]
        rank = value.ndim
        dims = sorted(dim % rank for dim in args_of(node)[1])
        if sums_rows(node):
            raise Unsupported(f"`{node.name}` adds up rows, and its sum is read in the region")
        keeps = len(node.meta["val"].shape) == rank
        whole = iter(self.place_of_row(value))
        full = [next(whole) if not is_symbolic(size) else -1 for size in value.shape]
        rest = list(place)
        there: list[int | Index] = []
        for dim in range(rank):
            if dim in dims:
                there.append(full[dim])
                if keeps:
                    rest.pop(0)
            else:
                at = rest.pop(0)
                if isinstance(at, Index) and value.shape[dim] != 1 and at != full[dim]:
                    raise Unsupported(f"`{node.name}` is read at other places than its own")
                there.append(at)
        over = frozenset().union(*(full[dim].used for dim in dims if isinstance(full[dim], Index)))
        real = {i for i, size in enumerate(self.lanes.sizes) if size > 1}
        inner = real & set(range(len(self.lanes.sizes) - self.lanes.inner, len(self.lanes.sizes)))
        if over == real:
            reduce = "tl.sum(tl.sum({0}, 1, keep_dims=True), 0, keep_dims=True)"
        elif over == inner:
            reduce = "tl.sum({0}, 1, keep_dims=True)"
        else:
            raise Unsupported(f"`{node.name}` reduces a part of a row")
        count = math.prod(int(value.shape[dim]) for dim in dims)
        total = self._sum(operand, tuple(there), reduce, None)
        if node.target is aten.mean.dim:
            return self.new(f"{total} / {count}", 0)
        if node.target is not prims.var.default:
            return total
        correction = option(node, 2, "correction", 1)
        center = self.new(f"{total} / {count}", 0)
        squares = self._sum(operand, tuple(there), reduce, center)
        return self.new(f"{squares} / {count - float(correction or 0)}", 0)

    def place_of_row(self, value: Tensor) -> list[Index]:
        return self.lanes.split(static_dims(value))

    def _sum(self, operand: fx.Node, place: Place, reduce: str, center: str | None) -> str:
        """The sum along a row, or, with a ``center``, of squared distances from it."""

        def summand() -> str:
            value = self.value(operand, place)
            value = value if center is None else f"({value} - {center}) * ({value} - {center})"
            return f"tl.where(inside, {value}, 0.0)"

        if not self.wide:
            return self.new(reduce.format(summand()), 0)
        total = self.new(f"tl.zeros([P, Q], {self.precision})", 0)
        self._block(lambda: self.lines[-1].append(f"{total} += {summand()}"))
        return self.new(reduce.format(total), 0)

    def _block(self, write: Any) -> None:
        """What ``write`` writes, for each block of a row; what it needs of the row comes before."""
        self.known.append({})
        self.lines.append([])
        write()
        self.known.pop()
        inner = self.lines.pop()
        self.lines[0] += ["for begin in tl.range(0, INNER, Q):", "    q = begin + tl.arange(0, Q)[None, :]",
                          "    inside = (p < OUTER) & (q < INNER)", *(f"    {line}" for line in inner)]  # fmt: skip

    def _joined(self, node: fx.Node, place: Place) -> str:
        rank = node.meta["val"].ndim
        dim = dim_of(node, rank)
        at = place[dim]
        if not isinstance(at, Index):
            raise Unsupported(f"`{node.name}` joins rows")
        where = self.text_of(at)
        if node.target is aten.cat.default:
            begin, result = 0, ""
            parts: Sequence[fx.Node] = args_of(node)[0]
            for part in reversed(parts):
                begin = sum(int(p.meta["val"].shape[dim]) for p in parts[: list(parts).index(part)])
                size = int(part.meta["val"].shape[dim])
                value = self.value(part, _at(place, dim, self._within(at, begin, size)))
                result = value if not result else f"tl.where({where} < {begin + size}, {value}, {result})"
            return self.new(result)
        base, part = args_of(node)[:2]
        size = int(node.meta["val"].shape[dim])
        if node.target is aten.select_scatter.default:
            start = int(args_of(node)[3]) % size
            there = tuple(x for k, x in enumerate(place) if k != dim)
            hit = f"(({where}) == {start})"
            return self.new(f"tl.where({hit}, {self.value(part, there)}, {self.value(base, place)})")
        start, stop, step = bounds(node, size, 3)
        quotient, _ = at.quotient(self.lanes, step) if step > 1 else (at + -start, at)
        source = quotient + -(start // step) if step > 1 else quotient
        hit = f"(({where}) >= {start}) & (({where}) < {stop}) & ((({where}) - {start}) % {step} == 0)"
        return self.new(f"tl.where({hit}, {self.value(part, _at(place, dim, source))}, {self.value(base, place)})")

    def _within(self, at: Index, begin: int, size: int) -> Index:
        """The index in a part; where it is outside of the part nothing reads the value."""
        zero = Index((0,) * len(self.lanes.sizes), 0)
        return zero if size == 1 else at + -begin

    def _before(self, node: fx.Node, place: Place) -> Place:
        """Where the operand of a view is read."""
        target, args = node.target, args_of(node)
        source = args[0].meta["val"]
        rank = source.ndim
        zero = Index((0,) * len(self.lanes.sizes), 0)
        if target is aten.expand.default:
            return self.broadcast(place, source)
        if target is prims.broadcast_in_dim.default:
            there = tuple(place[dim] for dim in args[2])
            return tuple(
                zero if not is_symbolic(s) and s == 1 else at for s, at in zip(source.shape, there, strict=True)
            )
        if target is aten.permute.default:
            order = [dim % rank for dim in args[1]]
            return tuple(place[order.index(dim)] for dim in range(rank))
        if target is aten.transpose.int:
            a, b = (int(x) % rank for x in args[1:3])
            moved = list(place)
            moved[a], moved[b] = moved[b], moved[a]
            return tuple(moved)
        if target is aten.select.int:
            dim = int(args[1]) % rank
            if is_symbolic(source.shape[dim]):
                raise Unsupported(f"`{node.name}` takes one row out of all")
            return (*place[:dim], zero + int(args[2]) % int(source.shape[dim]), *place[dim:])
        if target is aten.slice.Tensor:
            dim = dim_of(node, rank)
            if is_symbolic(source.shape[dim]):
                if str(source.shape[dim]) == str(node.meta["val"].shape[dim]):
                    return place
                raise Unsupported(f"`{node.name}` takes some rows out of all")
            start, _, step = bounds(node, int(source.shape[dim]), 2)
            at = place[dim]
            assert isinstance(at, Index)
            return _at(place, dim, at * step + start)
        if target in RESHAPES:
            return self._reshaped(place, node.meta["val"], source)
        raise Unsupported(f"`{target}`")

    def _reshaped(self, place: Place, value: Tensor, source: Tensor) -> Place:
        if lead_dims(value) != lead_dims(source):
            raise Unsupported("it merges or splits dimensions that clips change")
        groups = [static_runs(tensor) for tensor in (value, source)]
        if [math.prod(sizes) for _, sizes in groups[0]] != [math.prod(sizes) for _, sizes in groups[1]]:
            raise Unsupported("it moves elements from row to row")
        found: list[int | Index] = [-1] * source.ndim
        lead = [at for at, size in zip(place, value.shape, strict=True) if is_symbolic(size)]
        for dim, size in enumerate(source.shape):
            if is_symbolic(size):
                found[dim] = lead.pop(0)
        for (dims, sizes), (into, targets) in zip(*groups, strict=True):
            flat = Index((0,) * len(self.lanes.sizes), 0)
            for dim, size in zip(dims, sizes, strict=True):
                at = place[dim]
                assert isinstance(at, Index)
                flat = flat * size + at
            for dim, at in zip(into, flat.divided(self.lanes, targets), strict=True):
                found[dim] = at
        return tuple(found)


def _at(place: Place, dim: int, index: Index) -> Place:
    return (*place[:dim], index, *place[dim + 1 :])


def write_source(stores: Sequence[fx.Node], sums: Sequence[fx.Node], name: str, *, wide: bool = False) -> Source:
    """A kernel that writes ``stores`` and partial ``sums`` over rows. Raises ``Unsupported``."""
    domains = {lead_dims(node.meta["val"]) for node in stores} | {
        lead_dims(node.all_input_nodes[0].meta["val"]) for node in sums
    }
    if len(domains) != 1 or not (domain := domains.pop()):
        raise Unsupported("its results run over rows of different counts")
    nodes = needed([*stores, *(node.all_input_nodes[0] for node in sums)])
    lanes = lanes_of(nodes, stores, sums)
    if wide and (sums or lanes.outer_size > 1):
        raise Unsupported("sums over rows, and reductions per head, need the whole row in a tile")
    double = any(node.meta["val"].dtype == torch.float64 for node in nodes if isinstance(node.meta["val"], Tensor))
    writer = _Writer(lanes, domain, "tl.float64" if double else "tl.float32", wide)
    columns: list[ColumnSum] = []

    def results() -> None:
        for number, node in enumerate(stores):
            value = writer.value(node, writer.place_of(node.meta["val"]))
            at = "q" if lanes.outer_size == 1 else "p * INNER + q"
            writer.lines[-1].append(
                f"tl.store(y{number} + row * (OUTER * INNER) + {at}, ({value} + tl.zeros([P, Q], {writer.precision}))"
                f".to(y{number}.dtype.element_ty), mask=inside)"
            )

    for number, node in enumerate(sums):
        operand = node.all_input_nodes[0].meta["val"]
        value = writer.value(node.all_input_nodes[0], writer.place_of(operand))
        writer.lines[-1].append(f"sum{number} += {value}")
        columns.append(ColumnSum(node, static_dims(operand), keeps_first(node)))
    if wide:
        writer._block(results)
    else:
        results()
    text = _text(writer, name, len(stores), len(sums))
    where = [_row_size(writer.reads, size) for size in domain]
    return Source(name, text, tuple(writer.reads), tuple(stores), tuple(columns), tuple(where), lanes, wide)


def _row_size(reads: dict[fx.Node, int], size: str) -> tuple[int, int]:
    for node, number in reads.items():
        for dim, found in enumerate(node.meta["val"].shape):
            if is_symbolic(found) and str(found) == size:
                return number, dim
    raise Unsupported(f"no input has the size {size}")


def _text(writer: _Writer, name: str, stores: int, sums: int) -> str:
    strides = [f"x{k}_{d}" for node, k in writer.reads.items() for d in range(node.meta["val"].ndim)]
    sizes = [f"n{k}" for k in range(len(writer.domain))]
    numbers = [*strides, *sizes, "rows", "group_rows", "run"]
    pointers = [*(f"x{k}" for k in range(len(writer.reads))), *(f"y{k}" for k in range(stores)), "partials"]
    lines = ["q = tl.arange(0, Q)[None, :]", "inside = (p < OUTER) & (q < INNER)"] if not writer.wide else []
    last = [
        f"    {stride} = 1 if DENSE else {stride}"
        for node, k in writer.reads.items()
        if node.meta["val"].ndim and not is_symbolic(node.meta["val"].shape[-1])
        for stride in [f"x{k}_{node.meta['val'].ndim - 1}"]
    ]
    coordinates = ["left = row"]
    for k in reversed(range(len(writer.domain))):
        coordinates += [f"i{k} = left % n{k}", f"left = left // n{k}"] if k else ["i0 = left"]
    body = [*coordinates, *writer.lines[0]]
    text = [
        '"""Generated from the operations of a region; see docs/fusion.md."""',
        "import triton",
        "import triton.language as tl",
        "",
        f"NUMBERS = {numbers!r}",
        "",
        "@triton.jit(do_not_specialize=NUMBERS)",
        f"def {name}({', '.join([*pointers, *numbers])}, OUTER: tl.constexpr, INNER: tl.constexpr, "
        "P: tl.constexpr, Q: tl.constexpr, DENSE: tl.constexpr):",
        *last,
        "    program = tl.program_id(0).to(tl.int64)",
        "    runs = (group_rows + run - 1) // run",
        "    group = program // runs",
        "    first = group * group_rows + (program - group * runs) * run",
        "    end = tl.minimum(first + run, (group + 1) * group_rows)",
        "    p = tl.arange(0, P)[:, None]",
        *(f"    {line}" for line in lines),
        *(f"    sum{k} = tl.zeros([P, Q], {writer.precision})" for k in range(sums)),
        "    for row in tl.range(first, end):",
        *(f"        {line}" for line in body),
        *(
            f"    tl.store(partials + (program * {sums} + {k}) * (OUTER * INNER) + p * INNER + q, sum{k}, mask=inside)"
            for k in range(sums)
        ),
        "",
    ]
    return "\n".join(text)
