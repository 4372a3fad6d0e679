"""The gradients of shards: all-reduced between cells once a step, put together where they are asked for as a whole.

It stands in the place of ``GradientSynchronisation``. Inside a cell the backwards have summed them already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.uses import bucket_of
from arachnec.ir.nodes import Instruction
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.model_state.cells.flat_layer import FlatLayer
from arachnec.model_state.cells.gathering import Gathering
from arachnec.model_state.gradients import SMALLEST_PIECE, GradientSynchronisation, Piece, pieces_of
from arachnec.model_state.kept_gradients import drop_gradients, set_gradient
from arachnec.runtime.collectives import gathered_on_first


@dataclass(frozen=True)
class StageCells:
    """A stage on one of its ``ranks``. ``cell`` are the collectives of its cell on the device, ``hosts`` those of the
    hosts of all its ranks; None of a stage on one rank."""

    ranks: tuple[int, ...]
    flats: tuple[FlatLayer, ...]
    gathering: Gathering
    cell: dist.ProcessGroup | None  # None: a rank alone, whose layers lie in its host's memory
    hosts: dist.ProcessGroup | None

    @property
    def trained(self) -> list[FlatLayer]:
        return [flat for flat in self.flats if flat.layout.trained]


@dataclass(frozen=True)
class ShardGradients:
    """Of one iteration on one rank: of its ``stages`` by name, and of parameters that are ``whole`` on it."""

    stages: Mapping[str, StageCells]
    groups: ProcessGroups
    whole: GradientSynchronisation
    piece_bytes: int = SMALLEST_PIECE
    goes_on: bool = False  # from the iteration before, whose gradients no update has used
    _started: list[Instruction] = field(default_factory=list, repr=False, compare=False)
    _pending: list[_Started] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.goes_on:
            return
        self._drop_shards()
        for flat in self._trained:
            flat.used.clear()

    @property
    def parts(self) -> dict[str, Tensor]:
        """None apart from the pieces' own."""
        return {}

    @property
    def _trained(self) -> list[FlatLayer]:
        return [flat for stage in self.stages.values() for flat in stage.trained]

    def start(self, reduce: Instruction) -> None:
        """Start to sum shards over the ranks that hold them; a shard that no backward reached is zero."""
        if "tied" in reduce.attrs:
            self.whole.start(reduce)
            return
        if any(reduce is other for other in self._started):
            return
        self._started.append(reduce)
        stage, flats = self.stages[reduce.target], self._members(reduce)
        used = torch.tensor([n in flat.used for flat, n in _names(flats)], dtype=torch.int32)
        told = None if stage.hosts is None else dist.all_reduce(used, group=stage.hosts, async_op=True)
        for flat in flats:
            if flat.gradient is None and flat.host is not None:
                flat.gradient = flat.host.make_gradient(flat.layout.shard_size, flat.gradient_dtype).zero_()
            elif flat.gradient is None:
                flat.gradient = torch.zeros(flat.layout.shard_size, dtype=flat.gradient_dtype, device=flat.shard.device)
        group = self.groups.get(reduce.peers)
        for flat in flats:
            if flat.host is not None and group is not None:
                _all_reduce_from_host(flat, group)
        here = [(flat.shard, flat.gradient) for flat in flats if flat.host is None and group is not None]
        shards = [_with_gradient(shard, gradient) for shard, gradient in here if gradient is not None]
        sent = [] if group is None else [Piece.sent(run, group) for run in pieces_of(shards, self.piece_bytes)]
        self._pending.append(_Started(flats, shards, sent, used, told))

    def _members(self, reduce: Instruction) -> list[FlatLayer]:
        """The flat tensors of the bucket."""
        stage, bucket = self.stages[reduce.target], bucket_of(reduce)
        if bucket is None:
            return stage.trained
        layers, rest = set(bucket[0]), bucket[1]
        last = len(stage.gathering.modules)
        return [f for f in stage.trained if (rest if f.layout.layer == last else f.layout.layer in layers)]

    @contextmanager
    def inside_backward(self, reduces: Sequence[Instruction]) -> Iterator[None]:
        """Run a backward inside, the last of its stage: each sum starts once all of its layers are reduce-scattered."""
        missing = [{flat.layout.layer for flat in self._members(reduce)} for reduce in reduces]
        begun = 0

        def scattered(layer: int) -> None:
            nonlocal begun
            for layers in missing:
                layers.discard(layer)
            while begun < len(reduces) and not missing[begun]:
                self.start(reduces[begun])
                begun += 1

        with ExitStack() as stack:
            if reduces:
                stack.enter_context(self.stages[reduces[0].target].gathering.telling(scattered))
            yield

    def start_behind(self, reduces: Sequence[Instruction], make: Callable[[Collection[int]], None]) -> None:
        """Of a stage that lies in no cells."""
        self.whole.start_behind(reduces, make)

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.whole.done and all(started.done for started in self._pending)

    def wait(self) -> None:
        """Wait for the all-reduces, and give every piece its gradient, or None where no rank had one."""
        self.whole.wait()
        for started in self._pending:
            started.finish()
        self._pending.clear()

    def complete(self) -> dict[str, Tensor]:
        """On the first rank of each stage its parameters' whole gradients, zeros where none was. Collective.

        One flat tensor after another is put together, on the hosts, from the shards of the first cell.
        """
        gradients = self.whole.complete()
        for stage in self.stages.values():
            for flat in stage.trained:
                assert flat.gradient is not None, "gradients are complete once they were waited for"
                whole = gathered_on_first(flat.gradient, stage.ranks[: flat.layout.ranks])
                for slot in flat.layout.slots if whole is not None else ():
                    assert whole is not None
                    gradients[slot.name] = whole[slot.first : slot.first + slot.size].view(slot.shape).clone()
        return gradients

    def drop(self) -> None:
        """Give the gradients' memory back."""
        self.whole.drop()
        self._drop_shards()

    def _drop_shards(self) -> None:
        for flat in self._trained:
            flat.gradient = None
            drop_gradients(flat.pieces)


