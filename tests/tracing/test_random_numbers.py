"""Random numbers of `sample` that are not its generator's are found when compiling."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError, render
from arachnec.models.file import ModelFile, load_model_file
from arachnec.tracing.sample_reads import demand_own_generator

CLIPS = [VideoClip("video", 9, 64, 96, 4), VideoClip("still", 1, 64, 96, 4)]
FILE = """\
import itertools, random, time
import numpy as np
import torch
build = loss = lambda *given: None
count = itertools.count()
kept = {{}}
def sample(clip, generator):
    x = torch.ones(1, 3, clip.frames, 4)
    t = torch.rand(1, generator=generator)
    {line}
    return {{"x": x, "t": t}}, x - t
"""


def of_line(folder: Path, line: str) -> ModelFile:
    path = folder / "model.py"
    path.write_text(FILE.format(line=line))
    return load_model_file(path)


def demand(file: ModelFile) -> None:
    demand_own_generator(file, CLIPS, {}, file.path, file.span("sample"))


def refusal(file: ModelFile) -> Diagnostic:
    with pytest.raises(UserError) as caught:
        demand(file)
    (problem,) = caught.value.diagnostics
    return problem


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("x = torch.randn_like(x)", "torch"),
        ("x = x + torch.randn(x.shape)", "torch"),
        ("x = x.clone().normal_()", "torch"),
        ("x = x * (random.random() < 0.5)", "random"),
        ("x = x * (random.random() < 0.1)", "random"),
        ("x = x * random.choice([1, 2])", "random"),
        ("x = x + float(np.random.rand())", "numpy.random"),
        ("x = torch.from_numpy(np.random.standard_normal(x.shape))", "numpy.random"),
        ("x = x * (random.random() < 0.5 and clip.frames > 1)", "random"),
    ],
)
def test_a_draw_from_a_global_generator_is_shown_at_its_line(tmp_path: Path, line: str, source: str) -> None:
    problem = refusal(of_line(tmp_path, line))
    assert problem.span is not None
    assert problem.span.line == 10
    assert problem.message.startswith("`sample` gives another `target` and `x` for clip `")
    assert problem.text(problem.label) == f"drawn from {source}"


@pytest.mark.parametrize("line", ["x = x + next(count)", "x = x + np.random.default_rng().random()"])
def test_what_else_changes_from_call_to_call_is_found_too(tmp_path: Path, line: str) -> None:
    assert "counter" in render(refusal(of_line(tmp_path, line)))


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.randn(x.shape, generator=generator)",
        "torch.manual_seed(int(t * 1000)); x = torch.randn_like(x)",
        "x = kept.setdefault('x', x)",
        "x = x / 0 - x / 0",
        "x = x.to(torch.bfloat16)",
        "x = open(clip.path).read()",  # what fails here, tracing says
    ],
)
def test_values_that_follow_from_clip_and_generator_are_taken(tmp_path: Path, line: str) -> None:
    demand(of_line(tmp_path, line))


def test_global_states_are_what_they_were(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(UserError):
        demand(of_line(tmp_path, "x = torch.randn_like(x)"))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
