"""Models that ``torch.compile`` wrapped. In: a module. Out: the same as it was written.

Tracing needs the forwards themselves, and a graph is compiled by ``arachnec`` where it is fused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from arachnec.ir.diagnostic import user_error

if TYPE_CHECKING:
    from torch import nn

DYNAMO = "torch._dynamo"
ORIGINAL = "_torchdynamo_orig_callable"  # torch keeps what it compiled there


def without_compilation(model: nn.Module) -> nn.Module:
    """The model with every compiled module, call and ``forward`` in it replaced by its original, in place. Raises
    ``UserError`` for a module that TorchScript compiled, which keeps no original."""
    model = _original(model)
    for path, module in model.named_modules():
        if isinstance(module, sys.modules["torch"].jit.ScriptModule):
            raise user_error(
                f"`{path or type(module).__name__}` is compiled by TorchScript",
                help="build the module itself, without torch.jit.script and torch.jit.trace",
            )
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _original(child)
    for module in model.modules():
        if module.__dict__.get("_compiled_call_impl") is not None:
            module._compiled_call_impl = None
        forward = module.__dict__.get("forward")
        if hasattr(forward, ORIGINAL):
            _restore_forward(module, getattr(forward, ORIGINAL))
    return model


@contextmanager
def running_as_written() -> Iterator[None]:
    """Inside, functions that ``torch.compile`` wrapped run as they are written."""
    import torch

    with torch.compiler.set_stance("force_eager") if DYNAMO in sys.modules else nullcontext():
        yield


def _original(module: Any) -> Any:
    wrapper = getattr(sys.modules.get(DYNAMO), "OptimizedModule", None)  # importing it takes seconds
    while wrapper is not None and isinstance(module, wrapper):
        module = module._orig_mod
    return module


def _restore_forward(module: nn.Module, forward: Any) -> None:
    """``forward`` is what was compiled: torch puts a function of its own around a method."""
    code = getattr(forward, "__code__", None)
    if code is not None and f"{os.sep}_dynamo{os.sep}" in code.co_filename:
        forward = getattr(forward, "__wrapped__", forward)
    if getattr(forward, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward
