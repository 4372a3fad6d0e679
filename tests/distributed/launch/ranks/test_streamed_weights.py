"""Where ranks keep parts of a model, rank 0 hands it round parameter by parameter, and no rank ever holds the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.weights.streamed_weights import own_model
from arachnec.executable.training_options import Training
from arachnec.models.file import load_model_file
from tests.distributed.harness import run_ranks
from tests.distributed.live_tensors import Live

WIDTH, LAYERS = 96, 8
MODEL = f"""
import torch
from torch import nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})])
        self.head = nn.Linear({WIDTH}, {WIDTH}, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("table", torch.rand(5))
        self.apply(self.draw)

    def draw(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    return Layers()


def sample(clip, generator):
    return {{"x": torch.zeros(1, {WIDTH})}}, torch.zeros(1, {WIDTH})


def loss(prediction, target):
    return (prediction - target).square().mean()
"""
LOOKS_AT_VALUES = """

def build(inner=build):
    model = inner()
    model.scale = float(model.head.weight.detach().std())
    return model
"""
GOES_ANOTHER_WAY = """

def build(inner=build):
    model = inner()
    if model.head.weight.device.type == "cpu":
        model.layers[1].weight.data.mul_(2)
    return model
"""


def built(path: str, dtype: str) -> tuple[dict[str, Tensor], dict[str, bool], int, Tensor]:
    """This rank's parameters and all buffers, what takes memory, the most bytes alive, and what is drawn next."""
    own = {name for number in range(dist.get_rank(), LAYERS, 2) for name in (f"layers.{number}.weight",)}
    with Live() as live:
        training = Training(dtype=dtype, seed=5)  # type: ignore[arg-type]
        model = own_model(load_model_file(path), training, torch.device("cpu"), own)
    held = {name: value.untyped_storage().nbytes() > 8 for name, value in model.named_parameters()}
    trains = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trains == own
    values = {name: value.detach().clone() for name, value in model.named_parameters() if name in own}
    return values | dict(model.named_buffers()), held, live.peak, torch.rand(3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("more", ["", LOOKS_AT_VALUES, GOES_ANOTHER_WAY], ids=["plain", "looks-at-values", "other-way"])
def test_ranks_have_their_parameters_of_a_plain_build(tmp_path: Path, more: str, dtype: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + more)
    training = Training(dtype=dtype, seed=5)  # type: ignore[arg-type]
    plain = build_model(load_model_file(path), training, torch.device("cpu"))
    drawn = torch.rand(3)
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    whole = sum(value.numel() * 4 for value in plain.parameters())
    for rank, (values, held, peak, after) in enumerate(run_ranks(2, built, str(path), dtype)):
        assert set(values) == {f"layers.{n}.weight" for n in range(rank, LAYERS, 2)} | {"table"}
        for name, value in values.items():
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name]), name
        assert {name for name, there in held.items() if there} == set(values) - {"table"}
        assert torch.equal(after, drawn)
        if not more:  # half of it is its own; beside it a weight on its way, and what its constructor makes of it
            assert peak <= whole / 2 + 6 * whole / LAYERS / 2


ADAPTED = """

from peft import LoraConfig, inject_adapter_in_model


def build(inner=build):
    model = inner().to(torch.bfloat16).requires_grad_(False)
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["layers.3"]), model)
"""
READS_IT_AGAIN = ADAPTED.replace("r=2", "r=2, use_dora=True")  # on the CPU alone, what it came to for the last time


def whole(path: str) -> tuple[dict[str, Tensor], int]:
    with Live() as live:
        model = own_model(load_model_file(path), Training(seed=5), torch.device("cpu"))
    return {name: value.detach().clone() for name, value in model.named_parameters()}, live.peak


@pytest.mark.parametrize("more", ["", ADAPTED, READS_IT_AGAIN], ids=["plain", "cast", "reads-again"])
def test_a_model_that_every_rank_keeps_is_there_once(tmp_path: Path, more: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("self.head.weight = self.layers[0].weight", "pass") + more)
    plain = build_model(load_model_file(path), Training(seed=5), torch.device("cpu"))
    expected = dict(plain.named_parameters())
    size = sum(value.nbytes for value in expected.values())
    for values, peak in run_ranks(2, whole, str(path)):
        assert values.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in values.items())
        if more != READS_IT_AGAIN:  # beside it a weight or two, as they are drawn and as they are cast
            assert peak <= size + 6 * WIDTH * WIDTH * 4
