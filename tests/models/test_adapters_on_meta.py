"""A model with adapters that is built on the meta device has the tensors of one that is built on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import peft
import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from arachnec.models.adapters_on_meta import MODULE, built_by_libraries

TARGETS = ["0"]
LOW_RANK = LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["2"])
CONFIGS = {
    "lora": LOW_RANK,
    "dora": LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "convolution": LoraConfig(r=2, target_modules=["3"]),
    "loha": LoHaConfig(r=2, target_modules=TARGETS),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "oft": OFTConfig(r=2, oft_block_size=0, target_modules=TARGETS),
}


def base(precision: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Conv1d(1, 4, 3)).to(precision)


def described(build: Callable[[], nn.Module]) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    model = built_by_libraries(build)
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (value.shape, value.dtype, value.requires_grad) for name, value in named}


def same_on_meta(build: Callable[[], nn.Module]) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    plain = described(build)
    with torch.device("meta"):
        assert described(build) == plain
    return plain


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_adapters_have_the_precision_of_their_layers(config: peft.PeftConfig, precision: torch.dtype) -> None:
    plain = same_on_meta(lambda: inject_adapter_in_model(config, base(precision)))
    assert {row[1] for row in plain.values() if row[1].is_floating_point} == {precision}


@pytest.mark.parametrize("cast", [True, False])
def test_or_float32_where_peft_is_told_to_keep_them_so(cast: bool) -> None:
    def build() -> nn.Module:
        return get_peft_model(base(torch.bfloat16), LOW_RANK, autocast_adapter_dtype=cast)  # type: ignore[arg-type]

    adapters = {row[1] for name, row in same_on_meta(build).items() if "lora_" in name}
    assert adapters == {torch.float32 if cast else torch.bfloat16}


def test_a_file_that_imports_peft_where_it_builds_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = sys.modules[MODULE]
    monkeypatch.delitem(sys.modules, MODULE)

    def build() -> nn.Module:
        sys.modules[MODULE] = module
        return inject_adapter_in_model(LOW_RANK, base(torch.bfloat16))

    with torch.device("meta"):
        assert described(build)["0.lora_A.default.weight"][1] == torch.bfloat16


def test_peft_is_left_as_it_was() -> None:
    layers = sys.modules[MODULE].BaseTunerLayer
    before = vars(layers).copy()
    built_by_libraries(lambda: inject_adapter_in_model(LOW_RANK, base(torch.float32)))
    assert vars(layers) == before
