"""Adapters around a model's layers, as peft puts them there: what each tensor's name is without them.

A layer with an adapter has its original as ``base_layer``; what else it has is the adapter's. A module that is trained
whole beside an adapter stands twice, as ``original_module`` and in ``modules_to_save``. ``get_peft_model`` puts
``base_model.model.`` before all names, ``add_adapter`` does not. A wrapper of one's own that has a ``base_layer`` is
read alike. peft itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

WRAPPER = "base_model.model."
BASE, ORIGINAL, COPY = "base_layer", "original_module", "modules_to_save"
DRAWN = ("gaussian", "orthogonal")  # the values of init_lora_weights by name that look at no weights


def plain_model(model: nn.Module) -> nn.Module:
    """The model itself, where ``get_peft_model`` has wrapped it."""
    inner = getattr(getattr(model, "base_model", None), "model", None)
    return inner if hasattr(model, "peft_config") and isinstance(inner, nn.Module) else model


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with an adapter, by path in ``model``, the outer before the inner."""
    return {
        path: module for path, module in model.named_modules() if isinstance(getattr(module, BASE, None), nn.Module)
    }


def original_names(model: nn.Module) -> dict[str, str | None]:
    """Every parameter and buffer by name, those that are tied under each: its name in the model without adapters.

    None for what belongs to an adapter.
    """
    layers, prefix = set(adapted_layers(model)), WRAPPER if plain_model(model) is not model else ""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: _original(name, layers, prefix) for name, _ in named}


def made_of_weights(model: nn.Module) -> str:
    """The setting by which an adapter of peft is made of the weights that are there when it is added: DoRA takes its
    magnitudes from them, PiSSA and its like their largest parts. Empty where all of them are drawn."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    for config in configs.values():
        if getattr(config, "use_dora", False):
            return "use_dora=True"
        begins = getattr(config, "init_lora_weights", True)
        if isinstance(begins, str) and begins.lower() not in DRAWN:
            return f"init_lora_weights={begins!r}"
    return ""


def _original(name: str, layers: set[str], prefix: str) -> str | None:
    words = name.split(".")
    kept: list[str] = []
    skip = 0
    for number, word in enumerate(words):
        if skip:
            skip -= 1
            continue
        if ".".join(words[:number]) in layers:
            if word != BASE:
                return None
            continue
        if word == ORIGINAL:
            continue
        if word == COPY:
            skip = 1  # the adapter's name
            continue
        kept.append(word)
    return ".".join(kept).removeprefix(prefix)
