"""A trained model as a folder that ``from_pretrained`` loads, or its adapters alone. In: an executable and a
checkpoint. Out: safetensors.

What an adapter does is peft's to say. A layer is merged by its own ``merge``, alone, in fp32. The file has the names
and the metadata that Diffusers' ``load_lora_weights`` and ``load_lora_adapter`` read; where the model's class loads
none, those that peft's ``PeftModel.from_pretrained`` reads.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.checkpoint.files import save_tensors
from arachnec.checkpoint.trained_predictors import FILE as PREDICTORS
from arachnec.checkpoint.trained_predictors import write_predictors
from arachnec.executable.folder import Executable
from arachnec.export.model_values import META, ModelValues, TrainedModel, model_values, trained_values
from arachnec.ir.diagnostic import user_error
from arachnec.models.adapters import BASE, COPY, ORIGINAL, WRAPPER, adapted_layers, original_names, plain_model
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import folded, model_folder
from arachnec.models.weight_files import INDEX, PREFERRED, SHARD_BYTES, SUFFIX, write_weights

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
    return named, {
        key: sorted(value) if isinstance(value, set) else value for key, value in configs[active].to_dict().items()
    }


def _used(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The adapters of these names that the model's outputs follow from: in their order, those active in a layer."""
    active = {name for layer in adapted_layers(model).values() for name in getattr(layer, "active_adapters", names)}
    return [name for name in names if name in active]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LORA = "pytorch_lora_weights.safetensors"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as peft names them


@dataclass(frozen=True)
class Exported:
    """What was written: its files, tensors and bytes, and how it is loaded."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int
    steps: int
    loading: str


def export(
    run: Executable | ModelFile,
    checkpoint: Path,
    output: Path,
    *,
    init: Path | None = None,
    averages: bool = False,
    lora: bool = False,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the newest checkpoint's model into ``output``, under its plain names, with its config.

    ``run`` is its executable, or the model file of an own loop. ``init`` is the folder that the run began with, for
    frozen weights. With ``averages`` the averaged weights, with ``lora`` the adapter alone. Without ``dtype`` every
    tensor has the precision that it trained in; of a model file that which ``build()`` gives it. What the model's class
    keeps in fp32 stays so. No more than a file is held at a time. Of a run with sparse layers the predictors have a
    file of their own. Raises ``UserError``.
    """
    of = TrainedModel.of(run)
    _demand_other(output, init, of.place, checkpoint)
    trained = trained_values(checkpoint, of.digest, of.place, averages=averages)
    values = model_values(of, trained, init)
    write = _write_adapter if lora else _write_model
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".new-") as draft:
        tensors, size, loading = write(values, Path(draft), dtype, shard_bytes)
        wrapped = plain_model(values.model) is not values.model
        write_predictors(trained.path, trained.stored, Path(draft) / PREDICTORS, WRAPPER if wrapped else "")
        written = [path.replace(output / path.name) for path in sorted(Path(draft).iterdir())]
    if not lora:
        _drop_stale(output, {path.name for path in written})
    return Exported(tuple(written), tensors, size, trained.position.steps, loading.format(folder=output))


def _demand_other(output: Path, init: Path | None, executable: Path, checkpoint: Path) -> None:
    """Raises ``UserError`` where the folder to write is one of those that are read."""
    read = {executable: "the executable", checkpoint: "the checkpoints"}
    if init is not None:
        read |= {init: "the weights of --init", model_folder(init): "the weights of --init"}
    for folder, what in read.items():
        if output.resolve() == folder.resolve():
            raise user_error(
                f"`{output}` holds {what}, which an export reads and does not overwrite",
                help="give another folder with -o",
            )


