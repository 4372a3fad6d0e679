"""What the user's functions raise is told at their own lines, whichever of the user's files they are in."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, render
from arachnec.models.file import load_model_file
from arachnec.models.given_module import given_module
from tests.commands.small_model import MODEL

CLIP = VideoClip("a", 1, 8, 8, 0)


class Raising:
    def __call__(self, prediction: Any, target: Any) -> Any:
        raise RuntimeError("of an object")


def sample(clip: Any, generator: Any) -> Any:
    raise KeyError("latents")


def elsewhere(folder: Path) -> Callable[..., Any]:
    """A loss of another file than ``sample``."""
    file = folder / "elsewhere.py"
    file.write_text("\n\ndef loss(prediction, target):\n    return prediction.nowhere\n")
    spec = importlib.util.spec_from_file_location("elsewhere", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    taken: Callable[..., Any] = module.loss
    return taken


def leaves(clip: Any, generator: Any) -> Any:
    raise SystemExit(4)


def test_functions_of_several_files_and_kinds_are_told_at_their_lines(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    cases = [
        (given_module(module, sample, elsewhere(tmp_path)), tmp_path / "elsewhere.py", 4, "AttributeError"),
        (given_module(module, sample, Raising()), Path(__file__), line("of an object"), "of an object"),
        (given_module(module, sample, functools.partial(Raising().__call__)), Path(__file__), line("of an object"), ""),
    ]
    for file, path, number, expected in cases:
        with pytest.raises(UserError) as told:
            file.loss(torch.zeros(1), torch.zeros(1))
        assert f"{path}:{number}:" in render(told.value.diagnostics[0])
        assert expected in render(told.value.diagnostics[0])
    for function, number in ((sample, line('KeyError("latents")')), (leaves, line("SystemExit(4)"))):
        with pytest.raises(UserError) as told:
            given_module(module, function, Raising()).sample(CLIP, torch.Generator())
        assert f"{__file__}:{number}:" in render(told.value.diagnostics[0])


def test_a_module_of_which_nothing_trains_is_refused() -> None:
    with pytest.raises(UserError, match="Linear without `a parameter that trains`"):
        given_module(torch.nn.Linear(2, 2).requires_grad_(False), sample, Raising())


def line(text: str) -> int:
    return next(n for n, row in enumerate(Path(__file__).read_text().splitlines(), 1) if text in row)


def test_what_a_neighbour_of_a_model_file_raises_is_told_at_the_neighbours_line(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def loss(prediction, target):\n    raise ValueError('of a neighbour')\n")
    (tmp_path / "model.py").write_text(f"{MODEL}\nfrom losses import loss\n")
    with pytest.raises(UserError) as told:
        load_model_file(tmp_path / "model.py").loss(torch.zeros(1), torch.zeros(1))
    assert f"{tmp_path / 'losses.py'}:2:" in render(told.value.diagnostics[0])


def test_a_class_without_add_adapter_is_told_what_stands_for_it(tmp_path: Path) -> None:
    source = MODEL.replace("def build():", "def build():\n    nn.Linear(1, 1).add_adapter(None)\n\n\ndef unused():")
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(UserError) as raised:
        load_model_file(tmp_path / "model.py").build()
    assert "return peft.get_peft_model(model, config)" in render(raised.value.diagnostics[0])
