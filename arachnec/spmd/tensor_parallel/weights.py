"""Which weights of an encoder ranks divide, and how: read from one run of it on the meta device.

A linear layer that reads what is whole is cut by columns: each rank makes some of its outputs. One that reads what is
cut is cut by rows, and its outputs are summed. So every attention and every MLP has one sum, whatever they are called
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Where outputs are viewed as heads, whole heads stay
together: of several numbers of heads, as queries and grouped keys have them, their greatest common divisor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from arachnec.spmd.spatial.layout import Dim, Factor, Layout, even_bounds, is_cut, whole
from arachnec.spmd.spatial.peers import Counted, Peers
from arachnec.spmd.spatial.split_tensor import NotDivisible, Sharing, SplitTensor, local_part
from arachnec.spmd.tensor_parallel.operators import linear, sharing_weights

COLUMNS, ROWS = 0, 1  # dimensions of a linear layer's weight
TABLE = 1  # of a table its columns


@dataclass(frozen=True)
class WeightPart:
    """What a rank holds of a weight."""

    local: Tensor
    layout: Layout


@dataclass(frozen=True)
class WeightCuts:
    """``dims`` are the dimension of each weight that is cut, by the name that ``named_parameters`` gives it.

    At most ``units`` ranks can divide them: what is cut is a run of these, and the same on all that fit together.
    """

    dims: Mapping[str, int]
    units: int

    def layout(self, name: str, shape: tuple[int, ...], ranks: int) -> Layout:
        """How a weight of this shape lies over so many ranks."""
        dims: list[Dim] = [whole(size) for size in shape]
        size = shape[self.dims[name]]
        units = self.units if size % self.units == 0 else size
        bounds = tuple(bound * (size // units) for bound in even_bounds(units, ranks))
        dims[self.dims[name]] = (Factor(size, 0, bounds),)
        return Layout(tuple(dims), (ranks,))

    def part(self, name: str, weight: Tensor, ranks: int, place: int) -> WeightPart:
        """What the rank at this place holds of a weight, as a view of it."""
        layout = self.layout(name, tuple(weight.shape), ranks)
        return WeightPart(local_part(weight, layout, place), layout)

    def parts(self, weights: Mapping[str, Tensor], ranks: int, place: int) -> dict[str, WeightPart]:
        """The parts of all weights that are cut."""
        return {name: self.part(name, weights[name], ranks, place) for name in self.dims}


def cuts_of(encoder: nn.Module, loaded: Tensor) -> WeightCuts:
    """How the weights of an encoder can be cut. ``encoder`` and what it reads are on the meta device.

    Raises NotDivisible where its ranks could share none.
    """
    watch = _Watch(encoder)
    with torch.no_grad(), watch:
        encoder(loaded)
    if not watch.dims:
        raise NotDivisible("it has no linear layers whose ranks could each hold a part")
    weights = dict(encoder.named_parameters())
    largest = max(weights[name].numel() for name in watch.dims)
    # a smaller table saves little and costs an exchange: positions, relative biases
    tables = {name: TABLE for name in _tables(encoder) if weights[name].numel() > largest}
    sizes = [weights[name].shape[dim] for name, dim in watch.dims.items()]
    return WeightCuts({**watch.dims, **tables}, math.gcd(*watch.units) if watch.units else min(sizes))


def _tables(encoder: nn.Module) -> Iterator[str]:
    tables = {id(module.weight) for module in encoder.modules() if isinstance(module, nn.Embedding)}
    return (name for name, parameter in encoder.named_parameters() if id(parameter) in tables)


class _Watch(TorchFunctionMode):
    """Runs linear layers as the only rank of a group would, and notes what they read and how outputs are viewed."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.dims: dict[str, int] = {}
        self.units: set[int] = set()
        self._names = {id(parameter): name for name, parameter in encoder.named_parameters()}
        self._sharing = sharing_weights(Counted(0), 1)
        self._outputs: dict[int, Tensor] = {}  # of layers that are cut by columns; kept, so that no id comes again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and (name := self._names.get(id(_second(args, kwargs)))) is not None:
            return self._linear(name, *args, **kwargs)
        result = func(*args, **kwargs)
        if args and id(args[0]) in self._outputs and isinstance(result, Tensor):
            self._viewed(args[0], result)
        return result

    def _linear(self, name: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        cut = isinstance(input, SplitTensor) and is_cut(input.spread.dims[-1])
        dim = self.dims.setdefault(name, ROWS if cut else COLUMNS)
        output = linear(input, _one_part(weight, dim, self._sharing), bias)
        if isinstance(output, SplitTensor):
            self._outputs[id(output)] = output
        return output

    def _viewed(self, output: Tensor, view: Tensor) -> None:
        """Notes the heads, where the last dimension became several."""
        width, inner = output.shape[-1], 1
        if view.numel() != output.numel():
            return
        for size in reversed(view.shape):
            inner *= size
            if inner == width and size != width:
                self.units.add(size)
            if inner >= width:
                return


def _second(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _one_part(weight: Tensor, dim: int, sharing: Sharing) -> SplitTensor:
    dims = [(Factor(size, 0, (0, size)),) if place == dim else whole(size) for place, size in enumerate(weight.shape)]
    return SplitTensor(weight, Layout(tuple(dims), (1,)), sharing)


@torch.no_grad()
def encode_with_parts(
    encoder: nn.Module, parts: Mapping[str, WeightPart], loaded: Tensor, peers: Peers, ranks: int
) -> Tensor:
    """``encoder(loaded)`` by so many ranks, each with its ``parts`` of the weights, by name, in the place of the
    encoder's own; the whole result on each. Collective. Raises NotDivisible for an encoder that cannot be shared.
    """
    sharing = sharing_weights(peers, ranks)
    shared: dict[str, Tensor] = {name: SplitTensor(part.local, part.layout, sharing) for name, part in parts.items()}
    output = torch.func.functional_call(encoder, shared, (loaded,))
    if not isinstance(output, Tensor):
        raise NotDivisible(f"it gives no tensor but {type(output).__name__}")
    return output.gathered() if isinstance(output, SplitTensor) else output
