"""Options and settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# machines differ in speed by more than any deadline should
settings.register_profile("arachnec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("arachnec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/**/*.expect")
