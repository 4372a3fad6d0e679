"""What `make test` leaves out and `make test-all` runs: more cases of a rule that quicker ones hold, and dry runs of
benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

SLOW = pytest.mark.slow


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of a test that others hold in less time."""
    return pytest.param(*values, id=id, marks=SLOW)


def quick(cases: Mapping[str, Any] | Iterable[str], *names: str) -> list[Any]:
    """Cases by their names: those of ``names`` run always, the others with the slow tests."""
    values = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    assert names and set(names) <= set(values), f"no case of these names: {sorted(set(names) - set(values))}"
    return [pytest.param(v, id=name) if name in names else slow(v, id=name) for name, v in values.items()]
