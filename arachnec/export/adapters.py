"""A trained model's adapters: added into the layers they belong to, or by themselves as a LoRA file.

What an adapter does is peft's to say. A layer is merged by its own ``merge``, alone, in fp32. The file has the names
and the metadata that Diffusers' ``load_lora_weights`` and ``load_lora_adapter`` read; where the model's class loads
none, those that peft's ``PeftModel.from_pretrained`` reads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.export.model_values import ModelValues
from arachnec.ir.diagnostic import user_error
from arachnec.models.adapters import BASE, COPY, ORIGINAL, WRAPPER, adapted_layers, original_names

COMPONENT = "transformer"  # of a Diffusers pipeline
METADATA = "lora_adapter_metadata"


def merged_sources(values: ModelValues) -> dict[str, str]:
    """The tensors of the model without its adapters: by plain name, the name in the trained one."""
    originals, state = original_names(values.model), values.model.state_dict()
    sources: dict[str, str] = {}
    for name, plain in originals.items():
        if plain is not None and name in state and (plain not in sources or f".{ORIGINAL}." not in f".{name}."):
            sources[plain] = name
    return sources


class Merging:
    """The layers with an adapter, merged one at a time."""

    def __init__(self, values: ModelValues) -> None:
        self._values = values
        self._layers = adapted_layers(values.model)
        self._latest: tuple[str, dict[str, Tensor]] = "", {}
        for path, layer in self._layers.items():
            if not callable(getattr(layer, "merge", None)):
                raise user_error(
                    f"the adapter at {path} cannot be added into the layer below it: {type(layer).__name__} has no "
                    "merge()",
                    help="use peft's adapters, or give the class `merge()`, which adds itself to `base_layer`",
                )

    def value(self, name: str) -> Tensor:
        """A tensor of the trained model, its layer's adapter added in where it has one."""
        path, base, inner = name.rpartition(f".{BASE}.")
        if not base or path not in self._layers:
            return self._values.value(name)
        if self._latest[0] != path:
            self._latest = path, self._merged(path)
        return self._latest[1][inner]

    def _merged(self, path: str) -> dict[str, Tensor]:
        """What lies below the layer's adapter, with it added in."""
        layer: Any = copy.deepcopy(self._layers[path]).to_empty(device="cpu").float()
        with torch.no_grad():
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                tensor.copy_(self._values.value(f"{path}.{name}"))
            layer.merge()
        return dict(getattr(layer, BASE).state_dict())

    def needed(self, name: str) -> list[str]:
        """The tensors of the trained model that ``value`` reads."""
        path, base, _ = name.rpartition(f".{BASE}.")
        if not base or path not in self._layers:
            return [name]
        return [key for key in self._values.named if key.startswith(f"{path}.")]


def lora_file(values: ModelValues) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The adapter's tensors under the names of a LoRA file, and the file's metadata. Raises ``UserError``."""
    tensors, config = _adapter(values)
    named = {f"{COMPONENT}.{name}": value for name, value in tensors.items()}
    stated = {f"{COMPONENT}.{key}": value for key, value in config.items()}
    return named, {"format": "pt", METADATA: json.dumps(stated, indent=2, sort_keys=True)}


def peft_files(values: ModelValues) -> tuple[dict[str, Tensor], str]:
    """The adapter's tensors under peft's own names, and its configuration as JSON. Raises ``UserError``."""
    tensors, config = _adapter(values)
    named = {f"{WRAPPER}{name}": value for name, value in tensors.items()}
    return named, json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True)


def _adapter(values: ModelValues) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The adapter's tensors by the names of their layers, and its configuration."""
    model: Any = values.model
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    used = _used(model, list(configs))
    if not used:
        raise user_error(
            "the model has no adapter of peft",
            help="leave --lora out to write the whole model, or add one: model.add_adapter(LoraConfig(...))",
        )
    if len(used) > 1:
        raise user_error(
            f"the model computes with the adapters {', '.join(used)}, and a LoRA file holds one",
            help=(
                "leave --lora out: the whole model is written, with all of them added in; or have build() use one "
                f'alone: model.set_adapter("{used[-1]}")'
            ),
        )
    originals = original_names(model)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    more = [name for name in trained if originals[name] is not None or f".{COPY}." in f".{name}."]
    if more:
        raise user_error(
            f"more than the adapter has trained, which no LoRA file holds: {', '.join(more)}",
            help="leave --lora out: the whole model is written, with the adapter added in",
        )
    from peft import get_peft_model_state_dict

    (active,) = used
    own = {name: values.value(name) for name, plain in originals.items() if plain is None}
    tensors = get_peft_model_state_dict(model, state_dict=own, adapter_name=active)
    named = {name.removeprefix(WRAPPER): value for name, value in tensors.items()}
    return named, {key: _plain(value) for key, value in configs[active].to_dict().items()}


def _used(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The adapters of these names that the model's outputs follow from: in their order, those active in a layer."""
    active = {name for layer in adapted_layers(model).values() for name in getattr(layer, "active_adapters", names)}
    return [name for name in names if name in active]


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
