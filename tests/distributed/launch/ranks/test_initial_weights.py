"""``run --init``: however a model lies on its ranks, they begin with the weights of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from arachnec.backends.torch_distributed.weights.dealt_out_model import DealtStage, dealt_out_model
from arachnec.backends.torch_distributed.weights.encoder_setup import rank_encoders
from arachnec.backends.torch_distributed.weights.streamed_weights import own_model
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Level, Module
from arachnec.models.file import load_model_file
from arachnec.models.weight_files import WeightFiles, weight_files, write_weights
from arachnec.models.weights_there import no_weights_error
from tests.distributed.harness import RankError, run_ranks

MODEL = """
import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(6, 2, bias=False)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), Adapted(nn.Linear(6, 6)), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.rand(5))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.vae = nn.Linear(4, 4)

    def load(self, clip, device):
        return torch.zeros(1, 4, device=device)


def build():
    return Layers()


def encoders():
    return {"vae": Encoder()}


def sample(clip, generator):
    return {}, torch.zeros(1)


def loss(prediction, target):
    return prediction
"""
PLAIN = {  # what a file of this model has: one name of the tied weight, no adapter, no table
    **{f"layers.{n}.{kind}": (6, 6) if kind == "weight" else (6,) for n in range(3) for kind in ("weight", "bias")},
    "scale": (5,),
}
IN_MODEL = {"layers.1.weight": "layers.1.base_layer.weight", "layers.1.bias": "layers.1.base_layer.bias"}
STAGE = DealtStage("dit", ("layers.0", "layers.1", "layers.2"), None, (0, 1), 2)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline's folder, its model in three shards, and a model file beside it."""
    torch.manual_seed(7)
    values = {name: torch.rand(shape) for name, shape in PLAIN.items()}
    (tmp_path / "transformer").mkdir()
    sizes = {name: value.nbytes for name, value in values.items()}
    written = write_weights(tmp_path / "transformer", list(values), sizes, values.__getitem__, shard_bytes=200)
    assert len(written) == 4
    (tmp_path / "vae").mkdir()
    save_file({"weight": torch.full((4, 4), 0.5), "bias": torch.ones(4)}, tmp_path / "vae" / "model.safetensors")
    save_file({IN_MODEL.get(name, name): value for name, value in values.items()}, tmp_path / "expected.safetensors")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def weights_of(folder: Path, kind: str, dtype: Any) -> dict[str, Tensor]:
    """What this rank has of the model, by name; of a model in cells its pieces."""
    file, training = load_model_file(folder / "model.py"), Training(dtype=dtype, seed=3)
    own = {"layers.1.base_layer.weight", "layers.1.lora_A.weight"} if dist.get_rank() else {"layers.0.weight"}
    if kind == "replicated":
        model = own_model(file, training, CPU, init=folder)
        assert model.head.weight is model.layers[0].weight  # type: ignore[union-attr,index]
        return dict(model.state_dict())
    if kind == "stages":
        model = own_model(file, training, CPU, own, folder)
        return {name: value for name, value in model.state_dict().items() if name in own | {"scale"}}
    model, flats, _ = dealt_out_model(file, training, CPU, [STAGE], init=folder)
    return {
        f"{piece.slot.name}/{piece.start}": flat.shard[piece.place : piece.place + piece.size].clone()
        for flat in flats["dit"]
        for piece in flat.layout.pieces(dist.get_rank())
    } | dict(model.named_buffers())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["replicated", "stages", "cells"])
def test_ranks_begin_with_the_weights_of_the_folder(folder: Path, kind: str, dtype: str) -> None:
    from safetensors.torch import load_file

    expected = load_file(folder / "expected.safetensors")
    compared = set()
    for values in run_ranks(2, weights_of, folder, kind, dtype):
        for key, value in values.items():
            name, _, start = key.partition("/")
            if name in expected:
                stored = expected[name].to(value.dtype)
                stored = stored if not start else stored.reshape(-1)[int(start) :][: value.numel()]
                assert torch.equal(value, stored), key
                compared.add(name)
    assert compared == (
        set(expected) if kind != "stages" else {"layers.0.weight", "layers.1.base_layer.weight", "scale"}
    )


