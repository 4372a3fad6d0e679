"""Attribute values of the cascade IR: quantities with units, symbols, formulas, and the attribute mapping itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, TypeVar, Union, overload

from arachnec.ir.diagnostic import Span

Default = TypeVar("Default")
UNITS = ("ms", "us", "GiB", "MiB", "GB/s", "TFLOP", "TFLOP/s")


@dataclass(frozen=True)
class Quantity:
    """A number with its unit, written ``4950 ms``. Never converted silently: a table says which unit it wants."""

    value: float
    unit: str


@dataclass(frozen=True)
class Symbol:
    """A reference to a named part of the module, written ``@dit``."""

    name: str


@dataclass(frozen=True)
class Term:
    """``coefficient * variable^power * ...``; powers are normalised: sorted by variable, merged, positive."""

    coefficient: float
    powers: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        total: dict[str, int] = {}
        for name, power in self.powers:
            if power < 0:
                raise ValueError(f"a formula is a polynomial, it has no {name}^{power}")
            total[name] = total.get(name, 0) + power
        object.__setattr__(self, "powers", tuple(sorted((n, p) for n, p in total.items() if p)))

    def of(self, sizes: Mapping[str, float]) -> float:
        """The term for these sizes."""
        product = 1.0
        for name, power in self.powers:
            product *= sizes[name] ** power
        return self.coefficient * product


@dataclass(frozen=True)
class Formula:
    """A polynomial in the sizes of one cascade, with a unit: ``1.9e-09*B*S^2 + 2.4e-05*B*S + 1.1 ms``.

    Variables are ``B`` (clips in the micro-batch), ``S`` (tokens of one clip) and ``T`` (text tokens of one clip).
    """

    terms: tuple[Term, ...]
    unit: str

    def __call__(self, *, B: float, S: float, T: float = 0.0) -> float:
        sizes = {"B": B, "S": S, "T": T}
        return math.fsum([term.of(sizes) for term in self.terms])

    @property
    def constant(self) -> float:
        """The part that no size scales: launch overhead, fixed buffers."""
        return math.fsum(term.coefficient for term in self.terms if not term.powers)


Value: TypeAlias = Union[bool, int, float, str, Quantity, Symbol, Formula, tuple["Value", ...], "Attributes"]


@dataclass(frozen=True)
class Attributes(Mapping[str, Value]):
    """An immutable, hashable, ordered mapping from attribute name to value."""

    pairs: tuple[tuple[str, Value], ...] = ()
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    """Where each name stood in the text, in the order of ``pairs``; empty where nothing was parsed."""

    @classmethod
    def of(cls, **values: Value | None) -> Attributes:
        """Build from keywords; a keyword that is None is left out."""
        return cls(tuple((key, value) for key, value in values.items() if value is not None))

    @cached_property
    def _named(self) -> dict[str, Value]:
        return dict(reversed(self.pairs))  # of a name that stands twice, the first

    def __getitem__(self, key: str) -> Value:
        return self._named[key]

    def __contains__(self, key: object) -> bool:
        return key in self._named

    @overload
    def get(self, key: str, /) -> Value | None: ...

    @overload
    def get(self, key: str, /, default: Value) -> Value: ...

    @overload
    def get(self, key: str, /, default: Default) -> Value | Default: ...

    def get(self, key: str, /, default: object = None) -> object:  # Mapping's own raises for what is not there
        return self._named.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def _hash(self) -> int:
        return hash(self.pairs)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # another process hashes text otherwise
        return {"pairs": self.pairs, "spans": self.spans}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attributes) and self.pairs == other.pairs

    def span(self, key: str) -> Span | None:
        """Where this attribute stood in the text, if it was parsed."""
        return next((span for (name, _), span in zip(self.pairs, self.spans, strict=False) if name == key), None)

    def updated(self, **values: Value | None) -> Attributes:
        """A copy with these attributes set in place, new ones appended, and those given as None removed."""
        kept = tuple((k, values.get(k, v)) for k, v in self.pairs)
        new = tuple((k, v) for k, v in values.items() if k not in self)
        return Attributes(tuple((k, v) for k, v in kept + new if v is not None))


def formula_sum(parts: Iterable[tuple[float, Formula]], unit: str) -> Formula:
    """The sum of formulas of one unit, each so many times."""
    total: dict[tuple[tuple[str, int], ...], float] = {}
    for count, formula in parts:
        for term in formula.terms:
            total[term.powers] = total.get(term.powers, 0.0) + count * term.coefficient
    return Formula(tuple(Term(value, powers) for powers, value in total.items() if value), unit)


def non_negative(formula: Formula) -> Formula:
    """The formula, or its positive terms alone where it falls below zero for a clip of few or many tokens."""
    if all(formula(B=1, S=tokens, T=text) >= 0 for tokens in (1, 2**17) for text in (0, 512)):
        return formula
    return Formula(tuple(term for term in formula.terms if term.coefficient > 0), formula.unit)
