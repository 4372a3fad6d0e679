"""An encoder whose weights are divided by width: every rank has its part, and training is what a plain loop does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from arachnec.backends.cascade_step import build_encoders
from arachnec.backends.torch_distributed.weights.encoder_setup import rank_encoders
from arachnec.executable.folder import read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Module
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import (
    ENCODER,
    MODEL,
    Work,
    assert_same_gradients,
    clip,
    lowered,
    plain_loop,
    traced,
    train_on,
)
from tests.distributed.harness import run_ranks

BLOCK_OF_TEXT = """

class Vae(Vae):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        del self.project

    def forward(self, x):
        b, s, _ = x.shape
        x = self.norm(self.table((20 * x[..., 0]).long().clamp(max=63)) + x.repeat(1, 1, 4))
        q, k, v = (layer(x).view(b, s, 4, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, 8))
        return torch.sin(self.down(nn.functional.gelu(self.up(x))))
"""
CLIPS = (clip("a", 3), clip("b", 3), clip("c", 2))
WORKS = [  # cells of two: one encodes two clips in turn beside the other, which no rank of the third cascade is in
    Work((0, 1), (0, 1), 0.0, "vae"),
    Work((2,), (2, 3), 0.0, "vae"),
    Work((0, 1), (1, 2, 3), 1.0, "dit", ("c0",)),
    Work((2,), (0,), 2.0, "dit", ("c1",)),
]
CUT = {"q.weight": 0, "k.weight": 0, "v.weight": 0, "o.weight": 1, "up.weight": 0, "down.weight": 1, "table.weight": 1}


def executable(folder: Path) -> Path:
    source = folder / "source.py"
    source.write_text(MODEL + ENCODER + BLOCK_OF_TEXT)
    module = traced(4, [CLIPS], encoder=True)
    stages = [replace(s, attrs=s.attrs.updated(tensor_parallel=2 if s.name == "vae" else None)) for s in module.stages]
    module = replace(module, stages=tuple(stages))
    program, model_file = lowered(module, WORKS), load_model_file(source)
    return write_executable(
        folder, program=program, traced=module, pipeline="default", model_file=model_file, clips=CLIPS
    )


def test_it_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    folder = executable(tmp_path)
    report = train_on(4, folder, save_gradients=folder / "g.safetensors")
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(report["steps"][0]["loss"] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(folder / "g.safetensors", gradients)


def held(folder: Path, init: Path | None) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, int]]]:
    """What this rank has of the encoder: whole, and its parts with the bytes of memory that hold them."""
    read = read_executable(folder)
    module: Module = read.program
    encoders, divided = rank_encoders(read.model_file(), Training(), module, CLIPS[0], torch.device("cpu"), init)
    parameters = dict(encoders["vae"].named_parameters())
    parts = {name: (part.local, part.local.untyped_storage().nbytes()) for name, part in divided.parts["vae"].items()}
    assert all(parameters[name].untyped_storage().nbytes() <= 4 for name in parts)
    return {name: value.detach() for name, value in parameters.items() if name not in parts}, parts


def test_a_rank_has_its_part_of_what_is_built_or_read_and_no_more(tmp_path: Path) -> None:
    folder = executable(tmp_path)
    built = build_encoders(load_model_file(folder / "model.py"), Training(), torch.device("cpu"))["vae"].state_dict()
    stored = {name: torch.rand_like(value) for name, value in built.items()}
    (tmp_path / "vae").mkdir()
    save_file(stored, tmp_path / "vae" / "model.safetensors")
    for init, expected in ((None, built), (tmp_path, stored)):
        for rank, (whole, parts) in enumerate(run_ranks(4, held, folder, init)):
            assert {*whole, *parts} == set(expected) and set(parts) == set(CUT)
            for name, value in whole.items():
                assert torch.equal(value, expected[name]), name
            for name, (value, memory) in parts.items():
                assert torch.equal(value, expected[name].chunk(2, CUT[name])[rank % 2]), name
                assert memory == value.nbytes
