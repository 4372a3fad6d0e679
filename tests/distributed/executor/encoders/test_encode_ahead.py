"""A rank that waits for gradient all-reduces may encode for the next step; what is trained stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from arachnec.analysis.receive_prefetch import planned_memory, prefetch_receives
from arachnec.analysis.uses import Values
from arachnec.backends.torch_distributed import engine
from arachnec.backends.torch_distributed.executor.encoding import Ahead, encoders_first
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Cascade, Instruction, Module, Program
from arachnec.ir.values import Attributes, Quantity
from arachnec.model_state.gradients import GradientSynchronisation
from arachnec.model_state.optimizer import Optimizer
from tests.distributed.executor_cases import Work, captured_once, clip, executable, lowered, plain_loop, traced
from tests.distributed.harness import run_ranks
from tests.distributed.rank_device import rank_device

CLIPS = [clip(name, frames) for name, frames in zip("abcd", (1, 2, 3, 2), strict=True)]
PLAN = [  # rank 0 encodes two clips, rank 1 one before it trains and one after, rank 2 none
    Work((0,), (0,), 0, "vae"),
    Work((1,), (0,), 1, "vae"),
    Work((2,), (1,), 0, "vae"),
    Work((0,), (0, 1), 2, inputs=("c0",)),
    Work((3,), (1,), 3, "vae"),
    Work((1,), (2,), 4, inputs=("c1",)),
    Work((2,), (1,), 4, inputs=("c2",)),
    Work((3,), (0, 2), 5, inputs=("c4",)),
]  # fmt: skip
PLAN_OF_TWO = [
    Work((0,), (0,), 0, "vae"),
    Work((1,), (1,), 0, "vae"),
    Work((0,), (0,), 2, inputs=("c0",)),
    Work((1,), (1,), 2, inputs=("c1",)),
]
NOTES_ENCODES = """

class Vae(Vae):
    def forward(self, x):
        import pathlib
        import torch.distributed as dist

        if dist.is_initialized() and not x.is_meta:
            name = {4: "a", 8: "bd"[dist.get_rank()], 12: "c"}[x.shape[1]]
            with pathlib.Path(__file__).with_name(f"notes-{dist.get_rank()}").open("a") as notes:
                notes.write(name)
        return super().forward(x)
"""


def train_noting(folder: Path, options: RunOptions, waits: bool) -> None:
    """``waits``: all-reduces are never, or always, under way when it asks. Notes a ``|`` for every step."""
    step = Optimizer.step
    place = folder / f"notes-{dist.get_rank()}"

    def noted(self: Optimizer, *arguments: Any) -> torch.Tensor:
        with place.open("a") as notes:
            notes.write("|")
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, captured_once():
        patch.setattr(GradientSynchronisation, "done", property(lambda _: not waits))
        patch.setattr(Optimizer, "step", noted)
        engine.train(read_executable(folder), options, rank_device())


@pytest.mark.parametrize("waits", [True, False])
def test_losses_do_not_depend_on_when_clips_were_encoded(tmp_path: Path, waits: bool) -> None:
    """Clip d is encoded after a model has run: never ahead. Nothing is encoded twice, or for a step after the last."""
    folder = executable(tmp_path, [CLIPS], PLAN, 3, encoder=True, more=NOTES_ENCODES, training=Training(lr=0.0))
    run_ranks(3, train_noting, folder, RunOptions(steps=3), waits)
    report = msgspec.json.decode((folder / "run.json").read_bytes())
    notes = [(folder / f"notes-{rank}").read_text() for rank in range(3)]
    assert notes == (["abab|ab||", "cdc|dc|d|", "|||"] if waits else ["ab|ab|ab|", "cd|cd|cd|", "|||"])
    for step in range(3):
        loss, _ = plain_loop(folder, CLIPS, step=step)
        assert report["steps"][step]["loss"] == pytest.approx(loss, rel=1e-6)


def test_plans_that_do_not_recur_are_looked_at_ahead_too(tmp_path: Path) -> None:
    """Two iterations, planned in the background: what is encoded ahead is what the next plan wants."""
    folder = executable(tmp_path, [CLIPS[:2], CLIPS[2:]], PLAN_OF_TWO, 2, encoder=True, training=Training(lr=0.0))
    run_ranks(2, train_noting, folder, RunOptions(steps=5), True)
    report = msgspec.json.decode((folder / "run.json").read_bytes())
    for step in range(5):
        loss, _ = plain_loop(folder, CLIPS[2:] if step % 2 else CLIPS[:2], step=step)
        assert report["steps"][step]["loss"] == pytest.approx(loss, rel=1e-6)


def programs(*instructions: Instruction) -> tuple[Module, Program]:
    module = lowered(traced(1, [CLIPS], encoder=True), [Work((0,), (0,), 0, "vae")])
    names = {i.target for i in instructions if i.op == "encode"}
    cascades = tuple(Cascade(name, module.cascades[0].phase, "vae", (0,), 1, 4, 0) for name in sorted(names))
    program = Program(0, instructions, Attributes.of(state=Quantity(2.0, "GiB")))
    return Module("m", module.level, module.cluster, cascades=cascades, programs=(program,)), program


def encode(name: str, memory: float = 1.0, workspace: float = 0.0, peers: tuple[int, ...] = ()) -> Instruction:
    attrs = Attributes.of(memory=Quantity(memory, "GiB"), workspace=Quantity(workspace, "GiB"))
    return Instruction("encode", name, peers, attrs)


def received(name: str, memory: float) -> Instruction:
    return Instruction("receive", name, (1,), Attributes.of(bytes=1, memory=Quantity(memory, "GiB")))


def test_only_what_comes_before_the_first_model_and_needs_no_other_rank_is_encoded_ahead() -> None:
    sends = Instruction("send", "a", (1,), Attributes.of(bytes=1))
    runs = Instruction("forward", "t", (0,))
    _, program = programs(encode("a"), sends, encode("b"), runs, encode("c"))
    assert encoders_first(program) == ["a", "b"]
    _, program = programs(encode("a"), encode("b", peers=(0, 1)), encode("c"))
    assert encoders_first(program) == ["a"]


def test_as_much_is_encoded_ahead_as_fits_from_the_start_on() -> None:
    module, program = programs(encode("a"), encode("b", workspace=1.5), encode("c"))
    encoded = {limit: [c.name for c in Ahead.of(module, program, limit).todo] for limit in (2.9, 5.4, 5.5, 6.4, 6.5)}
    assert encoded == {2.9: [], 5.4: [], 5.5: ["a", "b"], 6.4: ["a", "b"], 6.5: ["a", "b", "c"]}


def test_encoding_ahead_ends_when_there_is_nothing_to_wait_for() -> None:
    module, program = programs(encode("a"), encode("b"), encode("c"))
    ahead = Ahead.of(module, program, 10.0)
    left = iter([True, True, False])
    ahead.run(lambda cascade: torch.zeros(1), lambda: next(left))
    assert list(ahead.values) == ["a", "b"]


def test_receives_start_later_where_values_from_the_last_step_take_the_room() -> None:
    module, program = programs(encode("a"), Instruction("free", "a"), encode("b", 3.0), received("r", 1.0))
    values = Values(module)
    assert planned_memory(values, program) == (3.0, 3.0, 5.0, 6.0)
    assert planned_memory(values, program, {"b"}) == (6.0, 6.0, 5.0, 6.0)
    assert [len(receives) for receives in prefetch_receives(values, program, 6.0)] == [1, 0, 0, 0]
    assert [len(receives) for receives in prefetch_receives(values, program, 6.0, {"b"})] == [0, 0, 1, 0]
