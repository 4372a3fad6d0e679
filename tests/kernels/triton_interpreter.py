"""Triton's interpreter, which a variable starts for a whole process: one that is kept, as its imports take longer."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import warnings
from typing import Any

from tests.distributed.harness import RankPool

_POOL = RankPool(1, program=sys.executable)  # Triton reads the variable when it is imported
atexit.register(_POOL.close)


def in_interpreter(module: str, *arguments: Any) -> dict[str, dict[str, float]]:
    """What ``main(*arguments)`` of a module of the tests returns where Triton's kernels are interpreted."""
    (errors,) = _POOL.run(_main, module, arguments, timeout=280)
    assert isinstance(errors, dict)
    return errors


def _main(module: str, arguments: tuple[Any, ...]) -> dict[str, dict[str, float]]:
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    let_one_element_be_an_index()
    errors: dict[str, dict[str, float]] = importlib.import_module(module).main(*arguments)
    return errors


@functools.cache
def let_one_element_be_an_index() -> None:
    """Lets Triton 3.6's interpreter (PyTorch 2.11) run under NumPy 2.5, where an array of one element is no int."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
