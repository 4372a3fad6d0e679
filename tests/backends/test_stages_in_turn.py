"""The reference runs the stages of a pipeline, one after the other, and gets plain PyTorch's gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from arachnec.backends.reference import run_reference
from arachnec.backends.staged_model import Cuts
from arachnec.driver import compile as compile_model
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Phase
from arachnec.ir.values import Quantity
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import clip, plain_loop
from tests.distributed.pipeline_cases import MODEL, executable, pipeline_of
from tests.slow import slow

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2))


@pytest.mark.parametrize(
    ("stages", "schedule", "encoder", "cell"),
    [
        ("p=2", "schedule=1f1b", False, 1),
        ("p=4", "schedule=zb-h1", True, 1),
        slow("cuts=[1,3]", "schedule=gpipe", False, 1),
        ("p=4", "schedule=zb-h2", False, 1),
        ("p=2", "schedule=1f1b,recompute=true", False, 2),
        ("p=4", "schedule=zb-v", False, 2),
        slow("p=4", "schedule=interleaved-1f1b", False, 1),
    ],
)
def test_stages_in_turn_have_the_gradients_of_plain_pytorch(
    tmp_path: Path, stages: str, schedule: str, encoder: bool, cell: int
) -> None:
    """With a skip connection, a weight and a table of two stages, an unused parameter, mixed lengths, in float64."""
    world = 3 if "cuts" in stages else 4
    folder = executable(tmp_path, world, [CLIPS], pipeline_of(stages, schedule, cell=cell), encoder=encoder)
    read = read_executable(folder)
    outcome = run_reference(read.program, read.model_file(), dict(enumerate(read.clips)))
    loss, expected = plain_loop(folder, CLIPS)
    assert abs(outcome.loss - loss) <= 1e-12 * abs(loss)
    assert set(outcome.gradients) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(outcome.gradients[name], value, rtol=1e-9, atol=1e-14)


def test_stages_that_run_some_blocks_again_have_the_gradients_of_plain_pytorch(tmp_path: Path) -> None:
    def partly(cascade: Cascade) -> Cascade:
        pipelined = cascade.phase in (Phase.FORWARD, Phase.BACKWARD)
        return cascade.with_attrs(recompute=1, memory=Quantity(1e-3, "GiB")) if pipelined else cascade

    folder = executable(tmp_path, 2, [CLIPS], pipeline_of("p=2", "schedule=1f1b"), change=partly)
    read = read_executable(folder)
    outcome = run_reference(read.program, read.model_file(), dict(enumerate(read.clips)))
    for name, value in plain_loop(folder, CLIPS)[1].items():
        torch.testing.assert_close(outcome.gradients[name], value, rtol=1e-9, atol=1e-14)


SOMETIMES = """

class Sometimes(Hard):
    def forward(self, x, time):
        last = super().forward(x, time)
        return last + self.unused.sum() if x.shape[1] > 16 else last


def build():
    return Sometimes().double()
"""


def test_a_stage_that_reads_a_parameter_of_another_for_some_clips_is_refused(tmp_path: Path) -> None:
    """It would compute with the zeros that stand for the parameters of other stages."""
    source = tmp_path / "model.py"
    source.write_text(MODEL + SOMETIMES)
    cuts = Cuts(load_model_file(source), Training(), (("first.0", "first.1"), ("second.0", "second.1")))
    short = cuts.at(clip("a", 3), 1)
    assert cuts.at(clip("b", 4), 1).parameters == short.parameters
    with pytest.raises(UserError, match="stage 1 reads `unused`"):
        cuts.at(clip("c", 5), 1)


def test_compiling_refuses_a_stage_that_reads_a_parameter_of_another_for_some_clips(tmp_path: Path) -> None:
    """Every distinct shape of the manifest is tried: the third clip is the first with more than 16 tokens."""
    source, rows = tmp_path / "model.py", tmp_path / "clips.jsonl"
    source.write_text(MODEL + SOMETIMES)
    clips = [clip(str(number), frames) for number, frames in enumerate((3, 3, 4, 5))]
    keys = ("id", "frames", "height", "width", "text_tokens")
    rows.write_text("".join(json.dumps({key: getattr(c, key) for key in keys}) + "\n" for c in clips))
    passes = pipeline_of("cuts=[2]", "schedule=1f1b")
    with pytest.raises(UserError, match="stage 1 reads `unused`"):
        compile_model(source, rows, "2:cpu", passes=passes)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    assert len(compile_model(source, rows, "2:cpu", passes=passes).module.programs) == 2


CHECKPOINTED = """

class Checkpointed(Hard):
    def forward(self, x, time):
        from torch.utils.checkpoint import checkpoint
        t = self.time(time[:, None].to(self.table.dtype))
        x = self.embed(x.to(self.table.dtype))
        for block in (*self.first, *self.second):
            x = checkpoint(block, x, t, use_reentrant=False)
        return nn.functional.linear(self.head(x), self.embed.weight.t())


def build():
    return Checkpointed().double()
"""


@pytest.mark.parametrize("schedule", ["schedule=1f1b", "schedule=zb-h1"])
def test_blocks_that_the_model_checkpoints_itself_have_the_gradients_of_plain_pytorch(
    tmp_path: Path, schedule: str
) -> None:
    folder = executable(tmp_path, 2, [CLIPS], pipeline_of("p=2", schedule), more=CHECKPOINTED)
    read = read_executable(folder)
    outcome = run_reference(read.program, read.model_file(), dict(enumerate(read.clips)))
    for name, value in plain_loop(folder, CLIPS)[1].items():
        torch.testing.assert_close(outcome.gradients[name], value, rtol=1e-9, atol=1e-14)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_around_a_block_is_refused_where_the_model_is_cut(tmp_path: Path) -> None:
    """What a block makes there is in no graph: its stage would hand on what has no gradient."""
    source = tmp_path / "model.py"
    source.write_text(MODEL + CHECKPOINTED.replace("use_reentrant=False", "use_reentrant=True"))
    cuts = Cuts(load_model_file(source), Training(), (("first.0", "first.1"), ("second.0", "second.1")))
    with pytest.raises(UserError, match=r"`first.0` is checkpointed with `use_reentrant=True`, not `False`"):
        cuts.at(clip("a", 3), 1)
