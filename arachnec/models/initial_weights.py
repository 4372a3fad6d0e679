"""The weights that a run begins with, read from a folder. In: a model without values, files. Out: values by name.

A Diffusers folder has the model's weights in ``transformer/`` and its encoders' in ``vae/``, ``text_encoder/`` and so
on; a folder with weights in itself has the model's. What adapters add to a model is in no file, and stays as it was
built.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.limits import MOST_WEIGHTS
from arachnec.models.adapters import made_of_weights, original_names, plain_model
from arachnec.models.file import load_model_file
from arachnec.models.weight_files import FLOATS, StoredTensor, WeightFiles, weight_files

MODEL_FOLDERS = ("transformer", "unet")
ENCODER_FOLDERS = {"text": "text_encoder", "pooled": "text_encoder_2"}  # others are named like their encoder
CONFIG = "config.json"
INDEX = "model_index.json"
PIPELINE = "pipeline_folder"  # of an encoder: whose configuration it was made from
JSON_KINDS: Mapping[type, str] = {list: "list", str: "text", int: "number", float: "number", type(None): "null"}


def bad_config_error(path: str, reason: str) -> UserError:
    return user_error(
        f"{path} {reason}", help="copy or download it again; `save_pretrained` writes it beside the weights"
    )


@dataclass(frozen=True)
class InitialWeights:
    """Where each tensor of a module comes from: by its name in the module, its name in the files."""

    files: WeightFiles
    sources: Mapping[str, str]

    def value(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The tensor on the CPU in this precision; None where it stays as it was built."""
        source = self.sources.get(name)
        return None if source is None else self.files.read(source).to(dtype)

    def piece(self, name: str, dtype: torch.dtype, start: int, size: int) -> Tensor:
        """Some elements of the flattened tensor, which ``sources`` has; see ``WeightFiles.piece``."""
        return self.files.piece(self.sources[name], start, size).to(dtype)

    def fill(self, module: nn.Module) -> None:
        """Write into the parameters and buffers of a module with values, one tensor at a time."""
        self._fill(module.named_parameters())
        self.fill_buffers(module)

    def fill_buffers(self, module: nn.Module) -> None:
        """``fill`` for the buffers alone."""
        self._fill(module.named_buffers())

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    @torch.no_grad()
    def _fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if (value := self.value(name, tensor.dtype)) is not None:
                tensor.copy_(value)


def model_folder(folder: Path) -> Path:
    """Where the model's own weights lie."""
    return next((folder / name for name in MODEL_FOLDERS if (folder / name).is_dir()), folder)


def initial_weights(folder: Path, model: nn.Module) -> InitialWeights:
    """Those of the trained model, which may be on the meta device. Raises ``UserError``, one for all that differs."""
    place = model_folder(folder)
    return _fitted(weight_files(place), model, _class_difference(place, model))


def beginning_weights(folder: Path, model: nn.Module) -> InitialWeights:
    """``initial_weights`` for a run that begins with them. Raises ``UserError`` also where an adapter that was added
    before is made of other weights: the run would begin with another model than the folder's."""
    weights = initial_weights(folder, model)
    if setting := made_of_weights(model):
        raise user_error(
            f"an adapter with {setting} is made of the weights that are there when it is added, and those in {folder} "
            "are read after that",
            help=(
                "have build() load the model from a folder and then add the adapter, encoders() load theirs, and "
                f"leave --init out; or take an adapter that is drawn alone, as LoRA's is without {setting}"
            ),
        )
    return weights


def demand_fit(folder: Path, path: Path) -> None:
    """Raises ``UserError`` where the weights in ``folder`` are not those of the model file at ``path``.

    The model has no values here. One that cannot be built without is held against them when it is built.
    """
    model_file = load_model_file(path)
    try:
        with torch.device("meta"):
            model = model_file.build()
    except (NotImplementedError, RuntimeError, TypeError, UserError):
        weight_files(model_folder(folder))
        return
    beginning_weights(folder, model)


def encoder_weights(folder: Path, name: str, encoder: nn.Module) -> InitialWeights | None:
    """Those of the encoder ``name`` of a model file; None where the folder has none. Raises as ``initial_weights``."""
    place = encoder_folder(folder, name, encoder)
    if not place.is_dir():
        return None
    path, network = _network(encoder)
    fitted = _fitted(weight_files(place), network, _class_difference(place, network))
    return InitialWeights(fitted.files, {f"{path}{own}": source for own, source in fitted.sources.items()})


