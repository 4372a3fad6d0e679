"""The cost of a region. In: a set of operations. Out: what one kernel for it saves, or why it cannot be one, and what
its backward moves.

After the cost model of Zheng et al., "FusionStitching" (arXiv 2009.10924), for one forward and backward: saved traffic,
saved launches, and the registers and shared memory of a program. A program works on one row, all of one token, so
operations of different widths (across heads, per head, half a head) are stitched inside it.

A single operation reads its result's gradient and what it has saved, and writes a gradient per floating-point operand.
A product with a smaller operand also writes the full product and reduces it; a sum with one reads the gradient again.
A region reads the gradients of its results and its inputs, and writes the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import sympy

from arachnec.fusion.graph import FusionGraph, Kind, bits, stem, values_read

BOTH = ("mul", "div", "addcmul", "lerp", "where", "maximum", "minimum", "atan2")  # keep their operands
_ONE = """layer_norm rms_norm native_layer_norm gelu silu tanh sigmoid exp rsqrt sqrt pow log sin cos erf relu softplus
    reciprocal softmax _softmax elu leaky_relu abs var"""
ONE = frozenset(_ONE.split())  # keep one tensor of the operand's size

Size = Any  # a number, or an expression of the graph's symbols


@dataclass(frozen=True)
class Backward:
    """Bytes: read and written, and kept from the forward."""

    moved: Size
    saved: Size


class Traffic(Protocol):
    """Which values regions of ``graph`` read and write."""

    @property
    def graph(self) -> FusionGraph: ...

    def results_of(self, i: int) -> list[str]:
        """The tensors that an operation writes."""

    def loaded(self, region: int) -> list[str]:
        """The values that a region reads."""

    def written(self, region: int) -> list[str]:
        """The results of a region that are read outside it."""


def alone(traffic: Traffic, region: int, size: Callable[[str], Size]) -> Backward:
    """Every operation of the region by itself; ``size`` gives the bytes of a value.

    A tensor that several operations save counts once.
    """
    graph = traffic.graph
    moved: Size = 0
    saved: dict[str, Size] = {}
    for i in bits(region & graph.core):
        op = graph.ops[i]
        result = sum(size(name) for name in traffic.results_of(i))
        operands = [name for name in values_read(op) if name in graph.sizes.shapes]
        saved_operands = operands if stem(op) in BOTH else operands[:1] if stem(op) in ONE else []
        largest = max((graph.sizes.at(graph.sizes.count(name)) for name in operands), default=0.0)
        moved += result
        for name in saved_operands:
            moved += size(name)
            saved[graph.base(name)] = size(graph.base(name))
        for name in operands:
            smaller = graph.sizes.at(graph.sizes.count(name)) < largest
            if smaller and graph.kinds[i] is Kind.POINTWISE:
                moved += size(name) + (2 * result if stem(op) in BOTH else result)
            else:
                moved += size(name)
    return Backward(moved, sum(saved.values()))


def together(traffic: Traffic, region: int, size: Callable[[str], Size]) -> Backward:
    """The region as one pass, which recomputes everything between its inputs and its results."""
    results = sum(size(name) for name in traffic.written(region))
    inputs = sum(size(name) for name in traffic.loaded(region) if name in traffic.graph.sizes.shapes)
    return Backward(results + 2 * inputs, inputs)


REGISTERS = 128  # KiB a program may hold in registers: half of a multiprocessor's, so that two run on it
SHARED = 96  # KiB it may keep in shared memory beside
LAUNCH = 4e-6  # s that a kernel takes however little it does
READ_BY_ELEMENT = 4  # bytes: arithmetic is in fp32


@dataclass(frozen=True)
class Machine:
    """``bandwidth`` in bytes/s of the device's own memory."""

    bandwidth: float = 3350e9


@dataclass(frozen=True)
class Price:
    """``launches_before`` of one forward; ``registers`` in KiB; ``saved`` in s of one forward and backward."""

    launches_before: int
    registers: int
    saved: float


@dataclass(frozen=True)
class Group:
    """Operations of a region over the same rows. ``launches`` is 0 for what rides in another group's kernel."""

    rows: str
    ops: tuple[int, ...]
    launches: int
    broadcast: bool


