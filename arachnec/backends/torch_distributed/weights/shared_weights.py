"""Weights that rank 0 reads or draws, and the other ranks receive, once all have made modules of the same tensors.

The others build their modules on the meta device, where weights have shapes and no memory, and allocate each tensor
once, on their device and in the precision of training. Buffers are sent as weights are, so that those that a
constructor computes are right everywhere. A module that cannot be built so is built as on rank 0, and its values then
overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import DTYPES, build_encoders, build_model
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import Mistake, UserError
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import beginning_weights
from arachnec.models.precision import in_precision
from arachnec.runtime.agreement import gather_text, gather_values, share_text

Row = tuple[str, tuple[int, ...], str]
"""Name, shape and precision of a tensor."""


def demand_equal_tensors(modules: Mapping[str, nn.Module]) -> None:
    """Raises ``UserError`` with the first tensor that is another on some rank than on rank 0. Collective."""
    rows = [
        (f"{name}.{key}", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, module in sorted(modules.items())
        for key, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    text = msgspec.json.encode(rows).decode()
    digests = gather_text(hashlib.sha256(text.encode()).hexdigest())
    if len({*digests}) == 1:
        return
    whole = share_text(text if dist.get_rank() == 0 else None)  # only now: models have thousands of tensors
    rank_0 = msgspec.json.decode(whole, type=list[Row])
    pairs = ((own, first) for own, first in zip_longest(rows, rank_0) if own != first)
    told = gather_values([*map(_shown, next(pairs, (None, None)))], list[str])
    raise UserError(
        *(
            Mistake(
                None,
                f"rank {rank} has made other modules than rank 0: {own}, where rank 0 has {first}",
                help=(
                    "give every rank the same folder, options and versions of Python, torch and libraries; and have "
                    "the model file make the same tensors on the meta device, where all but rank 0 build, as on the "
                    "CPU"
                ),
            )
            for rank, (own, first) in enumerate(told)
            if digests[rank] != digests[0]
        )
    )


def _shown(row: Row | None) -> str:
    if row is None:
        return "no further tensor"
    name, shape, precision = row
    return f"`{name}` {list(shape)} {precision}"


Modules = Mapping[str, nn.Module]
CPU = torch.device("cpu")
META = torch.device("meta")


def shared_model(model_file: ModelFile, training: Training, device: torch.device) -> nn.Module:
    """The model of ``build_model`` on every rank, with the weights of rank 0's. Collective.

    Raises ``UserError`` where the ranks' models have other tensors.
    """
    return shared_modules(lambda home: {"model": build_model(model_file, training, home)}, device)["model"]


def given_module(model: nn.Module, training: Training, device: torch.device, init: Path | None = None) -> nn.Module:
    """A module that every rank was given, with rank 0's values, or those in ``init``, on the rank's device. Collective.
    Raises as ``shared_model``.
    """
    if init is not None and dist.get_rank() == 0:
        beginning_weights(init, model).fill(model)
    if training.dtype != "fp32":
        model = in_precision(model, DTYPES[training.dtype])
    model.to(device)
    demand_equal_tensors({"model": model})
    for tensor in tensors_of({"model": model}):
        broadcast(tensor)
    return model


def shared_encoders(model_file: ModelFile, training: Training, device: torch.device) -> dict[str, nn.Module]:
    """The encoders of ``build_encoders`` on every rank, with the weights of rank 0's. Collective. Raises as
    ``shared_model``."""
    return dict(shared_modules(lambda home: build_encoders(model_file, training, home), device))


def shared_modules(build: Callable[[torch.device], Modules], device: torch.device) -> Modules:
    """Modules by name, alike on all ranks. ``build`` makes them on the CPU, or on the meta device without values."""
    modules = build(CPU) if dist.get_rank() == 0 else without_memory(build)
    for tensor in tensors_of(modules):
        if tensor.is_meta:
            put_in_place(tensor, torch.empty_like(tensor, device=device))
    demand_equal_tensors(modules)
    for tensor in tensors_of(modules):
        home = tensor if tensor.device == device else tensor.detach().to(device)
        broadcast(home)
        if home is not tensor:
            put_in_place(tensor, home)
    for module in modules.values():
        module.to(device)  # what is no tensor of the module, such as a device that it remembers
    share_random_state()
    return modules


def share_random_state() -> None:
    """Have every rank draw on as rank 0 does after building. Collective."""
    state = torch.get_rng_state()
    broadcast(state)
    torch.set_rng_state(state)


def tensors_of(modules: Modules) -> Iterator[Tensor]:
    """Every parameter and buffer once, shared ones too, in an order that is the same on all ranks."""
    for _, module in sorted(modules.items()):
        yield from module.parameters()
        yield from module.buffers()


def without_memory(build: Callable[[torch.device], Modules]) -> Modules:
    """The modules on the meta device; on the CPU, with values of their own, where they cannot be built so."""
    try:
        with META:
            modules = build(META)
        if not any(has_strays(module) for module in modules.values()):
            return modules
    except (NotImplementedError, RuntimeError, TypeError, UserError):
        pass  # it looks at values, or cannot be without them; a mistake shows again below
    return build(CPU)


def has_strays(module: nn.Module) -> bool:
    """Whether it keeps tensors without values that are neither parameters nor buffers: nobody would send them."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def stray(value: Any, depth: int = 3) -> bool:
        if isinstance(value, Tensor):
            return value.is_meta and id(value) not in known
        if isinstance(value, dict):
            value = list(value.values())
        return depth > 0 and isinstance(value, list | tuple | set) and any(stray(item, depth - 1) for item in value)

    registered = {"_parameters", "_buffers", "_modules"}
    return any(
        stray(value) for part in module.modules() for name, value in vars(part).items() if name not in registered
    )


def put_in_place(tensor: Tensor, other: Tensor) -> None:
    """Put ``other`` in the place of ``tensor`` wherever that is referred to, as a parameter if it is one."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


@torch.no_grad()
def broadcast(tensor: Tensor) -> None:
    """Rank 0's values, as bytes: every precision travels alike."""
    if not tensor.numel():
        return
    packed = tensor.detach().contiguous()
    dist.broadcast(packed.reshape(-1).view(torch.uint8), 0)
    if packed.data_ptr() != tensor.data_ptr():
        tensor.copy_(packed)
