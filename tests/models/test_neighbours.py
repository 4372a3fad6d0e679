"""A model file that imports what lies beside it: found, carried by the executable, and nothing else."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from arachnec.executable.folder import HEADER, Changed, read_executable, read_header
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import MODEL, Work, clip, executable

SOURCE = """
from near_by import gain
from nets.block import scale


def build():
    from nets import late

    return Tiny()


def loss(prediction, target):
    return gain * scale * nn.functional.mse_loss(prediction, target)
"""


OWN_VALUE = """
import near_by


def build():
    model = Tiny()
    model.value = near_by.value
    return model
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An executable whose model file has neighbours; those it was made from are gone."""
    users = tmp_path / "users"
    (users / "nets").mkdir(parents=True)
    (users / "nets" / "__init__.py").write_text("")
    (users / "nets" / "block.py").write_text("from . import late\nscale = late.factor\n")
    (users / "nets" / "late.py").write_text("factor = 3\n")
    (users / "near_by.py").write_text("import json\ngain = 2\n")
    (users / "not_imported.py").write_text("raise ValueError\n")
    built = executable(users, [[clip("a", 3)]], [Work((0,), (0,), 0.0)], 1, more=SOURCE)
    moved = tmp_path / "executable"
    shutil.copytree(built, moved)
    shutil.rmtree(users)
    (moved / "source.py").unlink()
    (moved / "not_imported.py").unlink()
    return moved


def test_an_executable_carries_what_the_model_file_imports_and_no_more(folder: Path) -> None:
    header = read_header(folder)
    assert header.modules == ("near_by.py", "nets/__init__.py", "nets/block.py", "nets/late.py")
    assert set(header.modules) <= set(header.fingerprint)
    import torch

    model_file = read_executable(folder).model_file()
    model_file.build()
    loss = model_file.loss(torch.ones(2), torch.zeros(2))
    assert float(loss) == 6.0
    assert str(sys.modules["near_by"].__file__) == str(folder / "near_by.py")


def test_a_neighbour_that_was_changed_is_one_message(folder: Path) -> None:
    (folder / "nets" / "late.py").write_text("factor = 4\n")
    with pytest.raises(UserError) as refused:
        read_executable(folder)
    assert refused.value.diagnostics[0] == Changed(None, str(folder), "nets/late.py")


def test_a_header_that_names_a_file_outside_is_refused(folder: Path) -> None:
    header = folder / HEADER
    header.write_text(header.read_text().replace('"near_by.py"', '"../near_by.py"'))
    with pytest.raises(UserError, match="from outside of its folder"):
        read_executable(folder)


def test_two_model_files_with_neighbours_of_one_name_each_have_their_own(tmp_path: Path) -> None:
    neighbours = []
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "near_by.py").write_text(f"value = {value}\n")
        file = tmp_path / name / "model.py"
        file.write_text(MODEL + OWN_VALUE)
        neighbours.append(load_model_file(file))
    assert [int(model_file.build().value) for model_file in neighbours] == [1, 2]


def test_a_message_names_the_users_file_and_not_the_copy_as_long_as_they_are_the_same(tmp_path: Path) -> None:
    wrong = "\n\ndef build():\n    raise ValueError('no')\n"
    built = executable(tmp_path, [[clip("a", 3)]], [Work((0,), (0,), 0.0)], 1, more=wrong)
    users = tmp_path / "source.py"
    for expected in (users, built / "model.py"):
        with pytest.raises(UserError) as refused:
            read_executable(built).model_file().build()
        span = refused.value.diagnostics[0].span
        assert span is not None
        assert span.file == str(expected)
        users.write_text(users.read_text() + "\n# changed since\n")