def _write_model(values: ModelValues, folder: Path, dtype: str | None, shard_bytes: int) -> tuple[int, int, str]:
    sources, plain = merged_sources(values), plain_model(values.model)
    merging = Merging(values)
    values.demand(name for source in sources.values() for name in merging.needed(source))
    _demand_names(plain, set(sources))
    precisions = {name: _precision(plain, name, values.named[source], dtype) for name, source in sources.items()}
    sizes = {name: values.named[source].numel() * precisions[name].itemsize for name, source in sources.items()}
    stem = PREFERRED[0] if _is_diffusers(plain) else PREFERRED[1]
    # a layer's tensors one after the other, so that it is merged once
    names = sorted(sources, key=lambda name: name.rpartition(".")[0])

    def value(name: str) -> Tensor:
        return _cast(name, merging.value(sources[name]), precisions[name])

    write_weights(folder, names, sizes, value, stem=stem, shard_bytes=shard_bytes)
    save_config: Callable[[Path], Any] | None = getattr(plain, "save_config", None)
    if save_config is None:
        loading = f'model.load_state_dict(safetensors.torch.load_file("{{folder}}/{stem}{SUFFIX}"))'
    else:
        save_config(folder)
        loading = f'{type(plain).__name__}.from_pretrained("{{folder}}")'
    return len(sources), sum(sizes.values()), loading


def _write_adapter(values: ModelValues, folder: Path, dtype: str | None, shard_bytes: int) -> tuple[int, int, str]:
    by_diffusers = hasattr(plain_model(values.model), "load_lora_adapter")
    metadata: dict[str, str] = {"format": "pt"}
    if by_diffusers:
        tensors, metadata = lora_file(values)
    else:
        tensors, config = peft_files(values)
        (folder / PEFT_CONFIG).write_text(config, encoding="utf-8")
    named = values.named
    own = next(value.dtype for value in named.values() if value.requires_grad)
    cast = {name: _cast(name, v, DTYPES[dtype] if dtype else own).contiguous() for name, v in tensors.items()}
    save_tensors(cast, folder / (LORA if by_diffusers else PEFT), metadata)
    loading = (
        'pipeline.load_lora_weights("{folder}")' if by_diffusers else 'PeftModel.from_pretrained(model, "{folder}")'
    )
    return len(cast), sum(value.nbytes for value in cast.values()), loading


def _precision(model: nn.Module, name: str, value: Tensor, dtype: str | None) -> torch.dtype:
    """What a tensor is written in; Diffusers and transformers name what stays in fp32."""
    if dtype is None or not value.is_floating_point():
        return value.dtype
    if set(getattr(model, "_keep_in_fp32_modules", None) or ()) & set(name.split(".")):
        return torch.float32
    return DTYPES[dtype]


def _cast(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    result = value.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(result).all() and torch.isfinite(value).all():
        raise user_error(
            f"{name} has values up to {float(value.abs().max()):.3g}, which fp16 does not hold",
            help="export with --dtype bf16 or fp32",
        )
    return result


def _demand_names(model: nn.Module, names: set[str]) -> None:
    """Raises ``UserError`` where the model's class, built from its config alone, has other tensors."""
    if not _is_diffusers(model):
        return
    kind: Any = type(model)
    with META:
        known = set(kind.from_config(model.config).state_dict())
    if known != names:
        lists = (("more", sorted(names - known)), ("less", sorted(known - names)))
        more, less = (f"\n  {what}: {', '.join(folded(of))}" if of else "" for what, of in lists)
        raise user_error(
            f"the model of build() has other tensors than {kind.__name__} makes of the same config:{more}{less}",
            help=(
                "wrap layers with peft's adapters, which are added in; other changes need a class of their own, whose "
                "from_pretrained knows these names"
            ),
        )


def _is_diffusers(model: nn.Module) -> bool:
    return isinstance(getattr(model, "config", None), Mapping) and callable(getattr(model, "save_config", None))


def _drop_stale(folder: Path, written: set[str]) -> None:
    """Shards and indices that an earlier export left, which a loader would take for this one's, and its adapter."""
    for path in folder.iterdir():
        ours = path.name in (LORA, PEFT, PEFT_CONFIG, PREDICTORS) or (
            path.name.startswith(PREFERRED) and path.name.endswith((SUFFIX, INDEX))
        )
        if ours and path.name not in written:
            path.unlink()
