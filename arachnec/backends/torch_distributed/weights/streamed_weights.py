"""A model whose weights rank 0 draws and hands round one by one, or every rank reads: none holds more than it keeps.

Every rank builds the model on the meta device. Rank 0 then builds it with values (``streamed_build``), and what its
constructor is done with goes to all ranks at once, behind its number. Each rank takes what it wants of it. Where a
model cannot be built so, rank 0 holds it whole and sends it then. Weights in a folder that all ranks see are not sent:
every rank reads its own pieces of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.weights.shared_weights import (
    CPU,
    broadcast,
    demand_equal_tensors,
    has_strays,
    put_in_place,
    share_random_state,
    without_memory,
)
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import beginning_weights
from arachnec.models.streamed_build import Construction, OtherConstruction, streamed_build, watched_build
from arachnec.runtime.agreement import gather_text


class Offered(Protocol):
    """A parameter that a rank may take, or some of it, on its device."""

    def piece(self, start: int, size: int) -> Tensor:
        """Some elements of it, flattened. They may share its memory."""
        ...

    def whole(self) -> Tensor:
        """All of it, in memory of its own."""
        ...


class StoredWeights(Protocol):
    """Weights in files, as ``models.initial_weights.InitialWeights`` has them."""

    @property
    def sources(self) -> Mapping[str, str]: ...

    def value(self, name: str, dtype: torch.dtype) -> Tensor | None: ...

    def piece(self, name: str, dtype: torch.dtype, start: int, size: int) -> Tensor: ...

    def fill_buffers(self, module: nn.Module) -> None: ...

    def fingerprint(self) -> str: ...


Take = Callable[[str, Offered], None]
END = -1  # in the place of a parameter's number
CANNOT = (NotImplementedError, RuntimeError, TypeError, UserError)  # build on the meta device; a mistake shows again


def own_model(
    model_file: ModelFile,
    training: Training,
    device: torch.device,
    own: Collection[str] | None = None,
    init: Path | None = None,
) -> nn.Module:
    """The model of ``build_model`` with the parameters that are this rank's ``own``, by name; by default all.
    Collective.

    The others are zeros without memory, and do not train. ``init`` and ``UserError`` as in ``streamed_model``.
    """
    kept: dict[str, Tensor] = {}

    def take(name: str, value: Offered) -> None:
        if own is None or name in own:
            kept[name] = value.whole()

    model = streamed_model(model_file, training, device, lambda model: take, init)
    put_kept(model, dict(model.named_parameters()), kept, device)
    return model


def put_kept(
    module: nn.Module, parameters: Mapping[str, Tensor], kept: dict[str, Tensor], device: torch.device
) -> None:
    """Put what this rank has ``kept`` in the place of the parameters; of the others zeros without memory, which do not
    train."""
    for name, parameter in parameters.items():
        here = kept.pop(name, None)
        absent = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        put_in_place(parameter, absent if here is None else here)
        parameter.requires_grad_(parameter.requires_grad and here is not None)
    module.to(device)  # what is no tensor of the module, such as a device that it remembers


def streamed_model(
    model_file: ModelFile,
    training: Training,
    device: torch.device,
    taking: Callable[[nn.Module], Take],
    init: Path | None = None,
) -> nn.Module:
    """The model of ``build_model``, with its buffers, its parameters as they were built without memory. Collective.

    ``taking`` makes of this model what is offered every parameter by name, and copies what this rank keeps. It may be
    offered all of them a second time, and the later values count. Those in the folder ``init`` come from there: every
    rank reads what it keeps, or rank 0 reads one at a time and sends it where not all ranks see the same files. Raises
    ``UserError`` where the ranks' models have other tensors, or ``init`` has other weights.
    """
    return streamed(partial(build_model, model_file, training), device, taking, init, beginning_weights)


def streamed(
    build: Callable[[torch.device], nn.Module],
    device: torch.device,
    taking: Callable[[nn.Module], Take],
    init: Path | None,
    stored: Callable[[Path, nn.Module], StoredWeights],
) -> nn.Module:
    """``streamed_model`` of any module: ``build`` makes it on a device, ``stored`` finds its weights. Collective."""
    construction, weights = None, None
    if dist.get_rank() == 0:
        model, construction = _watched(build)
        weights = None if init is None else stored(init, model)
    else:
        model = without_memory(lambda home: {"model": build(home)})["model"]
    demand_equal_tensors({"model": model})
    take = taking(model)
    own = None if init is None else _own_files(init, model, weights, stored)
    exchange = _Exchange(model, device, take)
    if dist.get_rank() == 0:
        source = _sent(build, model, construction, exchange, weights, frozenset(() if own is None else own.sources))
    else:
        exchange.receive()
        source = model
    if own is not None:
        for name, parameter in model.named_parameters():
            if name in own.sources:
                take(name, _Stored(own, name, parameter.detach(), device))
    for name, buffer in list(model.named_buffers()):
        value = source.get_buffer(name)
        home = torch.empty_like(value, device=device) if value.is_meta else value.detach().to(device)
        broadcast(home)
        put_in_place(buffer, home)
    share_random_state()
    return model


def _own_files(
    init: Path,
    model: nn.Module,
    weights: StoredWeights | None,
    stored: Callable[[Path, nn.Module], StoredWeights],
) -> StoredWeights | None:
    """The folder's weights for this rank to read, where every rank sees those of rank 0; else None. Collective."""
    try:
        weights = stored(init, model) if weights is None else weights
        seen = weights.fingerprint()
    except UserError:
        seen = ""
    return weights if set(gather_text(seen)) == {seen} and seen else None


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
    weights: StoredWeights | None,
    unsent: Collection[str],
) -> nn.Module:
    """Rank 0's part; ``unsent`` is what every rank reads. Returns the model that has the buffers."""
    source, sending = model, False

    def send(name: str, value: Tensor) -> None:
        nonlocal sending
        if name in unsent:
            return
        sending = True
        read = None if weights is None else weights.value(name, value.dtype)
        exchange.send(name, value if read is None else read)
        sending = False

    streamed = False
    if construction is not None:
        stored = all(name in unsent for name, _ in model.named_parameters())  # then none has to be drawn
        for hand_over in (None, send) if stored else (send,):
            try:
                source = streamed_build(lambda: build(CPU), construction, hand_over)
            except (OtherConstruction, *CANNOT):  # it came back to given up values; a mistake shows again below
                if sending:  # a peer that is gone, or a damaged file: no second build helps
                    raise
            else:
                streamed = True
                break
        if not streamed:
            source = build(CPU)
    if not streamed:
        for name, value in source.named_parameters():
            send(name, value.detach())
    exchange.end()
    if weights is not None:
        weights.fill_buffers(source)
    return source


