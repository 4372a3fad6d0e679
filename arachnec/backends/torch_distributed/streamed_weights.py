"""A model whose weights rank 0 draws or reads and hands round one by one: no rank ever holds more than it keeps.

Every rank builds the model on the meta device. Rank 0 then builds it with values (``streamed_build``), and what its
constructor is done with goes to all ranks at once, behind its number. Each rank takes what it wants of it. Where a
model cannot be built so, rank 0 holds it whole and sends it then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.shared_weights import (
    CPU,
    broadcast,
    digest_of,
    has_strays,
    put_in_place,
    share_random_state,
    without_memory,
)
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import InitialWeights, initial_weights
from arachnec.models.streamed_build import Construction, OtherConstruction, streamed_build, watched_build
from arachnec.runtime.agreement import agree

Take = Callable[[str, Tensor], None]
END = -1  # in the place of a parameter's number
CANNOT = (NotImplementedError, RuntimeError, TypeError, UserError)  # build on the meta device; a mistake shows again


def own_model(
    model_file: ModelFile, training: Training, device: torch.device, own: Collection[str], init: Path | None = None
) -> nn.Module:
    """The model of ``build_model`` with the parameters that are this rank's ``own``, by name. Collective.

    The others are zeros without memory, and do not train. ``init`` and ``UserError`` as in ``streamed_model``.
    """
    kept: dict[str, Tensor] = {}

    def take(name: str, value: Tensor) -> None:
        if name in own:
            kept[name] = value.clone()

    model = streamed_model(model_file, training, device, lambda model: take, init)
    for name, parameter in list(model.named_parameters()):
        here = kept.pop(name, None)
        put_in_place(parameter, absent(parameter, device) if here is None else here)
        parameter.requires_grad_(parameter.requires_grad and here is not None)
    model.to(device)  # what is no tensor of the module, such as a device that it remembers
    return model


def absent(parameter: Tensor, device: torch.device) -> Tensor:
    """What stands for a parameter that is not on this rank: zeros without memory."""
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def streamed_model(
    model_file: ModelFile,
    training: Training,
    device: torch.device,
    taking: Callable[[nn.Module], Take],
    init: Path | None = None,
) -> nn.Module:
    """The model of ``build_model``, with its buffers, its parameters as they were built without memory. Collective.

    ``taking`` makes of this model what sees every parameter by name, on ``device``, and copies what this rank keeps. It
    may see all of them a second time, and the later values count. Those in the folder ``init`` come from there: rank 0
    reads one at a time, and nobody else reads. Raises ``UserError`` where the ranks' models have other tensors, or
    ``init`` has other weights.
    """
    build = partial(build_model, model_file, training)
    construction, weights = None, None
    if dist.get_rank() == 0:
        model, construction = _watched(build)
        weights = None if init is None else initial_weights(init, model)
    else:
        model = without_memory(lambda home: {"model": build(home)})["model"]
    agree({"the tensors of the model": digest_of({"model": model})})
    exchange = _Exchange(model, device, taking(model))
    if dist.get_rank() == 0:
        source = _sent(build, model, construction, exchange, weights)
    else:
        exchange.receive()
        source = model
    for name, buffer in list(model.named_buffers()):
        value = source.get_buffer(name)
        home = torch.empty_like(value, device=device) if value.is_meta else value.detach().to(device)
        broadcast(home)
        put_in_place(buffer, home)
    share_random_state()
    return model


def _watched(build: Callable[[torch.device], nn.Module]) -> tuple[nn.Module, Construction | None]:
    """The model without memory, and how it came about; with its values and no more where it cannot be built so."""
    try:
        model, construction = watched_build(lambda: build(torch.device("meta")))
        if not has_strays(model):
            return model, construction
    except CANNOT:
        pass
    return build(CPU), None


def _sent(
    build: Callable[[torch.device], nn.Module],
    model: nn.Module,
    construction: Construction | None,
    exchange: _Exchange,
    weights: InitialWeights | None,
) -> nn.Module:
    """Rank 0's part. Returns the model that has the buffers."""
    source = model

    def send(name: str, value: Tensor) -> None:
        read = None if weights is None else weights.value(name, value.dtype)
        exchange.send(name, value if read is None else read)

    try:
        if construction is not None:
            source = streamed_build(lambda: build(CPU), construction, send)
    except OtherConstruction:
        source, construction = build(CPU), None
    if construction is None:
        for name, value in source.named_parameters():
            send(name, value.detach())
    exchange.end()
    if weights is not None:
        weights.fill_buffers(source)
    return source


class _Exchange:
    """Parameters on their way from rank 0 to all ranks, itself included."""

    def __init__(self, model: nn.Module, device: torch.device, take: Take) -> None:
        self._parameters = dict(model.named_parameters())
        self._names = list(self._parameters)
        self._device = device
        self._take = take

    def send(self, name: str, value: Tensor) -> None:
        home = value.to(self._device)
        broadcast(torch.tensor(self._names.index(name), device=self._device))
        broadcast(home)
        self._take(name, home)

    def end(self) -> None:
        broadcast(torch.tensor(END, device=self._device))

    def receive(self) -> None:
        """The part of the other ranks."""
        while (name := self._next()) is not None:
            shape = self._parameters[name].detach()
            value = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self._device)
            broadcast(value)
            self._take(name, value)

    def _next(self) -> str | None:
        number = torch.tensor(END, device=self._device)
        broadcast(number)
        return None if int(number) == END else self._names[int(number)]
