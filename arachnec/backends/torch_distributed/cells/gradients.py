"""The gradients of shards: summed between cells once a step, put together where they are asked for as a whole.

It stands in the place of ``GradientSynchronisation``. Inside a cell the backwards have summed them already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.kept_gradients import set_gradient
from arachnec.backends.torch_distributed.cells.flat_layer import FlatLayer
from arachnec.backends.torch_distributed.collectives import gathered_on_first
from arachnec.backends.torch_distributed.gradient_pieces import SMALLEST_PIECE, Piece, pieces_of
from arachnec.ir.nodes import Instruction
from arachnec.kernels.attention.process_groups import ProcessGroups


@dataclass
class ShardGradients:
    """Of one iteration on one rank. ``cell`` are the collectives of its cell on the device, ``hosts`` of all ranks'."""

    flats: Sequence[FlatLayer]
    cell: dist.ProcessGroup
    groups: ProcessGroups
    hosts: dist.ProcessGroup | None
    piece_bytes: int = SMALLEST_PIECE
    _sent: list[Piece] = field(default_factory=list)
    _shards: list[nn.Parameter] = field(default_factory=list)
    _told: dist.Work | None = None
    _used: Tensor | None = None  # how many ranks had a gradient of each parameter

    def __post_init__(self) -> None:
        for flat in self._trained:
            flat.gradient = None
            flat.used.clear()
            for piece in flat.pieces.values():
                set_gradient(piece, None)

    @property
    def parts(self) -> dict[str, Tensor]:
        """None apart from the pieces' own."""
        return {}

    @property
    def _trained(self) -> list[FlatLayer]:
        return [flat for flat in self.flats if flat.layout.trained]

    def start(self, reduce: Instruction) -> None:
        """Start to sum shards over the ranks that hold them; a shard that no backward reached is zero."""
        if self._told is not None:
            return
        names = [(flat, slot.name) for flat in self._trained for slot in flat.layout.slots]
        self._used = torch.tensor([name in flat.used for flat, name in names], dtype=torch.int32)
        self._told = dist.all_reduce(self._used, group=self.hosts, async_op=True)
        for flat in self._trained:
            if flat.gradient is None:
                flat.gradient = torch.zeros(flat.layout.shard_size, dtype=flat.gradient_dtype, device=flat.shard.device)
        group = self.groups.get(reduce.peers)
        if group is not None:
            self._shards = [_with_gradient(flat) for flat in self._trained]
            self._sent = [Piece.sent(run, group) for run in pieces_of(self._shards, self.piece_bytes)]

    @contextmanager
    def inside_backward(self, reduces: Sequence[Instruction]) -> Iterator[None]:
        """Nothing starts inside a backward: shards are few bytes between cells."""
        yield

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return (self._told is None or self._told.is_completed()) and all(piece.done for piece in self._sent)

    def wait(self) -> None:
        """Wait for the sums, and give every piece its gradient, or None where no rank had one."""
        for sent in self._sent:
            sent.finish()
        for flat, shard in zip(self._trained, self._shards, strict=False):
            flat.gradient = shard.grad
        self._sent, self._shards = [], []
        if self._told is None or self._used is None:
            return
        self._told.wait()
        counts = iter(self._used.tolist())
        for flat in self._trained:
            used = {slot.name for slot in flat.layout.slots if next(counts)}
            flat.used = used
            for piece in flat.layout.pieces(dist.get_rank(self.cell)):
                value = flat.pieces[piece.slot.name]
                if piece.slot.name in used and flat.gradient is not None:
                    set_gradient(value, flat.gradient[piece.place : piece.place + piece.size])

    def complete(self) -> dict[str, Tensor]:
        """On rank 0 every parameter's whole gradient, zeros where none was; nothing elsewhere. Collective.

        One flat tensor after another is put together, on the hosts, from the shards of the first cell.
        """
        gradients: dict[str, Tensor] = {}
        for flat in self._trained:
            assert flat.gradient is not None, "gradients are complete once they were waited for"
            whole = gathered_on_first(flat.gradient, flat.layout.ranks)
            for slot in flat.layout.slots if whole is not None else ():
                assert whole is not None
                gradients[slot.name] = whole[slot.first : slot.first + slot.size].view(slot.shape).clone()
        return gradients

    def drop(self) -> None:
        """Give the gradients' memory back."""
        for flat in self._trained:
            flat.gradient = None
            for piece in flat.pieces.values():
                set_gradient(piece, None)


def _with_gradient(flat: FlatLayer) -> nn.Parameter:
    """The shard with its gradient, as code that sums gradients of parameters takes it."""
    shard = nn.Parameter(flat.shard)
    if hasattr(shard, "grad_dtype"):
        shard.grad_dtype = flat.gradient_dtype
    shard.grad = flat.gradient
    return shard
