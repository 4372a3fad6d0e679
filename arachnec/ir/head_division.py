"""Who computes which query groups of which head. In: the attribute ``heads`` of a cascade. Out: parts by layer.

A row is ``[layers, place of each head, parts]``. A place is a number into the ranks of a clip, -1 for a head that is
cut; of these the parts follow, four numbers each: head, place, first group, and the group behind the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arachnec.ir.nodes import Cascade, integer, integers
from arachnec.ir.values import Value

CUT = -1


@dataclass(frozen=True, order=True)
class HeadPart:
    """Query groups ``start`` to ``stop`` - 1 of a head, at a place among the ranks of a clip."""

    head: int
    place: int
    start: int
    stop: int


def parts_by_layer(cascade: Cascade) -> Mapping[int, tuple[HeadPart, ...]]:
    """The parts of every sparse layer, by head; empty for a cascade whose heads are not divided."""
    rows = cascade.attrs.get("heads", ())
    assert isinstance(rows, tuple)
    groups = integer(cascade.attrs.get("groups", 0))
    table: dict[int, tuple[HeadPart, ...]] = {}
    for row in rows:
        assert isinstance(row, tuple)
        layers, places, cut = map(integers, row)
        whole = [HeadPart(head, place, 0, groups) for head, place in enumerate(places) if place != CUT]
        pieces = [HeadPart(*cut[at : at + 4]) for at in range(0, len(cut) - 3, 4)]
        table |= dict.fromkeys(layers, tuple(sorted([*whole, *pieces])))
    return table


def head_rows(layers: Mapping[int, Sequence[HeadPart]], heads: int, groups: int) -> tuple[Value, ...]:
    """The attribute: layers that are divided alike in one row, by their first."""
    alike: dict[tuple[HeadPart, ...], list[int]] = {}
    for layer, parts in sorted(layers.items()):
        alike.setdefault(tuple(sorted(parts)), []).append(layer)
    return tuple((tuple(numbers), *_row(parts, heads, groups)) for parts, numbers in alike.items())


def _row(parts: Sequence[HeadPart], heads: int, groups: int) -> tuple[Value, Value]:
    places = [CUT] * heads
    cut: list[int] = []
    for part in parts:
        if (part.start, part.stop) == (0, groups):
            places[part.head] = part.place
        else:
            cut += [part.head, part.place, part.start, part.stop]
    return tuple(places), tuple(cut)
