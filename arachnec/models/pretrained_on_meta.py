"""``from_pretrained`` of transformers and Diffusers on the meta device: the module of its configuration, no weights.

A model is planned without values, and the libraries read a model's weights all the same, or refuse. What a call asks
for that a configuration alone does not tell is read in full, and its values are dropped.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# The class of each library that has the method, by its module.
CLASSES = {"transformers.modeling_utils": "PreTrainedModel", "diffusers.models.modeling_utils": "ModelMixin"}
PRECISION = ("dtype", "torch_dtype")
HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
OF_FILES = (
    "variant",
    "use_safetensors",
    "low_cpu_mem_usage",
    "weights_only",
    "_from_auto",
    "_commit_hash",
)  # which weights, not which model


@contextmanager
def pretrained_without_weights() -> Iterator[None]:
    """Inside, ``from_pretrained`` called on the meta device reads no weights, in the libraries that are imported."""
    with ExitStack() as stack:
        for module, name in CLASSES.items():
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None:
                stack.enter_context(_without_weights(kind, _of_config if "diffusers" in module else _of_transformers))
        yield


def without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device, tied tensors tied; nothing of the module's size is allocated."""
    import torch

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        kept = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
        memo[id(tensor)] = kept
    return copy.deepcopy(module, memo)


@contextmanager
def _without_weights(kind: Any, of_config: Callable[..., Any]) -> Iterator[None]:
    original = vars(kind)["from_pretrained"]

    @wraps(original.__func__)
    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        load = original.__get__(None, cls)
        if not torch.empty(0).is_meta:
            return load(path, *args, **kwargs)
        given = {key: value for key, value in kwargs.items() if value}  # what is off is as if it were not there
        planned = (
            None if args or not given.keys() <= {*PRECISION, *HUB, *OF_FILES, "config"} else of_config(cls, path, given)
        )
        if planned is None:
            with torch.device("cpu"):
                loaded = load(path, *args, **kwargs)
            return without_values(loaded) if isinstance(loaded, torch.nn.Module) else loaded
        return planned.eval()

    kind.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        kind.from_pretrained = original


def _of_transformers(cls: Any, path: Any, given: Mapping[str, Any]) -> Any:
    """None where the weights have a say in the precision."""
    import torch

    hub = {key: given[key] for key in HUB if key in given}
    config = given.get("config")
    if not hasattr(config, "to_diff_dict"):
        config = cls.config_class.from_pretrained(path if config is None else config, **hub)
    dtype = next((given[name] for name in PRECISION if name in given), "auto")
    dtype = getattr(config, "dtype", None) if dtype == "auto" else dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    mixed = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    half = dtype in (torch.float16, torch.bfloat16)
    if not isinstance(dtype, torch.dtype) or getattr(config, "quantization_config", None):
        return None
    if half and any(getattr(cls, name, None) for name in mixed):
        return None
    return cls._from_config(config, dtype=dtype)


def _of_config(cls: Any, path: Any, given: Mapping[str, Any]) -> Any:
    """None where the weights are quantised."""
    import torch

    config = cls.load_config(given.get("config", path), **{key: given[key] for key in HUB if key in given})
    if config.get("quantization_config"):
        return None
    model = cls.from_config(config)
    dtype = next((given[name] for name in PRECISION if name in given), torch.float32)
    kept = cls._keep_in_fp32_modules or []
    stored = model.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and (name in stored or not kept):
            single = any(part in name.split(".") for part in ([kept] if isinstance(kept, str) else kept))
            tensor.data = tensor.data.to(torch.float32 if single else dtype)
    return model
