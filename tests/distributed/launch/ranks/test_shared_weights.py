"""Weights are built once, on rank 0; the other ranks allocate each tensor once and receive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.weights.shared_weights import shared_encoders, shared_model
from arachnec.executable.training_options import Training
from arachnec.models.file import load_model_file
from tests.distributed.harness import RankError, run_ranks

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight
        self.experts = [self.embed.weight]  # a reference that no module registers
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(8, 4).t())
        self.register_buffer("table", torch.outer(torch.arange(16.0), 10.0 ** -torch.arange(8)), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(5), torch.rand(5)), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def build():
    return Model()


def sample(clip, generator):
    return {"x": torch.zeros(1, 64)}, torch.zeros(1, 64)


def loss(prediction, target):
    return (prediction - target).square().mean()
"""
LOOKS_AT_VALUES = """

def build(inner=build):
    model = inner()
    model.scale = float(model.embed.weight.detach().std())
    return model
"""
KEEPS_A_PLAIN_TENSOR = """

def build(inner=build):
    model = inner()
    model.tables = {"angles": [torch.rand(4)]}
    return model
"""
DIFFERS = """

def build(inner=build):
    import torch.distributed as dist

    model = inner()
    if dist.is_initialized() and dist.get_rank() == 1:
        model.more = nn.Parameter(torch.zeros(2))
    return model
"""
ENCODER = """

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def load(self, clip, device):
        return torch.zeros(1, 4, device=device)

    def forward(self, x):
        return self.layer(x)


def encoders():
    return {"vae": Encoder()}
"""


class Allocated(TorchDispatchMode):
    """Bytes of memory that operations made on the CPU, freed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in old:
                    self.bytes += storage.nbytes()
        return result


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }


def build_shared(path: str, dtype: Any) -> tuple[dict[str, Tensor], int, dict[str, Any], Tensor]:
    counted = Allocated()
    with counted:
        model: Any = shared_model(load_model_file(path), Training(dtype=dtype, seed=5), torch.device("cpu"))
    facts = {
        "tied": model.head.weight is model.embed.weight and model.experts[0] is model.embed.weight,
        "frozen": not model.frozen.requires_grad and model.embed.weight.requires_grad,
        "strides": model.transposed.stride(),
        "scale": getattr(model, "scale", None),
        "tables": getattr(model, "tables", None),
        "finite": bool(torch.isfinite(model(torch.ones(1, 64, dtype=model.embed.weight.dtype))).all()),
    }
    return tensors(model), counted.bytes, facts, torch.rand(3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_rank_has_the_weights_of_a_plain_build_and_all_but_the_first_allocate_them_once(
    tmp_path: Path, dtype: Any
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    expected = tensors(build_model(load_model_file(path), Training(dtype=dtype, seed=5), torch.device("cpu")))
    drawn = torch.rand(3)  # what comes after building
    once = sum(t.numel() * t.element_size() for name, t in expected.items() if name != "head.weight")
    for rank, (parameters, allocated, facts, after) in enumerate(run_ranks(3, build_shared, str(path), dtype)):
        assert list(parameters) == list(expected)
        for name, value in expected.items():
            assert parameters[name].dtype == value.dtype
            assert torch.equal(parameters[name], value), name
        assert facts["tied"]
        assert facts["frozen"]
        assert facts["finite"]
        assert torch.equal(after, drawn)
        if rank:
            assert facts["strides"] == (1, 4)
            # beside the tensors: the copy of one that is not contiguous, digests, the generator's state
            assert once <= allocated <= once + 32 * 4 + 40_000
        else:
            assert allocated >= once


@pytest.mark.parametrize("more", [LOOKS_AT_VALUES, KEEPS_A_PLAIN_TENSOR], ids=["looks-at-values", "plain-tensor"])
def test_a_model_that_is_nothing_without_values_is_built_with_them(tmp_path: Path, more: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + more)
    plain = build_model(load_model_file(path), Training(seed=5), torch.device("cpu"))
    expected = tensors(plain)
    for parameters, _, facts, _ in run_ranks(2, build_shared, str(path), "fp32"):
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())
        assert facts["scale"] == getattr(plain, "scale", None)
        if facts["tables"] is not None:
            assert torch.equal(facts["tables"]["angles"][0], plain.tables["angles"][0])


def test_ranks_whose_models_differ_say_so(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + DIFFERS)
    told = (
        r"rank 1 has made other modules than rank 0: `model.more` \[2\] float32, where rank 0 has `model.embed.weight`"
    )
    with pytest.raises(RankError, match=told):
        run_ranks(2, build_shared, str(path), "fp32")


ADAPTED = """

from peft import LoraConfig, inject_adapter_in_model


def build(inner=build):
    model = inner().requires_grad_(False).to(torch.bfloat16)
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["embed"]), model)
"""


def test_ranks_have_the_adapters_of_a_model_in_half_precision_as_it_is_built_on_one(tmp_path: Path) -> None:
    """peft gives an adapter the precision of its layer, but on the meta device, where all but rank 0 build."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("torch.polar(torch.ones(5), torch.rand(5))", "torch.rand(5)") + ADAPTED)
    expected = tensors(build_model(load_model_file(path), Training(seed=5), torch.device("cpu")))
    for parameters, *_ in run_ranks(2, build_shared, str(path), "fp32"):
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())
        assert parameters["embed.lora_A.default.weight"].dtype == torch.bfloat16


def _encoder_weights(path: str) -> tuple[Tensor, bool]:
    torch.manual_seed(dist.get_rank())
    encoder: Any = shared_encoders(load_model_file(path), Training(seed=5), torch.device("cpu"))["vae"]
    return encoder.layer.weight.detach().clone(), encoder.layer.weight.requires_grad or encoder.training


def test_encoders_are_shared_too(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + ENCODER)
    (first, _), (second, trains) = run_ranks(2, _encoder_weights, str(path))
    assert torch.equal(first, second)
    assert not trains