def encoder_folder(folder: Path, name: str, encoder: nn.Module | None = None) -> Path:
    """Where the weights of the encoder ``name`` of a model file are: in a pipeline's folder, in that around a
    transformer's folder, else in the one whose configuration the ``encoder`` was made from."""
    part = ENCODER_FOLDERS.get(name, name)
    around = pipeline_folder(folder)
    own = getattr(encoder, PIPELINE, None)
    places = [place / part for place in (folder, around, own) if place is not None]
    return next((place for place in places if place.is_dir()), folder / part)


def pipeline_folder(folder: Path) -> Path | None:
    """The pipeline's folder that a folder is, or is a part of; None where it is of none."""
    return next((place for place in (folder, folder.absolute().parent) if (place / INDEX).is_file()), None)


def _network(encoder: nn.Module) -> tuple[str, nn.Module]:
    """What of an encoder ``save_pretrained`` wrote: the one module in it that has all tensors."""
    children = [(name, child) for name, child in encoder.named_children() if next(child.parameters(), None) is not None]
    own = next(encoder.parameters(recurse=False), None)
    if own is None and len(children) == 1:
        name, child = children[0]
        return f"{name}.", child
    return "", encoder


def _fitted(files: WeightFiles, module: nn.Module, other_class: str) -> InitialWeights:
    """Match names and shapes. A tied weight is stored once, under one of its names."""
    tensors = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    originals = original_names(module)
    stored = _without_prefix(files.tensors, module)
    optional = _not_persistent(module)
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    sources: dict[str, str] = {}
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    for names in names_of.values():
        plain = [original for name in names if (original := originals[name]) is not None]
        there = next((original for original in plain if original in stored), None)
        tensor = tensors[names[0]]
        if there is None:
            missing += [plain[0]] if plain and not optional & set(names) else []
            continue
        entry = files.tensors[stored[there]]
        if entry.shape != tuple(tensor.shape):
            shapes.append(f"{there} is {_shape(entry.shape)}, the model's {_shape(tensor.shape)}")
        elif tensor.is_floating_point() and entry.dtype not in FLOATS:
            dtypes.append(f"{there} is {entry.dtype}")
        sources |= dict.fromkeys(names, stored[there])
    known = {original for original in originals.values() if original is not None}
    surplus = [name for name in stored if name not in known and not _ignored(name, module)]
    told = (
        _listed("missing", folded(missing)),
        _listed("not the model's", folded(surplus)),
        _listed("of another shape", shapes),
        _listed("in a precision that no weights are trained in", dtypes),
    )
    if any(told):
        name = type(plain_model(module)).__name__
        raise user_error(
            f"the weights in {files.folder} are not those of {name}:{other_class}{''.join(told)}",
            help=_prefixed(missing, surplus) or _remedy(*told),
        )
    return InitialWeights(files, sources)


def _prefixed(missing: Sequence[str], surplus: Sequence[str]) -> str:
    """What to do where names differ by what a wrapper such as DistributedDataParallel puts in front; else empty."""
    name = min(surplus, key=len, default="")
    own = next((own for own in missing if name.endswith(f".{own}")), None)
    if own is None:
        return ""
    prefix = name.removesuffix(own)
    if {f"{prefix}{plain}" for plain in missing} != set(surplus):
        return ""
    return f"they were saved from within a wrapper: write them again with names that have no `{prefix}` in front"


def _remedy(missing: str, surplus: str, shapes: str, dtypes: str) -> str:
    if dtypes and not (missing or surplus or shapes):
        return "convert them to bf16, fp16 or fp32: quantised weights are for inference"
    return "give the folder of this model's weights, or have build() make the model that its config.json describes"


def _class_difference(place: Path, module: nn.Module) -> str:
    """Said first where ``config.json`` names another class than the model's."""
    config = read_config(place)
    name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    own = type(plain_model(module)).__name__
    return f"\n  they are a {name}'s, says {CONFIG}" if isinstance(name, str) and name != own else ""


