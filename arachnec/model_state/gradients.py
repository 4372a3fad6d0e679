"""Gradient synchronisation: runs of a stage's gradients, all-reduced or reduce-scattered beside other work.

With an optimizer that is dealt out over the ranks they are reduce-scatters: a rank gets the parts that it updates.
An all-reduce is started and not waited for. Its buckets start in one order on every rank, in process groups of their
own, so that they never stand between two collectives of a cascade; nothing but the optimizer's step waits for them
(docs/check.md, "Gradient buckets beside the backward"). Nothing here makes the host wait for its device: who had a
gradient at all is told from host to host.

Gradients of fp32 are summed as they are. Those of lower precision travel as they are too, but are summed in fp32: each
rank is sent all ranks' parts of its share, adds them up, and sends the sum round. So a sum is rounded once, however
many ranks it is over, where a ring rounds once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.uses import bucket_of
from arachnec.cluster.topology import group_link
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cluster, Instruction, Module, integers
from arachnec.ir.stage_sizes import layers_of
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.model_state.kept_gradients import drop_gradients, gradient_dtype, gradient_of, gradients_of, set_gradient
from arachnec.model_state.parameter_parts import GatheredParts, Parts
from arachnec.runtime.collectives import all_gather_flat, start_reduce_scatter_flat
from arachnec.tracing.layers import layer_of_parameters

SMALLEST_PIECE, LARGEST_PIECE = 4 * 2**20, 256 * 2**20  # bytes
EXCHANGED = 2  # pieces of low precision under way at most: each takes its size once more
LATENCY_SHARE = 0.05  # of a piece's time, that may go into the latency of its messages


@dataclass
class Piece:
    """Gradients on their way in one flat tensor."""

    flat: Tensor
    group: dist.ProcessGroup
    work: dist.Work
    parts: Tensor | None  # of this rank's share, from all ranks; None where the all-reduce adds up, and when done

    @classmethod
    @torch.no_grad()
    def sent(cls, values: list[Tensor], group: dist.ProcessGroup) -> Piece:
        """Start the all-reduce of these parameters' gradients, which become views of the flat tensor."""
        gradients = [_gradient(value) for value in values]
        size = sum(gradient.numel() for gradient in gradients)
        exact = gradients[0].dtype.itemsize >= 4
        padding = 0 if exact else -size % dist.get_world_size(group)
        tail = [gradients[0].new_zeros(padding)] if padding else []
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), *tail])
        # The parts of the sum take the place of the gradients, which are not needed any more.
        for value, part in zip(values, torch.split(flat[:size], [value.numel() for value in values]), strict=True):
            set_gradient(value, part.view_as(value))
        if exact:
            return cls(flat, group, _work(dist.all_reduce(flat, group=group, async_op=True)), None)
        parts = torch.empty_like(flat)
        return cls(flat, group, _work(dist.all_to_all_single(parts, flat, group=group, async_op=True)), parts)

    @property
    def done(self) -> bool:
        return self.work.is_completed()

    @property
    def doubled(self) -> bool:
        """Whether what comes has memory beside what is sent."""
        return self.parts is not None

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Wait, on the current stream of a device that has streams; the gradients are whole then, and no parts."""
        self.work.wait()
        if self.parts is not None:
            share = self.parts.view(dist.get_world_size(self.group), -1).sum(0, dtype=torch.float32)
            all_gather_flat(self.flat, share.to(self.flat.dtype), self.group)
            self.parts = None
        return []


@dataclass
class ScatteredPiece:
    """Gradients on their way in one flat tensor, of whose sum every rank gets its parts only.

    Half the bytes of an all-reduce. Those of lower precision than fp32 are sent to the rank that they are for, which
    adds them up in fp32 and rounds nothing.
    """

    values: list[Tensor]
    cut: Parts
    rows: Tensor | None  # what is sent: alive until it has arrived
    work: dist.Work
    taken: Tensor  # this rank's row of the sum, or until then its row from every rank

    @classmethod
    @torch.no_grad()
    def sent(cls, values: list[Tensor], group: dist.ProcessGroup) -> ScatteredPiece:
        """Start the reduce-scatter of these parameters' gradients, which are given up."""
        cut = Parts.of(group)
        rows = cut.packed([_gradient(value) for value in values])
        for value in values:
            set_gradient(value, None)
        if rows.dtype.itemsize >= 4:
            taken = torch.empty_like(rows[0])
            return cls(values, cut, rows, start_reduce_scatter_flat(taken, rows.view(-1), group), taken)
        taken = torch.empty_like(rows)
        return cls(values, cut, rows, _work(dist.all_to_all_single(taken, rows, group=group, async_op=True)), taken)

    @property
    def done(self) -> bool:
        return self.work.is_completed()

    @property
    def doubled(self) -> bool:
        """Whether what comes has memory beside what is sent."""
        return self.taken.ndim > 1

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Wait, on the current stream of a device that has streams; this rank's part of every gradient, at least
        fp32."""
        self.work.wait()
        self.rows = None
        if self.taken.ndim > 1:
            self.taken = self.taken.sum(0, dtype=torch.float32)
        return self.cut.cut(self.taken, self.values)


def pieces_of(
    values: Iterable[Tensor], piece_bytes: int, dtype_of: Callable[[Tensor], torch.dtype] | None = None
) -> list[list[Tensor]]:
    """Runs of tensors of one precision and about so many bytes, the same on every rank.

    Without ``dtype_of`` the precision is that of the parameters' gradients.
    """
    dtype_of = dtype_of or gradient_dtype
    pieces: list[list[Tensor]] = []
    size = 0
    for value in values:
        if not pieces or size >= piece_bytes or dtype_of(pieces[-1][0]) != dtype_of(value):
            pieces.append([])
            size = 0
        pieces[-1].append(value)
        size += value.numel() * dtype_of(value).itemsize
    return pieces


def piece_size(cluster: Cluster | None, ranks: tuple[int, ...]) -> int:
    """Bytes of a piece, so that latency is a small part of its time on the slowest link between these ranks.

    A ring over n ranks sends 2 (n - 1) messages of 1/n of the piece each (Patarasuk and Yuan, 2009).
    """
    if cluster is None or len(ranks) < 2:
        return SMALLEST_PIECE
    link = group_link(cluster, ranks)
    bandwidth = link.inter if link.outside else link.intra
    wanted = len(ranks) * link.latency * 1e-6 * bandwidth * 1e9 / LATENCY_SHARE
    return int(min(max(wanted, SMALLEST_PIECE), LARGEST_PIECE))


def _gradient(value: Tensor) -> Tensor:
    gradient = gradient_of(value)
    return torch.zeros_like(value, dtype=gradient_dtype(value)) if gradient is None else gradient


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


@dataclass
class GradientSynchronisation:
    """The all-reduces of one iteration on one rank.

    ``parameters`` are those that train, by name; ``layers`` says for some of them which of the stage's layers holds
    them: all others belong to a bucket's ``rest``. About ``piece_bytes`` travel together. Over ``host_groups`` hosts
    tell each other who had a gradient at all; over ``groups`` where those carry the hosts' tensors, too. Where it is
    ``sharded``, gradients are given up for this rank's ``parts`` of their all-reduce, over all ranks of the run or of
    ``place``, which holds the rank's stages. ``of_stages`` are the parameters of each stage with their layers, which
    then take the place of ``layers``; without it all are one stage's.
    """

    parameters: Mapping[str, Tensor]
    layers: Mapping[str, int | None]
    groups: ProcessGroups
    piece_bytes: int = SMALLEST_PIECE
    host_groups: ProcessGroups | None = None
    sharded: bool = False
    parts: dict[str, Tensor] = field(default_factory=dict)  # by name; none of a gradient that no rank had
    of_stages: Mapping[str, Mapping[str, int | None]] | None = None
    tied: Mapping[tuple[int, ...], Collection[str]] = field(default_factory=dict)  # those of several, by their numbers
    place: tuple[int, ...] | None = None  # None: all ranks of the run
    _started: list[Instruction] = field(default_factory=list)
    _pending: list[_Started] = field(default_factory=list)
    _sent: list[Piece | ScatteredPiece] = field(default_factory=list)  # the latest

    def start(self, reduce: Instruction) -> None:
        """Start an all-reduce with the gradients as they are, unless it was started before; zeros where none are."""
        if any(reduce is other for other in self._started):
            return
        self._started.append(reduce)
        group = self.groups.get(reduce.peers)
        if group is not None:
            hosts = (self.host_groups or self.groups).get(reduce.peers)
            members, whole = self._members(reduce), "tied" in reduce.attrs or not self.sharded
            assert whole or dist.get_world_size(group) == self._cut.ranks
            used = torch.tensor([gradient_of(value) is not None for value in members.values()], dtype=torch.int32)
            pieces = [self._send(run, group, whole) for run in pieces_of(members.values(), self.piece_bytes)]
            told = dist.all_reduce(used, group=hosts, async_op=True)
            assert told is not None
            self._pending.append(_Started(members, pieces, used, told, self._cut if self.sharded and whole else None))

    def _send(self, values: list[Tensor], group: dist.ProcessGroup, whole: bool) -> Piece | ScatteredPiece:
        """Start a piece; behind too many that have memory twice, once the first of them is through."""
        doubled = [piece for piece in self._sent if piece.doubled]
        for piece in doubled[: max(0, len(doubled) - EXCHANGED + 1)]:
            piece.finish()
        started = (Piece if whole else ScatteredPiece).sent(values, group)
        self._sent = [*(piece for piece in doubled if piece.doubled), started]
        return started

    @contextmanager
    def inside_backward(self, reduces: Sequence[Instruction]) -> Iterator[None]:
        """Run a backward inside, the last of its stage: each all-reduce starts once it and those before it are whole.

        A gradient is whole when autograd has added it to the parameter, once in a backward however often the parameter
        was used. What this rank does not use never comes: such an all-reduce starts later, in its place in the program.
        """
        waiting = {name: place for place, reduce in enumerate(reduces) for name in self._members(reduce)}
        missing = [0] * len(reduces)
        for place in waiting.values():
            missing[place] += 1
        begun = 0

        def arrived(name: str, _: Tensor) -> None:
            nonlocal begun
            place = waiting[name]
            if place < begun:
                raise user_error(
                    f"the gradient of `{name}` came twice in one backward, the second time after its all-reduce began",
                    help=(
                        "a backward inside the model's own backward does this, as reentrant checkpointing does: let "
                        "arachnec recompute instead, or compile without the pass `bucket`"
                    ),
                )
            missing[place] -= 1
            while begun < len(reduces) and missing[begun] <= 0:
                self.start(reduces[begun])
                begun += 1

        hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(partial(arrived, name))  # type: ignore[no-untyped-call]
            for name in waiting
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def start_behind(self, reduces: Sequence[Instruction], make: Callable[[Collection[int]], None]) -> None:
        """Start each all-reduce once ``make`` has added the last gradients of its parameters, given by their ids."""
        for reduce in reduces:
            make({id(value) for value in self._members(reduce).values()})
            self.start(reduce)

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(started.done for started in self._pending)

    def wait(self) -> None:
        """Wait for all that was started; the gradients are whole then, and None where no rank had one.

        On a device with streams its stream waits, and the host only for the other hosts.
        """
        for started in self._pending:
            self.parts |= started.finish()
        self._pending.clear()
        self._sent.clear()

    def complete(self) -> dict[str, Tensor]:
        """A copy of every parameter's gradient, made whole; zeros where nothing used the parameter.

        Where they are sharded they are put together on the hosts, by all ranks.
        """
        gradients = gradients_of(self.parameters)
        hosts = None if self.place is None else (self.host_groups or self.groups).get(self.place)
        for name in (name for name in self.parameters if name in self.parts):
            value = self.parameters[name]
            gradients[name] = torch.empty(value.shape, dtype=gradient_dtype(value))
            GatheredParts.started(self._cut, [gradients[name]], [self.parts[name].cpu()], hosts).wait()
        return gradients

    @property
    def _cut(self) -> Parts:
        return Parts.of() if self.place is None else Parts(len(self.place), self.place.index(dist.get_rank()))

    def drop(self) -> None:
        """Give the gradients' memory back, and that of this rank's parts."""
        drop_gradients(self.parameters)
        self.parts.clear()

    def _members(self, reduce: Instruction) -> dict[str, Tensor]:
        bucket = bucket_of(reduce)
        if "tied" in reduce.attrs:
            return {name: self.parameters[name] for name in self.tied[integers(reduce.attrs["tied"])]}
        known = self.layers if self.of_stages is None else self.of_stages[reduce.target]
        own = [name for name in self.parameters if self.of_stages is None or name in known]
        if bucket is None:
            return {name: self.parameters[name] for name in own}
        layers, rest = set(bucket[0]), bucket[1]
        places = ((name, known.get(name)) for name in own)
        return {n: self.parameters[n] for n, layer in places if (rest if layer is None else layer in layers)}


def layers_in(module: Module, model: nn.Module) -> dict[str, int | None]:
    """The layer of every parameter of the trained stage, where the module names its layers."""
    stage = next((stage for stage in module.stages if stage.trained), None)
    paths = [] if stage is None else [path for path, _ in layers_of(stage)]
    return layer_of_parameters(model, paths) if paths else {}


@dataclass(frozen=True)
class _Started:
    """Gradients on their way, and how many ranks had each of them."""

    values: Mapping[str, Tensor]
    pieces: Sequence[Piece | ScatteredPiece]
    used: Tensor  # on the host
    told: dist.Work
    cut: Parts | None = None  # of gradients that come whole where this rank wants its parts

    @property
    def done(self) -> bool:
        return self.told.is_completed() and all(piece.done for piece in self.pieces)

    def finish(self) -> dict[str, Tensor]:
        """This rank's parts by name, where they are scattered."""
        parts = [part for piece in self.pieces for part in piece.finish()]
        self.told.wait()
        used = self.used.tolist()
        for value, count in zip(self.values.values(), used, strict=True):
            if count == 0:
                set_gradient(value, None)
        if self.cut is not None:
            return self._own_parts(self.cut)
        if not parts:
            return {}
        return {name: part for name, part, count in zip(self.values, parts, used, strict=True) if count}

    def _own_parts(self, cut: Parts) -> dict[str, Tensor]:
        """Give up whole gradients for this rank's parts of them."""
        own: dict[str, Tensor] = {}
        for name, value in self.values.items():
            if (gradient := gradient_of(value)) is not None:
                own[name] = cut.own(gradient)
                set_gradient(value, None)
        return own
