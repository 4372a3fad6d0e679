"""The weights of an encoder divided over ranks: which and how, the operators on parts, and what it costs.

A linear layer that reads what is whole is cut by columns: each rank makes some of its outputs. One that reads what is
cut is cut by rows, and its outputs are summed. So every attention and every MLP has one sum, whatever they are called
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Where outputs are viewed as heads, whole heads stay
together: of several numbers of heads, as queries and grouped keys have them, their greatest common divisor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Quantity
from arachnec.kernels.attention.collectives import ordered_sum
from arachnec.spmd.spatial import reductions
from arachnec.spmd.spatial.division import FRAMES, RANKS, Counts, Part, per_token
from arachnec.spmd.spatial.layout import Dim, Factor, Layout, even_bounds, is_cut, whole
from arachnec.spmd.spatial.operators import sharing
from arachnec.spmd.spatial.peers import Counted, Peers
from arachnec.spmd.spatial.pointwise import brought_to
from arachnec.spmd.spatial.split_tensor import NotDivisible, Rule, Sharing, SplitTensor, local_part
from arachnec.tracing.cost import GIB

ATEN = torch.ops.aten
Run = Callable[[Tensor, Tensor], Tensor]


def sharing_weights(peers: Peers, ranks: int) -> Sharing:
    """So many ranks in a row, with all that they know how to share."""
    base = sharing(peers, (ranks,))
    operators: dict[object, Rule] = {ATEN.mm: matrix_product, ATEN.addmm: matrix_product_and, ATEN.embedding: embedding}
    functions: dict[object, Rule] = {F.linear: linear, F.scaled_dot_product_attention: attention}
    return replace(base, operators={**base.operators, **operators}, functions={**base.functions, **functions})


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of a weight ``[columns, rows]``."""
    if not isinstance(weight, SplitTensor):
        return reductions.linear(F.linear, input, weight, bias)
    turned = weight.t()
    assert isinstance(turned, SplitTensor)
    return _plus(_product(input, turned, lambda a, b: F.linear(a, b.t())), bias)


def matrix_product(operator: Any, a: Tensor, b: Tensor) -> Tensor:
    """``mm``."""
    if not isinstance(b, SplitTensor):
        return reductions.matrix_product(operator, a, b)
    return _product(a, b, operator)


