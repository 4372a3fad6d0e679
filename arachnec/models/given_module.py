"""A module that somebody has built, with its ``sample`` and ``loss``, as a model file."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.models.compiled_modules import without_compilation
from arachnec.models.file import MODEL_FILE, ModelFile, checked_function
from arachnec.models.pretrained_on_meta import without_values

SCRIPT = replace(MODEL_FILE, kind="script")


def nothing_given_error(kind: str, name: str, remedy: str) -> UserError:
    return user_error(f"Engine was given a {kind} without `{name}`", help=remedy)


def with_own_optimizer(model_file: ModelFile, optimizer: object) -> ModelFile:
    """The model file with this function in place of its ``optimizer``. Raises ``UserError`` where it is none."""
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise user_error(
            f"`optimizer` is a {type(optimizer).__name__}, not a function of the parameters",
            help="give one: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
    return replace(model_file, optimizer=guarded(optimizer, "optimizer"))


def guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of the user's script, what it raises told at its line; a class or a builtin as it is."""
    code = getattr(function, "__code__", None)
    return function if code is None else checked_function(function, Path(code.co_filename).absolute(), name, SCRIPT)


def given_module(
    module: object,
    sample: Callable[..., Any] | None,
    loss: Callable[..., Any] | None,
    encoders: Callable[[], dict[str, nn.Module]] | None = None,
) -> ModelFile:
    """A model file whose ``build`` gives the module itself, and on the meta device a copy without values.

    Raises ``UserError`` where it is no module, or a function is missing.
    """
    module = without_compilation(module) if isinstance(module, nn.Module) else module
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        remedy = "give the path of a model file, or a torch.nn.Module with sample= and loss="
        raise nothing_given_error(kind, "parameters", remedy)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        remedy = "unfreeze what is to train, or add an adapter: requires_grad is False of all parameters"
        raise nothing_given_error(kind, "a parameter that trains", remedy)
    for name, function, arguments in (("sample", sample, "clip, generator"), ("loss", loss, "prediction, target")):
        if not callable(function):
            remedy = f"add {name}=FUNCTION, a function of ({arguments}) as docs/your_model.md describes it"
            raise nothing_given_error(kind, name, remedy)
    assert sample is not None
    path = _file_of(sample) or Path(__file__)
    functions = {"sample": sample, "loss": loss, "encoders": encoders}
    told = {n: None if f is None else checked_function(f, _file_of(f) or path, n, SCRIPT) for n, f in functions.items()}
    digest = hashlib.sha256(_source(module, functions).encode()).hexdigest()
    shapes = without_values(module)

    def build() -> nn.Module:
        return copy.deepcopy(shapes) if torch.empty(0).is_meta else module

    return ModelFile(build=build, path=path, digest=digest, module=module, **told)  # type: ignore[arg-type]


def _file_of(function: Callable[..., Any]) -> Path | None:
    """The file that defines a function, a partial one or a callable object; None where Python does not say."""
    while isinstance(function, functools.partial):
        function = function.func
    called = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        file = inspect.getsourcefile(called)
    except TypeError:  # a builtin
        return None
    return None if file is None or not Path(file).is_file() else Path(file).absolute()


def source_of(given: ModelFile) -> str:
    """What stands for the model file's text: a checkpoint of another model is refused by it."""
    assert given.module is not None
    return _source(given.module, {"sample": given.sample, "loss": given.loss, "encoders": given.encoders})


def _source(module: nn.Module, functions: dict[str, Any]) -> str:
    tensors = [f"# {name} {list(value.shape)}" for name, value in module.named_parameters()]
    texts = [f"# {name}: {_text(function)}" for name, function in functions.items() if function is not None]
    return "\n".join(["# A module that was given, not built.", *tensors, *texts, ""])


def _text(function: Callable[..., Any]) -> str:
    try:
        return repr(inspect.getsource(function))
    except (OSError, TypeError):
        return getattr(function, "__qualname__", type(function).__name__)
