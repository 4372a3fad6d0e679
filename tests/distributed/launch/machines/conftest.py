"""Hosts made of network namespaces, for the tests of machines."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture(scope="module")
def fabric() -> Iterator[ModuleType]:
    """``hosts.fabric`` of the benchmarks; skipped where such hosts cannot be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("hosts.fabric")
        reason = module.unavailable()
        if reason is not None:
            pytest.skip(reason)
        yield module
