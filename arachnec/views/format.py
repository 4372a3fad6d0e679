"""Times and ranks as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence


def ms(value: float) -> str:
    """Milliseconds: ``3.1 ms``, ``4.95 s``."""
    if value < 1e3:
        return f"{value:.3g} ms"
    return f"{value / 1e3:.4g} s"


def ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(ranks))


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of every run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