def pieces_read(folder: Path, kind: str) -> tuple[int, dict[str, Tensor]]:
    """How many elements of parameters this rank read, and what it has; ``hidden`` where rank 0 alone sees the files."""
    read: list[int] = []

    class Counting(WeightFiles):
        def _opened(self, name: str, reading: Any) -> Tensor:
            value = super()._opened(name, reading)
            read.append(value.numel() if name != "scale" else 0)
            return value

        def fingerprint(self) -> str:
            return WeightFiles(self.folder, self.tensors).fingerprint()

    def counting(place: Path) -> WeightFiles:
        if dist.get_rank() and kind.endswith("hidden"):
            raise no_weights_error(str(place), "there is no such folder")
        files = weight_files(place)
        return Counting(files.folder, files.tensors)

    with patch("arachnec.models.initial_weights.weight_files", counting):
        values = weights_of(folder, kind.split()[0], "fp32")
    return sum(read), values


@pytest.mark.parametrize("kind", ["stages", "cells"])
def test_each_rank_reads_its_own_pieces_and_rank_0_all_where_others_do_not_see_the_folder(
    folder: Path, kind: str
) -> None:
    whole = sum(torch.Size(shape).numel() for name, shape in PLAIN.items() if name != "scale")
    own = run_ranks(2, pieces_read, folder, kind)
    sent = run_ranks(2, pieces_read, folder, f"{kind} hidden")
    assert all(0 < read < 0.75 * whole for read, _ in own)  # at the ends of a piece rows of 6 are another's too
    assert [read for read, _ in sent] == [whole, 0]
    for (_, mine), (_, theirs) in zip(own, sent, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_what_no_file_has_stays_as_it_was_built(folder: Path) -> None:
    torch.manual_seed(3)
    built = load_model_file(folder / "model.py").build()
    for values in run_ranks(2, weights_of, folder, "replicated", "fp32"):
        assert torch.equal(values["layers.1.lora_A.weight"], built.layers[1].lora_A.weight)  # type: ignore[union-attr,index]


def drawn_after(model: Path, init: Path | None) -> Tensor:
    own_model(load_model_file(model), Training(seed=3), CPU, init=init)
    return torch.rand(3)


def test_nothing_is_drawn_where_the_folder_has_every_parameter(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"{MODEL}\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))\n")
    torch.manual_seed(3)
    undrawn = torch.rand(3)
    torch.manual_seed(3)
    save_file(load_model_file(path).build().state_dict(), tmp_path / "model.safetensors")
    drawn = torch.rand(3)
    for init, after in ((None, drawn), (tmp_path, undrawn)):
        assert all(torch.equal(value, after) for value in run_ranks(2, drawn_after, path, init))


def encoder_of(folder: Path) -> Tensor:
    clip, plan = VideoClip("a", 1, 16, 16, 0, "", None, 0), Module("m", Level.LOWERED)
    encoders, _ = rank_encoders(load_model_file(folder / "model.py"), Training(), plan, clip, CPU, folder)
    encoder: Any = encoders["vae"]
    return encoder.vae.weight.detach().clone()


def test_encoders_begin_with_those_of_their_own_folders(folder: Path) -> None:
    assert all((value == 0.5).all() for value in run_ranks(2, encoder_of, folder))


@pytest.mark.parametrize("kind", ["replicated", "stages", "cells"])
def test_weights_of_another_model_end_the_run_before_any_is_sent(folder: Path, kind: str) -> None:
    save_file({"blocks.0.weight": torch.ones(2)}, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    with pytest.raises(RankError, match="are not those of Layers"):
        run_ranks(2, weights_of, folder, kind, "fp32")
