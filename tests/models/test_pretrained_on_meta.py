"""``from_pretrained`` on the meta device gives the module that it gives with weights, without reading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from arachnec.models.pretrained_on_meta import pretrained_without_weights

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pretrained")
    config = transformers.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5EncoderModel(config).to(torch.bfloat16).save_pretrained(path / "text")
    diffusers.WanTransformer3DModel(
        num_layers=1, num_attention_heads=1, attention_head_dim=12, ffn_dim=8, in_channels=2, out_channels=2,
        text_dim=8, freq_dim=8,
    ).save_pretrained(path / "transformer")  # fmt: skip
    return path


LOADS: dict[str, Callable[[Path], nn.Module]] = {
    "precision of the file": lambda path: transformers.T5EncoderModel.from_pretrained(path / "text"),
    "what only the weights tell": lambda path: transformers.T5EncoderModel.from_pretrained(
        path / "text", dtype="float16"
    ),
    "a subfolder": lambda path: diffusers.WanTransformer3DModel.from_pretrained(path, subfolder="transformer"),
    "parts kept in fp32": lambda path: diffusers.WanTransformer3DModel.from_pretrained(
        path / "transformer", torch_dtype=torch.bfloat16, low_cpu_mem_usage=True, variant=None
    ),
}  # fmt: skip


def form(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(n, x.shape, x.dtype) for n, x in [*model.named_parameters(), *model.named_buffers()]]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_module_has_the_shapes_and_precisions_of_the_one_with_weights(
    folder: Path, load: Callable[[Path], nn.Module]
) -> None:
    with pretrained_without_weights():
        with torch.device("meta"):
            planned = load(folder)
        loaded = load(folder)
    assert form(planned) == form(loaded)
    assert planned.training == loaded.training is False
    assert all(x.is_meta for x in planned.parameters()) and not any(x.is_meta for x in loaded.parameters())


def test_no_weights_are_read(folder: Path) -> None:
    for weights in folder.rglob("*.safetensors"):
        weights.rename(weights.with_suffix(".away"))
    try:
        with pretrained_without_weights(), torch.device("meta"):
            assert all(LOADS[name](folder) for name in ("precision of the file", "a subfolder"))
    finally:
        for weights in folder.rglob("*.away"):
            weights.rename(weights.with_suffix(".safetensors"))
