"""Model files: what is loaded, and the exact text of every mistake."""

from pathlib import Path

import pytest
import torch

from arachnec.ir.diagnostic import UserError, render
from arachnec.models.file import load_model_file

GOOD = """\
import torch
def build():
    return torch.nn.Linear(2, 2)
def sample(clip, generator):
    return {"input": torch.randn(1, 2, generator=generator)}, torch.zeros(1, 2)
loss = torch.nn.functional.mse_loss
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


def message(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model_file(path)
    return render(*caught.value.diagnostics).replace(str(path.parent) + "/", "")


def test_a_model_file_gives_its_functions_and_the_digest_of_its_source(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    model = load_model_file(path)
    assert isinstance(model.build(), torch.nn.Linear)
    assert model.encoders is None
    assert model.span("loss") is not None and model.span("loss").line == 6
    assert load_model_file(path).digest == model.digest
    assert load_model_file(written(tmp_path, GOOD + "\n")).digest != model.digest


def test_a_module_may_be_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import torch\ndef build(): ...\ndef sample(clip, generator): ...\nloss = torch.nn.MSELoss()\n")
    assert load_model_file(path).loss(torch.ones(2), torch.zeros(2)) == 1


def test_two_model_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    paths = []
    for name, width in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        paths.append(written(tmp_path / name, GOOD.replace("Linear(2, 2)", f"Linear({width}, 2)")))
    first, second = map(load_model_file, paths)
    assert [first.build().in_features, second.build().in_features] == [2, 3]


MISTAKES = {
    "a function is missing": (
        "def build(): ...\ndef sampel(clip, generator): ...\ndef loss(prediction, target): ...\n",
        """\
error: the model file has no `sample`
  --> model.py:1:1
   |
 1 | def build(): ...
   | ^ found here: build, sampel, loss
  help: add `def sample(clip, generator)`; docs/your_model.md says what it returns""",
    ),
    "a function takes too few arguments": (
        "def build(): ...\ndef sample(clip): ...\ndef loss(prediction, target): ...\n",
        """\
error: `sample` cannot be called as sample(clip, generator)
  --> model.py:2:1
   |
 2 | def sample(clip): ...
   | ^^^^^^^^^^^^^^^^^^^^^ it is sample(clip)
  help: change it to `def sample(clip, generator)`, or give what is not meant for arachnec another name""",
    ),
    "a function is something else": (
        "build = 3\ndef sample(clip, generator): ...\ndef loss(prediction, target): ...\n",
        """\
error: `build` cannot be called as build()
  --> model.py:1:1
   |
 1 | build = 3
   | ^^^^^^^^^ it is build = 3
  help: change it to `def build()`, or give what is not meant for arachnec another name""",
    ),
    "a function is a module": (
        "import torch\nbuild = torch.nn.Linear(2, 2)\ndef sample(clip, generator): ...\ndef loss(a, b): ...\n",
        """\
error: `build` cannot be called as build()
  --> model.py:2:1
   |
 2 | build = torch.nn.Linear(2, 2)
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ it is build = Linear(...)
  help: change it to `def build()`, or give what is not meant for arachnec another name""",
    ),
    "the import raises": (
        "def width():\n    return 1 / 0\nWIDTH = width()\n",
        """\
error: the model file raised ZeroDivisionError: division by zero in its import
  --> model.py:2:5
   |
 2 |     return 1 / 0
   |     ^^^^^^^^^^^^ raised here
  help: correct the model file; it runs alone with `python FILE`""",
    ),
    "the file is not Python": (
        "def build(:\n",
        """\
error: the model file raised SyntaxError: invalid syntax in its import
  --> model.py:1:1
   |
 1 | def build(:
   | ^^^^^^^^^^^ raised here
  help: correct the model file; it runs alone with `python FILE`""",
    ),
    "a package is missing": (
        "import no_such_package_1a2b\n",
        """\
error: the model file raised ModuleNotFoundError: No module named 'no_such_package_1a2b' in its import
  --> model.py:1:1
   |
 1 | import no_such_package_1a2b
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^ raised here
  help: install that package, or put it beside the model file: an executable carries that file \
and the modules of its folder that it imports by name""",
    ),
    "an adapter refuses a name": (
        'from arachnec.models.diffusers import wan\nmodel = wan.text_to_video("Wan2.1-T2V-1.3b")\n',
        """\
error: there is no configuration named `Wan2.1-T2V-1.3b`
  --> model.py:2:1
   |
 2 | model = wan.text_to_video("Wan2.1-T2V-1.3b")
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ did you mean `Wan2.1-T2V-1.3B`?
  help: the names are Wan2.1-T2V-1.3B, Wan2.1-T2V-14B, Wan2.2-T2V-A14B; or give a folder of pretrained weights, or \
keywords""",
    ),
    "an adapter refuses a key": (
        "from arachnec.models.diffusers import wan\nmodel = wan.text_to_video(num_layer=2)\n",
        """\
error: `Wan` has no configuration key `num_layer`
  --> model.py:2:1
   |
 2 | model = wan.text_to_video(num_layer=2)
   | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ no such key
  help: did you mean `num_layers`?""",
    ),
}


@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_in_the_file_is_shown_where_it_is(tmp_path: Path, rule: str) -> None:
    text, expected = MISTAKES[rule]
    assert message(written(tmp_path, text)) == expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "gone.py").splitlines()[0] == f"error: there is no model file `{'gone.py'}`"


def test_what_a_function_raises_later_is_shown_at_its_line(tmp_path: Path) -> None:
    model = load_model_file(written(tmp_path, GOOD.replace("    return torch.nn", "    return torch.nnn")))
    with pytest.raises(UserError) as caught:
        model.build()
    assert render(*caught.value.diagnostics).splitlines()[1].endswith("model.py:3:5")


def test_an_exception_outside_the_file_keeps_its_traceback(tmp_path: Path) -> None:
    model = load_model_file(written(tmp_path, GOOD))
    with pytest.raises(AttributeError):
        model.loss(torch.zeros(2), None)
