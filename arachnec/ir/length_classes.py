"""Values of a layer's heads by class of length. In: a clip's tokens. Out: its class, and the values that hold for it.

A class is named by the fewest tokens of its clips, a power of two, and has those up to the next; the last has all
longer ones too. It follows from the clip alone, so it is the same in every plan. docs/sparse_attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

LENGTH_CLASSES = tuple(1 << power for power in range(21))

Heads: TypeAlias = tuple[float, ...]


def length_class(tokens: int) -> int:
    """Of a clip of so many tokens."""
    return min(1 << (max(1, tokens).bit_length() - 1), LENGTH_CLASSES[-1])


@dataclass(frozen=True)
class ByLength:
    """A value for each head: over clips of all lengths, and of the classes that have their own, ascending."""

    heads: Heads
    classes: tuple[tuple[int, Heads], ...] = ()

    def at(self, tokens: int) -> Heads:
        """For clips of so many tokens: those of all lengths where their class has none of its own."""
        return dict(self.classes).get(length_class(tokens), self.heads)
