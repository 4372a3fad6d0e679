"""Which files are sampler files: those that name `models`, and not all that a model file must have."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.commands.sampler_options import is_sampler
from arachnec.ir.diagnostic import UserError

TRAINS = "def build(): ...\ndef sample(clip, generator): ...\ndef loss(prediction, target): ...\n"
SAMPLES = "sampler = 1\nmodels, scheduler, start, arguments = sampler\n"


@pytest.mark.parametrize(
    ("source", "sampler"),
    [
        (TRAINS, False),
        (SAMPLES, True),
        ("from base import build, sample, loss\nmodels = {}\nscheduler = guidance = start = 0\n", False),
        ("from base import *\nmodels = {}\n", False),
        (SAMPLES + "def build(): ...\n", True),
        ("def models(): ...\n", True),
        ("if True:\n    models: dict = {}\n", True),
        ("def f():\n    models = 1\n", False),
        ("def build(): ...\nmodels = []\n", False),
        ("def build(:\n", False),
    ],
)
def test_a_file_s_kind_is_told_by_its_names(tmp_path: Path, source: str, sampler: bool) -> None:
    (tmp_path / "base.py").write_text(f"from base import *\n{TRAINS}")
    (tmp_path / "model.py").write_text(source)
    assert is_sampler(tmp_path / "model.py") == sampler


def test_a_file_of_both_kinds_is_refused_by_the_name_that_makes_it_so(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TRAINS + SAMPLES)
    with pytest.raises(UserError, match="a model file and a sampler file in one") as refused:
        is_sampler(tmp_path / "model.py")
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.span is not None and diagnostic.span.line == 5


def test_every_example_that_samples_is_a_sampler_file() -> None:
    examples = Path(__file__).parents[2] / "examples"
    kinds = {path.name: is_sampler(path) for path in examples.rglob("*.py")}
    assert {name for name, sampler in kinds.items() if sampler} == {n for n in kinds if n.startswith("sample")}
