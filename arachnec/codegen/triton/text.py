"""A kernel's text: the body that ``codegen.triton.source`` writes, the loop over a run of rows around it, arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Size, Space, Unsupported
from arachnec.codegen.triton.lines import BLOCK, ONCE, ROW, WHOLE, Tiling, spread, tiles_of, zeros
from arachnec.codegen.triton.operations import needed, reduced_dims, sums_rows, value_of
from arachnec.codegen.triton.places import Place
from arachnec.codegen.triton.rows import Target, space_of
from arachnec.codegen.triton.source import Writer

INDENT = "    "


class TooWide(Unsupported):
    """Rows that fit no tile, reduced along and added up: the reductions have to be made before the sums."""


@dataclass(frozen=True)
class Source:
    """A kernel's text. It reads the tensors of ``reads``, writes ``stores`` and partial ``sums``.

    ``numbers``: made of sizes, arguments of the kernel; ``rows``: sizes of the coordinates that rows are counted by;
    ``groups``: how many of these, the first, a run of rows does not leave.
    """

    name: str
    text: str
    reads: tuple[fx.Node, ...]
    stores: tuple[Target, ...]
    sums: tuple[Target, ...]
    numbers: tuple[Size, ...]
    rows: tuple[Size, ...]
    groups: int
    space: Space
    tiling: Tiling

    def named(self, name: str) -> Source:
        return replace(self, name=name, text=self.text.replace(f"def {self.name}(", f"def {name}("))


def write_source(targets: Sequence[Target], ends: frozenset[fx.Node], tiling: Tiling | None = None) -> Source:
    """A kernel for ``targets``, which have their rows in common. Raises ``Unsupported``, and ``Cut`` at joins.

    ``ends``: nodes that kernels before it make.
    """
    nodes = needed([target.node for target in targets], ends)
    space = space_of(targets, [node for node in nodes if node not in ends])
    stores = [target for target in targets if target.sum is None]
    sums = [target for target in targets if target.sum is not None]
    reduces = any(reduced_dims(n) and not sums_rows(n) and n not in ends for n in nodes)
    tiling = tiling or tiling_of(space, reduces, bool(sums))
    if sums and space.lane is not None:
        raise TooWide("its rows are added up, and as wide as only a run knows")
    kept = {target.kept for target in sums if target.kept}
    if len(kept) > 1:
        raise Unsupported("its sums over rows keep different rows")
    group = next(iter(kept), ())
    writer = _written(targets, space, tiling, ends, group)
    if not group and _reads_of_first(writer):
        group = _reads_of_first(writer)
        writer = _written(targets, space, tiling, ends, group)
    full_rows = {
        node for node, place, _ in writer.known[ROW] if node in writer.reads and "@q" in writer.axes(place)
            and len(writer.rows(place)) == space.leads}  # fmt: skip
    if reduces and sums and not tiling.holds(len(sums) + len(full_rows) + 2):
        raise TooWide(
            f"{len(sums)} sums over rows and {len(full_rows)} rows of {tiling.lanes} do not fit the registers"
        )
    order = [*group, *(k for k in range(space.leads) if k not in group and k != space.lane)]
    text = _text(writer, stores, sums, order, len(group))
    rows = tuple(space.sizes[k] for k in order)
    return Source(
        "kernel", text, tuple(writer.reads), tuple(stores), tuple(sums), tuple(writer.numbers), rows, len(group),
        space, tiling,
    )  # fmt: skip


def tiling_of(space: Space, reduces: bool, sums: bool) -> Tiling:
    outer, inner = space.outer_size, space.inner_size
    if outer == 1 and inner > BLOCK and not reduces:
        return spread(inner)
    if outer * inner <= WHOLE:
        return tiles_of(outer, inner)
    if reduces and sums:
        raise TooWide(f"its rows of {outer * inner} are reduced and added up")
    if outer > 1:
        raise Unsupported(f"its rows of {outer * inner} are reduced in parts")
    return Tiling(1, inner, 1, BLOCK, loops=True)


def tilings_of_symbol() -> dict[int, Tiling]:
    """For rows whose width only a run knows, by the widest they take: held whole, or (0: any) gone over in blocks."""
    return {
        512: Tiling(1, 0, 1, 512),
        WHOLE // 2: Tiling(1, 0, 1, WHOLE // 2),
        0: Tiling(1, 0, 1, BLOCK, loops=True),
    }


def _written(
    targets: Sequence[Target], space: Space, tiling: Tiling, ends: frozenset[fx.Node], group: Sequence[int]
) -> Writer:
    nodes = needed([target.node for target in targets], ends)
    double = any(isinstance(v := n.meta.get("val"), Tensor) and v.dtype == torch.float64 for n in nodes)
    sums = [target for target in targets if target.sum is not None]
    precision = "tl.float64" if double else "tl.float32"
    writer = Writer(space, tiling, precision, frozenset(group), tiling.held(len(sums)), ends=ends)
    for number, target in enumerate(sums):
        if not value_of(target.node).is_floating_point():
            raise Unsupported(f"a sum of {value_of(target.node).dtype}")
        full = "@p" * (space.outer_size > 1) + "@q"
        writer.lines[ROW].append(f"sum{number}{full} += {writer.value(target.node, target.place(space))}")

    def stored(wide: bool) -> None:
        number = 0
        for target in targets:
            if target.sum is None:
                place = target.place(space)
                if wide == ("@q" in writer.axes(place)) or not tiling.loops:
                    _store(writer, number, target, place)
                number += 1

    stored(False)
    if tiling.loops:
        writer.block(lambda: stored(True))
    return writer


def _store(writer: Writer, number: int, target: Target, place: Place) -> None:
    if not value_of(target.node).is_floating_point():
        raise Unsupported(f"a result of {value_of(target.node).dtype}")
    value = writer.value(target.node, place)
    axes = writer.axes(place)
    mask = writer.inside(axes)
    depth = len(writer.lines) - 1 if "@q" in axes and writer.tiling.loops else ROW
    address = writer.address(f"y{number}", place)
    address += "" if all(a in axes for a in ("@p", "@q")) else f" + {zeros(axes)}"
    writer.lines[depth].append(
        f"tl.store({address}, ({value} + {zeros(axes, writer.precision)}).to(y{number}.dtype.element_ty)"
        f"{f', mask={mask}' if mask else ''})"
    )


def _reads_of_first(writer: Writer) -> tuple[int, ...]:
    """The first coordinate of rows, where something is read that changes with it alone."""
    space = writer.space
    rows = [k for k in range(space.leads) if k != space.lane]
    if len(rows) < 2 or writer.tiling.loops:
        return ()
    places = (place for node, place, _ in writer.known[ROW] if node in writer.reads)
    return (rows[0],) if any(writer.rows(place) == {rows[0]} for place in places) else ()


def _expanded(line: str, tiling: Tiling) -> list[str]:
    """A line for each tile."""
    lines = [line]
    for axis in ("@p", "@q"):
        names = tiling.names(axis)
        lines = [copy.replace(axis, name) for copy in lines for name in (names if axis in copy else [""])]
    return lines


def _lanes(writer: Writer) -> list[str]:
    """Coordinates of each tile, and which of its lanes are in the row."""
    space, tiling = writer.space, writer.tiling
    lines = []
    if space.outer_size > 1:
        for k, line in enumerate(_expanded("p@p = ", tiling)):
            lines.append(f"{line}{f'{k * tiling.p} + ' if k else ''}tl.arange(0, P)[:, None]")
        lines += [] if tiling.fits("@p") else _expanded(f"in_p@p = p@p < {space.outer_size}", tiling)
    if not tiling.loops:
        start = "tl.program_id(1) * Q + " if tiling.spread else ""
        for k, line in enumerate(_expanded("q@q = ", tiling)):
            lines.append(f"{line}{f'{k * tiling.q} + ' if k else start}tl.arange(0, Q)[None, :]")
        lines += [] if tiling.fits("@q") else _expanded(f"in_q@q = q@q < {writer.width}", tiling)
    return lines


def _rows(writer: Writer, order: Sequence[int], groups: int) -> tuple[list[str], list[str]]:
    """Lines that make a group's coordinates, and a row's."""

    def counted(name: str, coordinates: Sequence[int]) -> list[str]:
        lines = []
        for k in reversed(coordinates[1:]):
            size = writer.number(writer.space.sizes[k])
            lines += [f"i{k} = {name} % {size}", f"{name} = {name} // {size}"]
        return [*lines, f"i{coordinates[0]} = {name}"] if coordinates else []

    group, rest = order[:groups], order[groups:]
    outside = ["of_group = group", *counted("of_group", group)] if group else []
    return outside, ["left = row - group * group_rows", *counted("left", rest)] if rest else []


def _text(writer: Writer, stores: Sequence[Target], sums: Sequence[Target], order: Sequence[int], groups: int) -> str:
    tiling = writer.tiling
    outside, inside = _rows(writer, order, groups)
    lanes = _lanes(writer)
    full = "@p" * (writer.space.outer_size > 1) + "@q"
    inner = writer.space.inner_size
    tensors = {f"x{k}": value_of(node) for node, k in writer.reads.items()}
    tensors |= {f"y{k}": value_of(target.node) for k, target in enumerate(stores)}
    strides = [f"{name}_{dim}" for name, value in tensors.items() for dim in range(value.ndim)]
    numbers = [*strides, *writer.numbers.values(), "rows", "group_rows", "run"]
    pointers = [*tensors, *(["partials"] if sums else [])]
    dense = []
    for name, value in tensors.items():
        step = max(16 // value.element_size(), 1)
        for dim in range(value.ndim):
            stride, last = f"{name}_{dim}", dim == value.ndim - 1
            known = "1" if last and value.shape[dim] != 1 else f"{stride} // {step} * {step}"
            dense.append(f"    {stride} = {known} if DENSE else {stride}")
    offset = f"(program * {len(sums)} + {{0}}) * {writer.space.outer_size * inner}"
    at = f"p@p * {inner} + q@q" if writer.space.outer_size > 1 else "q@q"
    mask = f", mask={writer.inside(full)}" if writer.inside(full) else ""
    held = [f"sum{k}{full} = {zeros(full if '@p' in full else '@q', writer.precision)}" for k in range(len(sums))]
    written = [f"tl.store(partials + {offset.format(k)} + {at}, sum{k}{full}{mask})" for k in range(len(sums))]

    def expanded(lines: Sequence[str], depth: int) -> list[str]:
        return [INDENT * depth + copy for line in lines for copy in _expanded(line, tiling)]

    text = [
        '"""Generated from the operations of a region; see docs/fusion.md."""',
        "import triton",
        "import triton.language as tl",
        "",
        f"NUMBERS = {numbers!r}",
        "",
        "@triton.jit(do_not_specialize=NUMBERS)",
        f"def kernel({', '.join([*pointers, *numbers])}, P: tl.constexpr, Q: tl.constexpr, DENSE: tl.constexpr):",
        *dense,
        "    program = tl.program_id(0).to(tl.int64)",
        "    runs = (group_rows + run - 1) // run",
        "    group = program // runs",
        "    first = group * group_rows + (program - group * runs) * run",
        "    end = tl.minimum(first + run, (group + 1) * group_rows)",
        *expanded([*outside, *lanes, *writer.lines[ONCE], *held], 1),
        "    for row in tl.range(first, end):",
        *expanded([*inside, *writer.lines[ROW]], 2),
        *expanded(written, 1),
        "",
    ]
    return "\n".join(text)


def tiles_for(targets: Sequence[Target]) -> dict[int, Tiling | None]:
    """The tilings to compile kernels of these targets for, by the widest row each takes (0: any)."""
    return dict(tilings_of_symbol()) if targets[0].lane is not None else {0: None}
