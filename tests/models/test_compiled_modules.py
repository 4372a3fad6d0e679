"""A model that ``torch.compile`` wrapped, in whole or in part, is the model that was written."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from arachnec.ir.diagnostic import UserError
from arachnec.models.compiled_modules import running_as_written, without_compilation


def not_to_be_called(*args: object) -> None:
    raise AssertionError


def compiled(written: object) -> object:
    return torch.compile(written, backend=not_to_be_called)  # type: ignore[call-overload]


def whole(model: nn.Module) -> object:
    return compiled(model)


def in_place(model: nn.Module) -> object:
    model.compile(backend=not_to_be_called)
    return model


def blocks_in_place(model: nn.Module) -> object:
    for block in model.children():
        block.compile(backend=not_to_be_called)
    return model


def wrapped_blocks(model: nn.Module) -> object:
    for name, block in list(model.named_children()):
        setattr(model, name, compiled(block))
    return compiled(model)


def forwards(model: nn.Module) -> object:
    for block in model.children():
        block.forward = compiled(block.forward)
    return model


def test_a_scripted_module_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.warns(Warning), contextlib.suppress(RuntimeError):
        model[0] = torch.jit.script(model[0])
    with pytest.raises(UserError, match="`0` is compiled by TorchScript"):
        without_compilation(model)


@pytest.mark.parametrize("compile_model", [whole, in_place, blocks_in_place, wrapped_blocks, forwards])
def test_a_compiled_model_is_the_one_that_was_written(compile_model: Callable[[nn.Module], object]) -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model = without_compilation(compile_model(copy.deepcopy(plain)))  # type: ignore[arg-type]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert not any("forward" in vars(module) for module in model.modules())
    x = torch.ones(1, 2)
    assert torch.equal(model(x), plain(x))


def test_a_forward_that_is_no_method_of_the_class_stays() -> None:
    model = nn.Linear(2, 2)
    model.forward = compiled(lambda x: x + 1)  # type: ignore[assignment]
    assert without_compilation(model)(torch.ones(2)).tolist() == [2, 2]


def test_compiled_functions_run_as_they_are_written() -> None:
    with running_as_written():
        assert compiled(lambda x: x + 1)(torch.ones(())) == 2  # type: ignore[operator]
