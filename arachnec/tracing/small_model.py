"""A model small enough to run in numbers. In: a model on any device, and a call of it. Out: its prediction, on the CPU.

One block of each structure has weights; the others return what the first of theirs returned, so that a model of 40
layers costs little more than one of a single layer. Weights are random and of the size that keeps a signal's: none is
zero, as an adapter or a gate may begin, so every argument reaches the prediction.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.ir.diagnostic import UserError
from arachnec.models.batch import prediction_of
from arachnec.tracing.counted_run import TotalFlops
from arachnec.tracing.export import is_seeded
from arachnec.tracing.find import Unread, find_blocks, structure, unread_settings
from arachnec.tracing.global_generators import NUMPY, PYTHON, move, restored, states
from arachnec.tracing.record import ExampleCall, Repeats, is_meta, run_once, training_mode
from arachnec.tracing.verify import SEED, TILE, FactoredMatrix, fill, is_wide, random_like

TOLERANCE = 1e-4  # of the largest value, in float32
MOST_FLOPS = 5e11  # of one forward: a few seconds of a processor
SURELY_FEW = 1e11  # weights times the values of an argument: fewer need not be counted
MOST_WEIGHTS = 2**31  # with values: 8 GiB


LACKING = (NotImplementedError, ImportError, MemoryError)  # of the processor or what is installed
LACKED = ("cuda", "driver", "allocate memory", "meta")  # in a message: a device, memory, a tensor without values


class CannotRun(Exception):
    """Why the model gives no prediction here."""


class ModelRaised(CannotRun):
    """The model's own code raised what is the cause of this, with a clip that it takes by its shape."""


@dataclass(eq=False)
class SmallModel:
    """``drawn``: the last random operation of a forward, or the generator that it drew from, where there was one."""

    name: str
    model: nn.Module
    blocks: Mapping[str, nn.Module]  # one of each structure
    converted: bool = False  # whether its weights had another precision
    drawn: str = field(default="", init=False)

    def run(self, arguments: Mapping[str, Any], seed: int = 0) -> Tensor:
        """The prediction, in float32. Raises ``CannotRun`` where only this machine or precision may be why the model
        raises, else ``ModelRaised``."""
        repeats = Repeats(self.model, self.blocks, values=True)
        with restored(), torch.no_grad(), training_mode(self.model), repeats, self.watching(seed):
            try:
                prediction = prediction_of(self.model(**pytree.tree_map_only(Tensor, _in_float32, dict(arguments))))
            except Exception as error:
                leaves = pytree.tree_leaves(dict(arguments))
                if of_the_trial(error, self.converted or any(map(_another_precision, leaves))):
                    raise CannotRun(raised(error)) from error
                raise ModelRaised(raised(error)) from error
        return prediction.float()

    @contextlib.contextmanager
    def watching(self, seed: int) -> Iterator[None]:
        """Inside, with the global generators moved, draws are noted."""
        move(seed)
        before = states()
        with _Drawn(self):
            yield
        after = states()
        self.drawn = next((name for name in (PYTHON, NUMPY) if after[name] != before[name]), self.drawn)


@dataclass
class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    small: SmallModel

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_seeded(func):
            self.small.drawn = str(func)
        return func(*args, **(kwargs or {}))


def small_model(model: nn.Module, call: ExampleCall) -> SmallModel:
    """Raises ``CannotRun`` where the call, or what has to have values, is too large, or there is no copying it."""
    blocks = find_blocks(model)
    unread = unread_settings(blocks, lambda: run_once(model, call))
    firsts: dict[Any, nn.Module] = {}
    copies: dict[int, Any] = {}
    try:
        for block in blocks.values():
            copies[id(block)] = copy.deepcopy(firsts.setdefault(structure(block, unread), block), copies)
        small = copy.deepcopy(model, copies)
    except Exception as error:
        raise CannotRun(f"there is no copying it: {raised(error)}") from error
    weights = sum(parameter.numel() for parameter in small.parameters())
    if weights > MOST_WEIGHTS:
        raise CannotRun(f"{weights / 1e9:.1f} billion weights lie outside its repeated blocks")
    largest = max(leaf.numel() for leaf in pytree.tree_leaves(dict(call.arguments)) if isinstance(leaf, Tensor))
    if is_meta(model) and weights * largest > SURELY_FEW:
        _demand_few_flops(model, blocks, unread, call)
    converted = any(map(_another_precision, small.parameters()))
    _give_values(small)
    named = {path: small.get_submodule(path) for path in blocks}
    return SmallModel(type(model).__name__, small, named, converted)


def _demand_few_flops(model: nn.Module, blocks: Mapping[str, nn.Module], unread: Unread, call: ExampleCall) -> None:
    with TotalFlops() as counter, Repeats(model, blocks, unread):
        run_once(model, call)
    flops = counter.get_total_flops() / call.batch
    if flops > MOST_FLOPS:
        raise CannotRun(f"its smallest clip takes {flops / 1e12:.1f} TFLOP")


def _give_values(model: nn.Module) -> None:
    """Random weights, in float32; buffers keep the values that they have."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    tile = torch.empty(TILE).uniform_(-1, 1, generator=generator)
    before = [*model.parameters(), *model.buffers()]  # alive, so that no other tensor gets the id of one
    known: dict[int, Any] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in known:
                    known[id(parameter)] = _weight(name, parameter, tile, generator)
                module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), _in_float32(_real(buffer, generator)))
        for name, held in vars(module).items():
            if not name.startswith("_") and any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves(held)):
                module.__dict__[name] = pytree.tree_map_only(Tensor, lambda t: _real(t, generator), held)
    before.clear()


def _weight(name: str, like: nn.Parameter, tile: Tensor, generator: torch.Generator) -> nn.Parameter:
    """Of a matrix so that what goes through keeps its size, of a norm's weight around 1."""
    if is_wide(like):
        return FactoredMatrix.like(like, torch.float32, torch.device("cpu"), generator)
    values = _values(name, like, tile, generator)
    return nn.Parameter(values, requires_grad=like.requires_grad)


def _values(name: str, like: Tensor, tile: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    of_matrix = like.ndim > 1 and like.shape[0] > 1
    scale = math.sqrt(3 * like.shape[0] / like.numel()) if of_matrix else 0.5
    values = torch.empty(like.shape)
    if like.numel() < TILE:
        values.uniform_(-scale, scale, generator=generator)
    else:
        fill(values, tile.roll(int(torch.randint(TILE, (), generator=generator))) * scale)
    return values.add_(1.0) if name == "weight" and like.ndim == 1 else values


def _real(value: Tensor, generator: torch.Generator) -> Tensor:
    return random_like(value, generator) if value.is_meta else value.detach().cpu()


def _in_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _another_precision(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32


def of_the_trial(error: Exception, converted: bool) -> bool:
    """Whether an error may come of how the model is run here, and not of its code: on this processor, without what is
    not installed, and in float32 where it is written for another precision."""
    said = str(error).lower()
    return isinstance(error, LACKING) or any(word in said for word in LACKED) or (converted and "type" in said)


def raised(error: Exception) -> str:
    """An exception in a line."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")[:200]
