"""Options and settings of all tests."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# asked in the usual way whether there is a GPU, the driver leaves processes that are forked later without one
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# machines differ in speed by more than any deadline should
settings.register_profile("arachnec", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("arachnec"), max_examples=1000)  # `make fuzz`
# what decides whether a change lands must not depend on the draw; everybody else's runs keep searching
settings.register_profile("decides", settings.get_profile("arachnec"), derandomize=True)
settings.load_profile("decides" if os.environ.get("CI") else "arachnec")


# traces and graphs are millions of objects that live on: looking at them again and again is a tenth of the time
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries take what is frozen at the end for leaked, and say so at length


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/**/*.expect")
