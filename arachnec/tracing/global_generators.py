"""The generators of a process that every draw without one of its own comes from: torch's, ``random``'s, numpy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

TORCH, PYTHON, NUMPY = "torch", "random", "numpy.random"


def move(number: int) -> None:
    """Each to a state of its own for every number."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def states() -> dict[str, Any]:
    """By name; what was drawn from is in another state."""
    kind, keys, *rest = np.random.get_state()
    numpy_state = (kind, np.asarray(keys).tobytes(), *rest)
    return {TORCH: bytes(torch.get_rng_state().numpy()), PYTHON: random.getstate(), NUMPY: numpy_state}


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Afterwards they are as before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