@dataclass(frozen=True)
class _Sent:
    """A parameter that is here as long as it is offered."""

    value: Tensor

    def piece(self, start: int, size: int) -> Tensor:
        return self.value.reshape(-1)[start : start + size]

    def whole(self) -> Tensor:
        return self.value.clone()


@dataclass(frozen=True)
class _Stored:
    """A parameter in a file, of which is read what is asked for. ``like`` has its strides and precision."""

    weights: StoredWeights
    name: str
    like: Tensor
    device: torch.device

    def piece(self, start: int, size: int) -> Tensor:
        return self.weights.piece(self.name, self.like.dtype, start, size).to(self.device)

    def whole(self) -> Tensor:
        value = torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device=self.device)
        return value.copy_(self.piece(0, self.like.numel()).view(self.like.shape))


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
        self._take(name, _Sent(home))

    def end(self) -> None:
        broadcast(torch.tensor(END, device=self._device))

    def receive(self) -> None:
        """The part of the other ranks."""
        while (name := self._next()) is not None:
            shape = self._parameters[name].detach()
            value = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self._device)
            broadcast(value)
            self._take(name, _Sent(value))

    def _next(self) -> str | None:
        number = torch.tensor(END, device=self._device)
        broadcast(number)
        return None if int(number) == END else self._names[int(number)]