class RegionCost:
    """Prices and judges regions of one graph; a region is a set of operations with the views between them."""

    def __init__(self, graph: FusionGraph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self._rows = [str(space.rows) for space in graph.spaces]
        self._prices: dict[int, Price | str] = {}

    @cached_property
    def _bytes(self) -> dict[str, float]:
        graph = self.graph
        return {name: graph.sizes.at(graph.bytes_of(name)) for name in graph.sizes.shapes}

    @cached_property
    def _widths(self) -> list[float]:
        """Elements of one row of each operation's result."""
        graph, widths = self.graph, []
        for i, op in enumerate(graph.ops):
            rows = graph.sizes.at(graph.spaces[i].rows)
            width = graph.sizes.at(graph.sizes.count(op.name)) / rows if op.name in self._bytes else 1.0
            widths.append(max(width, 1.0))
        return widths

    @cached_property
    def _backward(self) -> list[float]:
        """Bytes that the backward of each operation moves."""
        return [float(alone(self, 1 << i, self._at).moved) for i in range(len(self.graph.ops))]

    def price(self, region: int) -> Price | str:
        """The price, or why the region cannot be one kernel."""
        if region not in self._prices:
            self._prices[region] = self._price(region)
        return self._prices[region]

    def saved(self, region: int) -> float:
        """Seconds saved by a region; minus infinity for what cannot be one."""
        price = self.price(region)
        return price.saved if isinstance(price, Price) else float("-inf")

    def _price(self, region: int) -> Price | str:
        if reason := self._reason(region):
            return reason
        size = self.registers(region)
        if size > REGISTERS + SHARED:
            return f"a program would hold {size:.0f} KiB, of {REGISTERS} in registers and {SHARED} in shared memory"
        core = list(bits(region & self.graph.core))
        before = sum(self.alone(i) for i in core)
        after = self._moved(region)
        launches = self.launches(region)
        back = sum(self._backward[i] for i in core) - together(self, region, self._at).moved
        # the backward takes at least as many launches as the forward
        saved = (before - after + back) / self.machine.bandwidth + 2 * (len(core) - launches) * LAUNCH
        return Price(len(core), round(size), saved)

    def seconds(self, region: int, launches: int = 1) -> float:
        """What one forward and backward of a region takes by this model, each in so many ``launches``."""
        backward = alone if (region & self.graph.core).bit_count() == 1 else together
        moved = self._moved(region) + backward(self, region, self._at).moved
        return float(moved / self.machine.bandwidth + 2 * launches * LAUNCH)

    def _moved(self, region: int) -> float:
        """Bytes that one forward reads and writes."""
        return sum(map(self._at, [*self.written(region), *self.loaded(region)]))

    def _at(self, name: str) -> float:
        return self._bytes.get(name, 0.0)

    def alone(self, i: int) -> float:
        """Bytes that an operation moves when it runs by itself."""
        op = self.graph.ops[i]
        return sum(map(self._at, values_read(op))) + sum(map(self._at, self.results_of(i)))

    def results_of(self, i: int) -> list[str]:
        """The tensors that an operation writes: its own, or the elements read from its tuple."""
        name = self.graph.ops[i].name
        return [name] if name in self._bytes else [self.graph.ops[c].name for c in self.graph.after[i]]

    def read(self, region: int) -> dict[str, list[str]]:
        """What a region reads from outside: base tensor to the names (itself, or views) that it is read by."""
        graph, names_of = self.graph, dict[str, list[str]]()
        for i in bits(region & graph.core):
            for name in values_read(graph.ops[i]):
                base = graph.base(name)
                if base in graph.index and region >> graph.index[base] & 1:
                    continue
                if name not in names_of.setdefault(base, []):
                    names_of[base].append(name)
        return names_of

    def loaded(self, region: int) -> list[str]:
        """The values that a region loads: the tensors it reads, or views of them where these are smaller."""
        values: list[str] = []
        for base, names in self.read(region).items():
            load_base = self._at(base) <= sum(map(self._at, names)) and base in self._bytes
            values.extend([base] if load_base else names)
        return values

    def written(self, region: int) -> list[str]:
        """The results of a region that are read outside it."""
        core = (i for i in bits(region & self.graph.core) if self.graph.escapes(i, region))
        return [name for i in core for name in self.results_of(i)]

    def formula(self, region: int) -> tuple[sympy.Expr, sympy.Expr]:
        """Bytes before and after, as expressions of the graph's symbols."""
        graph = self.graph

        def total(names: list[str]) -> sympy.Expr:
            return sum((graph.bytes_of(name) for name in names), sympy.Integer(0))

        core = list(bits(region & graph.core))
        before = sum((total(values_read(graph.ops[i])) + total(self.results_of(i)) for i in core), sympy.Integer(0))
        after = total([*self.written(region), *self.loaded(region)])
        return sympy.expand(before), sympy.expand(after)

    # whether it can be one kernel

    def _reason(self, region: int) -> str | None:
        graph = self.graph
        back = graph.between(region)
        if back:
            heavy = next((i for i in bits(back) if not graph.core >> i & 1 and not graph.views >> i & 1), None)
            i = next(bits(back)) if heavy is None else heavy
            return f"a value would have to leave the kernel for `%{graph.ops[i].name}` and come back"
        groups = self.groups(region)
        rows_of = {i: group.rows for group in groups for i in group.ops}
        for group in groups:
            if not group.broadcast and self._feeds_others(group, rows_of):
                name = next(graph.ops[i].name for i in group.ops if graph.escapes(i, region))
                return f"`%{name}` is one for many rows and is read elsewhere, too: every row would make it again"
        for i in bits(region & graph.core):
            inner = [c for c in graph.consumers(i) if region >> c & 1]
            if graph.reduces_rows(i) and inner:
                sums, reader = graph.ops[i].name, graph.ops[inner[0]].name
                return f"`%{sums}` sums over the rows of many programs, and `%{reader}` reads the sum"
            joined = graph.kinds[i] is Kind.JOIN and any(graph.kinds[c] is not Kind.JOIN for c in inner)
            if joined and any(region >> p & 1 and rows_of[p] != rows_of[i] for p in graph.producers(i)):
                return (
                    f"`%{graph.ops[i].name}` joins rows that different programs make, and more would read them joined"
                )
        launched = {group.rows for group in groups if group.launches}
        if len(launched) > 1 and not self._joined(region, groups):
            return f"it would run over {' and over '.join(sorted(launched))} rows, which nothing joins"
        return None

    def _feeds_others(self, group: Group, rows_of: dict[int, str]) -> bool:
        """Whether operations over other rows read this group's values, each value many times."""
        return any(
            c in rows_of and rows_of[c] != group.rows and self.graph.kinds[c] is not Kind.JOIN
            for i in group.ops
            for c in self.graph.consumers(i)
        )

    def _joined(self, region: int, groups: list[Group]) -> bool:
        """Whether every group with a kernel of its own writes into one joined tensor, directly or by what it feeds."""
        joins = [i for i in bits(region & self.graph.core) if self.graph.kinds[i] is Kind.JOIN]
        feeding = {p for j in joins for p in self.graph.producers(j)} | set(joins)
        return all(set(group.ops) & feeding for group in groups if group.launches)

    def groups(self, region: int) -> list[Group]:
        """The operations by the rows they run over; slices of a row count belong to the whole they are cut from."""
        graph = self.graph
        parent: dict[str, str] = {}

        def find(rows: str) -> str:
            while parent.setdefault(rows, rows) != rows:
                rows = parent[rows]
            return rows

        core = list(bits(region & graph.core))
        for i in core:
            find(self._rows[i])
        for i, part in self._slices(region):
            parent[find(self._rows[i])] = find(self._rows[part])
        members: dict[str, list[int]] = {}
        for i in core:
            members.setdefault(find(self._rows[i]), []).append(i)
        return [self._group(region, rows, ops, members) for rows, ops in members.items()]

    def _slices(self, region: int) -> Iterator[tuple[int, int]]:
        """Readers and producers in the region where the reader is given some rows of the producer's result."""
        graph = self.graph
        for i in bits(region & graph.core):
            for name in graph.ops[i].operands:
                base = graph.base(name)
                producer = graph.index.get(base)
                if producer is None or not region >> producer & 1 or name == base:
                    continue
                cut = self._at(name) < self._at(base) and self._rows[i] != self._rows[producer]
                if cut and str(graph.spaces[graph.index[name]].rows) == self._rows[i]:
                    yield i, producer

    def _group(self, region: int, rows: str, ops: list[int], members: dict[str, list[int]]) -> Group:
        graph = self.graph
        inside = {i for other in members.values() for i in other}
        own = set(ops)
        outer = [c for i in ops for c in graph.consumers(i) if c not in own]
        feeds = bool(outer) and all(c in inside and graph.kinds[c] is not Kind.JOIN for c in outer)
        broadcast = feeds and not any(graph.escapes(i, region) for i in ops)
        rides = all(
            graph.kinds[i] is Kind.JOIN
            and all(graph.index.get(graph.base(x), -1) in inside for x in graph.ops[i].operands)
            for i in ops
        )
        columns = any(graph.reduces_rows(i) and stem(graph.ops[i]) not in ("softmax", "_softmax") for i in ops)
        return Group(rows, tuple(ops), 0 if broadcast or rides else 1 + columns, broadcast)

    def launches(self, region: int) -> int:
        return max(1, sum(group.launches for group in self.groups(region)))

    def registers(self, region: int) -> float:
        """KiB that the program of a row holds at its widest, 0 where elements need not wait for each other."""
        graph = self.graph
        core = list(bits(region & graph.core))
        if not any(graph.kinds[i] is Kind.REDUCTION for i in core):
            return 0.0
        last = {i: max((c for c in graph.consumers(i) if region >> c & 1), default=i) for i in core}
        widest = 0.0
        for i in core:
            live = sum(self._widths[j] for j in core if j < i <= last[j])
            widest = max(widest, live + self._widths[i])
        return widest * READ_BY_ELEMENT / 1024

    def schedule(self, region: int) -> str:
        """``row`` where a program needs a whole row, ``column`` where it adds up rows, ``loop`` else."""
        core = [i for i in bits(region & self.graph.core) if self.graph.kinds[i] is Kind.REDUCTION]
        if any(self.graph.reduces_rows(i) for i in core):
            return "column"
        return "row" if core else "loop"

    def rows(self, region: int) -> str:
        """The rows of the largest group."""
        launched = [group for group in self.groups(region) if group.launches] or self.groups(region)
        return max(launched, key=lambda group: max(map(self.alone, group.ops))).rows.replace("**", "^")
