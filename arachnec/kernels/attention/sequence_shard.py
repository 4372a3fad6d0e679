"""How the tokens of one cascade lie over the ranks of its group."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """``total`` things over ``parts`` places as evenly as possible, larger shares first; shares may be 0."""
    share, rest = divmod(total, parts)
    return (share + 1,) * rest + (share,) * (parts - rest)


def rescaled_tokens(tokens: tuple[int, ...], length: int) -> tuple[int, ...]:
    """``length`` tokens in the same shares as these."""
    total = max(sum(tokens), 1)
    ends = [length * sum(tokens[: i + 1]) // total for i in range(len(tokens))]
    ends[-1] = length
    return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where each of the consecutive ranges of these ``sizes`` starts."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return tuple(starts[:-1])


@dataclass(frozen=True)
class SequenceShard:
    """The shards of a sequence of S tokens over d ranks, seen from one of them.

    The ranks form a grid: *positions* (indices into ``ranks``) ``[k * ulysses, (k + 1) * ulysses)`` exchange heads with
    each other, positions with the same ``position % ulysses`` pass keys and values round a ring. ``tokens`` are
    consecutive ranges of the sequence in the order of the positions, so every Ulysses group holds a consecutive range.
    """

    ranks: tuple[int, ...]  # global ranks, by position
    index: int  # this rank's position
    tokens: tuple[int, ...]  # tokens per position, sum = S; any may be 0
    ulysses: int
    ring: int
    group: dist.ProcessGroup | None = None  # all ranks; None for a single rank
    ulysses_group: dist.ProcessGroup | None = None  # None where ulysses is 1
    ring_group: dist.ProcessGroup | None = None  # None where ring is 1
    attention: str | None = None  # the kernel family that the plan names; None: the best of the device

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or len(self.tokens) != len(self.ranks):
            raise ValueError(f"one token count per distinct rank is needed: ranks {self.ranks}, tokens {self.tokens}")
        if self.ulysses * self.ring != len(self.ranks):
            raise ValueError(f"ulysses {self.ulysses} x ring {self.ring} is not the degree {len(self.ranks)}")
        if not 0 <= self.index < len(self.ranks):
            raise ValueError(f"position {self.index} is not one of {len(self.ranks)}")

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def total(self) -> int:
        """S, the length of the whole sequence."""
        return sum(self.tokens)

    @property
    def local(self) -> int:
        """Tokens on this rank."""
        return self.tokens[self.index]

    @property
    def offset(self) -> int:
        """Global position of this rank's first token."""
        return sum(self.tokens[: self.index])

    @property
    def ulysses_positions(self) -> tuple[int, ...]:
        """The positions this rank exchanges heads with, itself included."""
        return ulysses_positions(self.index, self.ulysses)

    @property
    def ring_positions(self) -> tuple[int, ...]:
        """The positions of this rank's ring in the order of the sequence, itself included."""
        return ring_positions(self.index, self.ulysses, self.ring)


def ulysses_positions(index: int, ulysses: int) -> tuple[int, ...]:
    first = index - index % ulysses
    return tuple(range(first, first + ulysses))


def ring_positions(index: int, ulysses: int, ring: int) -> tuple[int, ...]:
    return tuple(range(index % ulysses, ulysses * ring, ulysses))
