"""A trained model as a folder that ``from_pretrained`` loads. In: an executable and a checkpoint. Out: safetensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.checkpoint.files import save_tensors
from arachnec.checkpoint.trained_predictors import FILE as PREDICTORS
from arachnec.checkpoint.trained_predictors import write_predictors
from arachnec.executable.folder import Executable
from arachnec.export.adapters import Merging, lora_file, merged_sources, peft_files
from arachnec.export.model_values import META, ModelValues, TrainedModel, model_values, trained_values
from arachnec.ir.diagnostic import user_error
from arachnec.models.adapters import WRAPPER, plain_model
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import folded, model_folder
from arachnec.models.weight_files import INDEX, PREFERRED, SHARD_BYTES, SUFFIX, write_weights

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
        written = [_moved(path, output) for path in sorted(Path(draft).iterdir())]
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


def _moved(path: Path, folder: Path) -> Path:
    return path.replace(folder / path.name)


def _drop_stale(folder: Path, written: set[str]) -> None:
    """Shards and indices that an earlier export left, which a loader would take for this one's, and its adapter."""
    for path in folder.iterdir():
        ours = path.name in (LORA, PEFT, PEFT_CONFIG, PREDICTORS) or (
            path.name.startswith(PREFERRED) and path.name.endswith((SUFFIX, INDEX))
        )
        if ours and path.name not in written:
            path.unlink()