@dataclass(frozen=True)
class _Started:
    """The shards of a bucket on their way, and how many ranks had a gradient of each parameter."""

    flats: Sequence[FlatLayer]
    shards: Sequence[nn.Parameter]
    sent: Sequence[Piece]
    used: Tensor
    told: dist.Work | None

    @property
    def done(self) -> bool:
        return (self.told is None or self.told.is_completed()) and all(piece.done for piece in self.sent)

    def finish(self) -> None:
        for sent in self.sent:
            sent.finish()
        for flat, shard in zip((flat for flat in self.flats if flat.host is None), self.shards, strict=False):
            flat.gradient = shard.grad
        for flat in self.flats:
            if flat.host is not None:  # the optimizer runs there
                flat.host.arrive()
        if self.told is not None:
            self.told.wait()
        counts = iter(self.used.tolist())
        for flat in self.flats:
            flat.used = {slot.name for slot in flat.layout.slots if next(counts)}
            for piece in flat.layout.pieces(flat.member):
                value = flat.pieces[piece.slot.name]
                if piece.slot.name in flat.used and flat.gradient is not None:
                    set_gradient(value, flat.gradient[piece.place : piece.place + piece.size])


def _names(flats: Sequence[FlatLayer]) -> list[tuple[FlatLayer, str]]:
    return [(flat, slot.name) for flat in flats for slot in flat.layout.slots]


def _all_reduce_from_host(flat: FlatLayer, group: dist.ProcessGroup) -> None:
    """Sum a gradient that lies in the hosts: through the device, one flat tensor after another."""
    assert flat.host is not None and flat.gradient is not None
    gradient = torch.empty(flat.layout.shard_size, dtype=flat.gradient_dtype, device=flat.whole.device)
    flat.host.bring_gradient(gradient, flat.gradient)
    value = _with_gradient(torch.empty(gradient.numel(), dtype=flat.layout.dtype, device=gradient.device), gradient)
    Piece.sent([value], group).finish()
    assert value.grad is not None
    flat.gradient = flat.host.take_gradient(value.grad)


def _with_gradient(values: Tensor, gradient: Tensor) -> nn.Parameter:
    """These with their gradient, as code that all-reduces gradients of parameters takes them."""
    parameter = nn.Parameter(values)
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient
    return parameter
