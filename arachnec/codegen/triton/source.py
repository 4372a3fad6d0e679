"""The body of a kernel in Triton, from the operations of a region: a value is written once for each place it is read.

Element-wise operations are written where they are read (``loop``); reductions along a row are over one axis or both
(``row``). Arithmetic is fp32, or fp64 where the region's is; values are rounded where they are stored and where the
region rounds them. ``codegen.triton.lines`` says where lines and lanes stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Index, Unsupported
from arachnec.codegen.triton.lines import ONCE, Lines, zeros
from arachnec.codegen.triton.operations import (
    CASTS,
    FULL,
    HALVES,
    JOINS,
    LARGEST,
    OF_INTEGERS,
    OF_NUMBERS,
    POINTWISE,
    SAME,
    along_a_symbol,
    is_part,
    number_of,
    reduced_dims,
    shape_of,
    sums_rows,
    value_of,
)
from arachnec.codegen.triton.places import Choice, Place, before, broadcast, joined, moved, part

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass
class Writer(Lines):
    """Writes the lines of values, and remembers the tensors that they read.

    ``ends`` are nodes that other kernels made; ``known`` are the names of values by node and place, for each loop.
    """

    ends: frozenset[fx.Node] = frozenset()
    known: list[dict[Any, str]] = field(default_factory=lambda: [{}, {}])
    reads: dict[fx.Node, int] = field(default_factory=dict)
    guards: tuple[str, ...] = ()

    def block(self, write: Callable[[], object]) -> None:
        """What ``write`` writes, for each block of a row; what it needs of the row comes before."""
        self.known.append({})
        super().block(write)
        self.known.pop()

    def value(self, node: Any, place: Place) -> str:
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            return self._scalar(node)
        axes = self.axes(place)
        guards = self.guards
        self.guards = tuple(guard for guard in guards if all(a in axes for a in ("@p", "@q") if a in guard))
        try:
            return self._known(node, place)
        finally:
            self.guards = guards

    def _known(self, node: fx.Node, place: Place) -> str:
        key = (node, place, self.guards)
        for scope in (*self.known[:2], self.known[-1]):  # those of a block around this one come after it
            if key in scope:
                return scope[key]
        name = self._written(node, place)
        self.known[self.depth_of(name)][key] = name
        return name

    def _scalar(self, argument: Any) -> str:
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.SymFloat):
            if argument.target not in OF_NUMBERS:
                raise Unsupported(f"`{argument.target}` of sizes")
            return OF_NUMBERS[argument.target].format(*map(self._scalar, argument.args))
        number = number_of(argument)
        if isinstance(number, bool):
            return repr(number)
        if isinstance(number, int | float):
            return repr(float(number)) if math.isfinite(number) else f'float("{number}")'
        if isinstance(argument, fx.Node):
            return f"({self.number(number)}).to({self.precision})"
        raise Unsupported(f"`{argument}` is no number")

    def _written(self, node: fx.Node, place: Place) -> str:
        if node.op == "placeholder" or node in self.ends:
            return self._load(node, place)
        target: Any = node.target
        if target in POINTWISE:
            return self._pointwise(node, place)
        if target in SAME:
            return self.value(node.args[0], place)
        if target in CASTS:
            return self._cast(node, place)
        if target in FULL:
            return self._scalar(FULL[target](node))
        if target is prims.iota.default:
            return self._iota(node, place)
        if reduced_dims(node):
            return self._reduction(node, place)
        if target in JOINS:
            return self._joined(node, place)
        if target is aten.pow.Tensor_Scalar:
            return self._power(node, place)
        if target is aten.clamp.default:
            return self._clamped(node, place)
        return self.value(*(part if is_part(node) else before)(node, place, self.space))

    def _operand(self, node: fx.Node, argument: Any, place: Place) -> str:
        if not isinstance(argument, fx.Node) or not isinstance(argument.meta.get("val"), Tensor):
            dtype = value_of(node).dtype
            is_integer = not dtype.is_floating_point and isinstance(argument, int)
            return repr(argument) if is_integer and dtype is not torch.bool else self._scalar(argument)
        value = value_of(argument)
        name = self.value(argument, broadcast(self.space, place, value))
        mixed = value_of(node).dtype.is_floating_point and not value.dtype.is_floating_point
        return f"({name}).to({self.precision})" if mixed and value.dtype is not torch.bool else name

    def _pointwise(self, node: fx.Node, place: Place) -> str:
        dtype = value_of(node).dtype
        if not dtype.is_floating_point and dtype is not torch.bool and node.target not in OF_INTEGERS:
            raise Unsupported(f"`{node.target}` of {dtype}")
        values = [self._operand(node, argument, place) for argument in node.args]
        of_bools = node.target in (aten.logical_not.default, aten.bitwise_not.default)
        if of_bools and value_of(node.all_input_nodes[0]).dtype is not torch.bool:
            raise Unsupported(f"`{node.target}` of numbers")
        if (alpha := node.kwargs.get("alpha", 1)) != 1:
            values[1] = f"({alpha} * {values[1]})"
        if node.kwargs.get("rounding_mode") is not None:
            raise Unsupported("a division that is rounded")
        return self.new(POINTWISE[node.target].format(*values), place)

    def _power(self, node: fx.Node, place: Place) -> str:
        base, exponent = self._operand(node, node.args[0], place), node.args[1]
        if not isinstance(exponent, int | float):
            raise Unsupported("a power that only a run knows")
        if exponent % 0.5 or abs(exponent) > 8:
            if value_of(node).dtype.is_floating_point:
                return self.new(f"tl.exp2({float(exponent)!r} * tl.log2({base}))", place)
            raise Unsupported(f"a power of {exponent}")
        factors = [base] * int(abs(exponent)) + [f"tl.sqrt({base})"] * bool(exponent % 1)
        product = " * ".join(factors) or "1.0"
        return self.new(product if exponent >= 0 else f"1.0 / ({product})", place)

    def _clamped(self, node: fx.Node, place: Place) -> str:
        value = self._operand(node, node.args[0], place)
        for operation, end in zip(("maximum", "minimum"), (*node.args[1:], None, None), strict=False):
            if end is not None:
                value = f"tl.{operation}({value}, {self._scalar(end)}, propagate_nan=tl.PropagateNan.ALL)"
        return self.new(value, place)

    def _cast(self, node: fx.Node, place: Place) -> str:
        argument, dtype = node.args[0], value_of(node).dtype
        assert isinstance(argument, fx.Node)
        value, given = self.value(argument, place), value_of(argument).dtype
        if dtype in HALVES:
            return f"({value}).to({HALVES[dtype]}).to({self.precision})"
        if dtype.is_floating_point:
            return value if given.is_floating_point else f"({value}).to({self.precision})"
        if dtype == given:
            return value
        raise Unsupported(f"a cast from {given} to {dtype}")

    def _iota(self, node: fx.Node, place: Place) -> str:
        start, step = (node.kwargs.get(name, default) for name, default in (("start", 0), ("step", 1)))
        return self.new(f"({self.text_of(place[0])}) * {number_of(step)} + {number_of(start)}", place)

    def _load(self, node: fx.Node, place: Place) -> str:
        value = value_of(node)
        if value.is_complex():
            raise Unsupported(f"an input of {value.dtype}")
        number = self.reads.setdefault(node, len(self.reads))
        axes = self.axes(place)
        masks = [self.inside(axes)]
        if not all(at.within(self.space, size) for at, size in zip(place, shape_of(value), strict=True)):
            masks += self.guards
        masks = [mask for mask in masks if mask]
        masked = f", mask={' & '.join(masks)}, other=0" if masks else ""
        cast = f".to({self.precision})" if value.is_floating_point() else ""
        name = self.new(f"tl.load({self.address(f'x{number}', place)}{masked}){cast}", place)
        self.hoisted -= bool(axes and self.depth_of(name) == ONCE)
        return name

    # reductions

    def _reduction(self, node: fx.Node, place: Place) -> str:
        if sums_rows(node):
            raise Unsupported(f"`{node.name}` adds up rows, and its sum is read in the region")
        operand = node.all_input_nodes[0]
        if not value_of(operand).dtype.is_floating_point and (
            node.target in LARGEST or value_of(operand).dtype != torch.bool
        ):
            raise Unsupported(f"a reduction of {value_of(operand).dtype}")
        there, over = self._operand_place(node, place)
        if not over:
            return self.value(operand, there)
        space = self.space
        real = {k for k in range(space.leads, len(space.sizes)) if space.sizes[k] != 1}
        inner = {k for k in real if k >= space.first_inner} | ({space.lane} - {None})
        outer = real - inner
        if over not in (inner, outer, inner | outer):
            raise Unsupported(f"`{node.name}` reduces a part of a row")
        return self._reduced(node, there, "@p" * bool(over & outer) + "@q" * bool(over & inner), place)

    def _operand_place(self, node: fx.Node, place: Place) -> tuple[Place, set[int]]:
        """Where the operand of a reduction is read, and the coordinates that it runs over."""
        value, dims = value_of(node.all_input_nodes[0]), reduced_dims(node)
        shape, space = shape_of(value), self.space
        keeps = value_of(node).ndim == value.ndim
        rest = list(place)
        there: list[Index] = []
        for dim in range(value.ndim):
            there.append(space.zero if dim in dims else rest.pop(0))
            if dim in dims and keeps:
                rest.pop(0)
        used = {k for at in there for k in at.used}
        if along_a_symbol(node):
            if space.lane is None or space.sizes[space.lane] != shape[-1] or space.lane in used:
                raise Unsupported(f"`{node.name}` reduces rows whose width only a run knows")
            return moved(tuple(there), value.ndim - 1, space.coordinate(space.lane)), {space.lane}
        lanes = math.prod(shape[dim] for dim in dims)
        over: set[int] = set()
        steps, step = [0] * len(space.sizes), 1
        for k in reversed(range(space.leads, len(space.sizes))):
            if k not in used and space.sizes[k] != 1 and step < lanes:
                over.add(k)
                steps[k], step = step, step * space.sizes[k]
        if step != lanes:
            raise Unsupported(f"`{node.name}` is read at other places than its own")
        for dim, index in zip(dims, Index(tuple(steps), 0).divided(space, [shape[d] for d in dims]), strict=True):
            there[dim] = index
        return tuple(there), over

    def _reduced(self, node: fx.Node, there: Place, over: str, place: Place) -> str:
        """The sum or the largest of a row, over axes of a tile and over its tiles."""
        operand = node.all_input_nodes[0]
        largest = node.target in LARGEST
        least = 'float("-inf")' if largest else "0.0"
        full = "@p" * (self.space.outer_size > 1) + "@q"
        left = "".join(axis for axis in ("@p", "@q") if axis in full and axis not in over)
        guards, self.guards = self.guards, ()  # a sum over lanes has nothing to do with where it is read

        def summand() -> str:
            value = self.value(operand, there)
            if value_of(operand).dtype is torch.bool:
                value = f"({value}).to({self.precision})"
            if any(axis not in value for axis in ("@p", "@q") if axis in full):
                value = f"({value} + {zeros(full, self.precision)})"
            mask = self.inside(full)
            return self.new(f"tl.where({mask}, {value}, {least})", there, full) if mask else value

        if self.tiling.loops:
            total = self.new(f"tl.full([P, Q], {least}, {self.precision})", (), "")
            more = "tl.maximum({0}, {1})" if largest else "{0} + {1}"
            self.block(lambda: self.lines[-1].append(f"{total} = {more.format(total, summand())}"))
        else:
            total = summand()
        self.guards = guards
        return self.new(self._over_tiles(total, over, largest), place, left)

    def _over_tiles(self, value: str, axes: str, largest: bool) -> str:
        values = [value]
        for axis in ("@p", "@q"):
            if axis in axes and axis in value:
                values = [v.replace(axis, name) for v in values for name in self.tiling.names(axis)]
        text = values[0]
        for more in values[1:]:
            text = f"tl.maximum({text}, {more})" if largest else f"({text} + {more})"
        for number, axis in ((1, "@q"), (0, "@p")):
            if axis in axes:
                text = f"tl.{'max' if largest else 'sum'}({text}, {number}, keep_dims=True)"
        return text

    # joins

    def _joined(self, node: fx.Node, place: Place) -> str:
        choices = joined(node, place, self.space)
        last = choices.pop()
        assert not isinstance(last, Choice)
        guards = self.guards
        outside: list[str] = []
        texts = []
        for choice in choices:
            assert isinstance(choice, Choice)
            hit = self._hit(choice)
            self.guards = (*guards, *outside, hit)
            texts.append((hit, self.value(choice.node, choice.place)))
            outside.append(f"({hit} == 0)")
        is_base = node.target is not aten.cat.default
        self.guards = guards if is_base else (*guards, *outside)
        result = self.value(*last)
        self.guards = guards
        for hit, value in reversed(texts):
            result = f"tl.where({hit}, {value}, {result})"
        return self.new(result, place) if texts else result

    def _hit(self, choice: Choice) -> str:
        index = self.text_of(choice.index)
        hit = f"({index} >= {self.number(choice.first)}) & ({index} < {self.number(choice.end)})"
        if choice.step != 1:
            hit += f" & (({index} - {self.number(choice.first)}) % {choice.step} == 0)"
        return f"({hit})"