def read_config(place: Path) -> dict[str, Any]:
    """``config.json``; empty where there is none. Raises ``UserError`` for one that is no JSON object."""
    path = place / CONFIG if place.is_dir() else place.parent / CONFIG
    return read_json_object(path) if path.is_file() else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """A configuration that Diffusers wrote. Raises ``UserError`` for a file that is no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad_config_error(str(path), f"is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise bad_config_error(str(path), f"is a JSON {JSON_KINDS.get(type(config), 'value')}, not an object")
    return config


def config_differences(folder: Path, model: nn.Module) -> list[str]:
    """Where ``config.json`` and the model's own configuration say other things that no shape shows."""
    own: Any = getattr(plain_model(model), "config", None)
    if not isinstance(own, Mapping):
        return []
    theirs = read_config(model_folder(folder))
    return [
        f"{key} = {json.dumps(theirs[key])} there, {json.dumps(value, default=str)} here"
        for key, value in own.items()
        if key in theirs and not key.startswith("_") and not _same(theirs[key], value)
    ]


def _same(there: object, here: object) -> bool:
    return json.dumps(there, default=str) == json.dumps(here, default=str)


def _without_prefix(tensors: Mapping[str, StoredTensor], module: nn.Module) -> dict[str, str]:
    """The stored names as the module has them: transformers puts a model's name before those of its body."""
    prefix = f"{getattr(module, 'base_model_prefix', '') or ''}."
    own = set(module.state_dict())
    if prefix == "." or any(name in own for name in tensors):
        return {name: name for name in tensors}
    return {name.removeprefix(prefix): name for name in tensors}


def _not_persistent(module: nn.Module) -> set[str]:
    """Buffers that no file has: their constructor makes them."""
    kept = set(module.state_dict())
    return {name for name, _ in module.named_buffers(remove_duplicate=False) if name not in kept}


def _ignored(name: str, module: nn.Module) -> bool:
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def folded(names: Iterable[str]) -> list[str]:
    """Names that differ in one number, such as a block's, as one: ``blocks.0-39.norm2.weight``."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        head, number, tail = re.fullmatch(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", name, re.DOTALL).groups()  # type: ignore[union-attr]
        numbers.setdefault((head, tail if number is not None else ""), []).extend([int(number)] if number else [])
    return [head if not of_name else f"{head}{_ranges(of_name)}{tail}" for (head, tail), of_name in numbers.items()]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _listed(what: str, entries: list[str]) -> str:
    """A line of the message; nothing of no entries."""
    if not entries:
        return ""
    more = len(entries) - MOST_WEIGHTS
    return f"\n  {what}: {', '.join(entries[:MOST_WEIGHTS])}" + (f", and {more} more" if more > 0 else "")


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


@dataclass(frozen=True)
class EncoderWeights:
    """As ``InitialWeights``; ``parts`` by the encoder's name, which precedes those of its tensors; none of encoders
    without a folder."""

    parts: Mapping[str, InitialWeights]

    @classmethod
    def of(cls, folder: Path, encoders: nn.Module) -> EncoderWeights:
        """Those of these encoders, the children of a module. Raises as ``encoder_weights``."""
        stored = {name: encoder_weights(folder, name, encoder) for name, encoder in encoders.named_children()}
        return cls({name: weights for name, weights in stored.items() if weights is not None})

    @property
    def sources(self) -> dict[str, str]:
        """Where each tensor comes from, as ``InitialWeights``."""
        return {f"{part}.{name}": source for part, own in self.parts.items() for name, source in own.sources.items()}

    def value(self, name: str, dtype: torch.dtype) -> Tensor | None:
        part, _, own = name.partition(".")
        return self.parts[part].value(own, dtype) if part in self.parts else None

    def piece(self, name: str, dtype: torch.dtype, start: int, size: int) -> Tensor:
        part, _, own = name.partition(".")
        return self.parts[part].piece(own, dtype, start, size)

    def fill_buffers(self, encoders: nn.Module) -> None:
        for part, own in self.parts.items():
            own.fill_buffers(encoders.get_submodule(part))

    def fingerprint(self) -> str:
        prints = sorted((part, own.fingerprint()) for part, own in self.parts.items())
        return hashlib.sha256(repr(prints).encode()).hexdigest()