def matrix_product_and(operator: Any, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """``addmm``."""
    if not isinstance(b, SplitTensor) or kwargs:
        return reductions.matrix_product_and(operator, bias, a, b, **kwargs)
    return _plus(_product(a, b, ATEN.mm), bias)


def embedding(operator: Any, table: Tensor, numbers: Tensor, *args: Any) -> Tensor:
    """A table by its columns; what is looked up is gathered, for it is added to what every rank has."""
    if isinstance(numbers, SplitTensor):
        numbers = numbers.gathered()
    if not isinstance(table, SplitTensor):
        return operator(table, numbers, *args)  # type: ignore[no-any-return]
    spread = Layout((*map(whole, numbers.shape), table.spread.dims[1]), table.spread.grid)
    return table.like(operator(table.local, numbers, *args), spread).gathered()


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Scaled dot-product attention on some heads; grouped ones are written out, so that they lie as the queries do."""
    if kwargs.pop("enable_gqa", False):
        times = query.shape[-3] // key.shape[-3]
        key, value = (_repeated(x, times) for x in (key, value))
    return reductions.attention(query, key, value, *args, **kwargs)


def _repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, rows, width = x.shape
    return x[:, :, None].expand(batch, heads, times, rows, width).reshape(batch, heads * times, rows, width)


def _product(a: Tensor, b: SplitTensor, run: Run) -> Tensor:
    """``a @ b``: some columns on each rank, or all of it on every rank. Collective where ``b`` is cut by rows."""
    rows, columns = b.spread.dims
    outer = [whole(size) for size in a.shape[:-1]]
    if is_cut(rows):
        part = brought_to(a, Layout((*outer, rows), b.spread.grid), b)
        return summed(run(part, b.local), b.sharing.peers, b.spread.ranks)
    everything = a.gathered() if isinstance(a, SplitTensor) else a
    return b.like(run(everything, b.local), Layout((*outer, columns), b.spread.grid))


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def summed(x: Tensor, peers: Peers, ranks: int) -> Tensor:
    """The sum of what every rank has, on each: all add up a piece, and get the others' pieces. Collective.

    Pieces are added in the order of the ranks and in at least 32 bits, so all ranks have the same.
    """
    if ranks == 1:
        return x
    pieces = list(x.reshape(-1).tensor_split(ranks))
    own, nothing = pieces[peers.index], x.new_empty(0)
    others = [rank != peers.index for rank in range(ranks)]
    received = peers.exchange(
        [piece if other else nothing for piece, other in zip(pieces, others, strict=True)],
        [own.shape if other else (0,) for other in others],
    )
    total = ordered_sum([piece if other else own for piece, other in zip(received, others, strict=True)])
    gathered = peers.exchange(
        [total if other else nothing for other in others],
        [piece.shape if other else (0,) for piece, other in zip(pieces, others, strict=True)],
    )
    return torch.cat([piece if other else total for piece, other in zip(gathered, others, strict=True)]).view(x.shape)


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


META = torch.device("meta")


def with_width(
    stage: Stage, encoder: nn.Module, clips: Sequence[VideoClip], tokens: Callable[[VideoClip], int]
) -> Stage:
    """The stage of an encoder with what ranks can divide of its weights, or why they can nothing.

    Counted for the shortest and the longest clip, by captions if it reads nothing else. One that reads frames stays as
    it is. ``encoder`` is on the meta device.
    """
    with META, torch.no_grad():
        captions = _reads_captions(encoder, clips[0])
        length: Callable[[VideoClip], int] = (lambda clip: clip.text_tokens) if captions else tokens
        few, many = min(clips, key=length), max(clips, key=length)
        chosen = (few,) if length(few) == length(many) else (few, many)
        loaded = [encoder.load(clip, META) for clip in chosen]  # type: ignore[operator]
        matrices = any(parameter.dim() > 1 for parameter in encoder.parameters())
        if loaded[0].dim() >= FRAMES or not loaded[0].numel() or not matrices:
            return stage
        try:
            cuts = cuts_of(encoder, loaded[0])
            if cuts.units < 2:
                raise NotDivisible("what its blocks view as heads has no common divisor")
            parts = [_part_of(encoder, cuts, x, length(clip)) for x, clip in zip(loaded, chosen, strict=True)]
        except Exception as refused:  # whatever an encoder's own code does with a part, it still runs whole
            return replace(stage, attrs=stage.attrs.updated(tensor_whole=_reason(refused)))
    weights = dict(encoder.named_parameters())
    symbol = "T" if captions else "S"
    split = sum(weights[name].numel() * weights[name].itemsize for name in cuts.dims)
    attrs = stage.attrs.updated(
        tensor_split=Quantity(split / GIB, "GiB"),
        tensor_units=cuts.units,
        undivided=round(max(part.undivided for part in parts), 6),
        held=per_token([(part.tokens, part.held) for part in parts], symbol),
        halo=per_token([(part.tokens, part.bytes) for part in parts], symbol),
        exchanges=max(part.exchanges for part in parts),
    )
    return replace(stage, attrs=attrs)


def _reads_captions(encoder: nn.Module, clip: VideoClip) -> bool:
    """Whether what it loads has the same shape for a longer clip with the same caption."""
    shapes = (encoder.load(one, META).shape for one in (clip, replace(clip, frames=clip.frames + 8)))  # type: ignore[operator]
    return bool(next(shapes) == next(shapes))


def _reason(refused: Exception) -> str:
    if isinstance(refused, NotDivisible):
        return refused.reason
    return f"with a part of its weights it raised {' '.join(f'{type(refused).__name__}: {refused}'.split())}"[:200]


def _part_of(encoder: nn.Module, cuts: WeightCuts, loaded: torch.Tensor, tokens: int) -> Part:
    """What the rank does that has most, of as many as are thought of."""
    ranks = min(RANKS, cuts.units)
    alone, shared, peers = Counts(), Counts(), Counted(ranks - 1)
    with alone.bytes, alone.flops:
        encoder(loaded)
    parts = cuts.parts(dict(encoder.named_parameters()), ranks, ranks - 1)
    with shared.bytes, shared.flops:
        encode_with_parts(encoder, parts, loaded, peers, ranks)
    work = shared.flops.total, alone.flops.total
    return Part(tokens, cuts.units, ranks, *work, shared.bytes.peak, alone.bytes.peak, peers.bytes, peers.calls)
