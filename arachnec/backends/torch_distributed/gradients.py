"""The sums of a stage's gradients over the ranks that hold parts of them, beside whatever else the ranks do.

A sum is started and not waited for. Its buckets start in one order on every rank, in process groups of their own, so
that they never stand between two collectives of a cascade; nothing but the optimizer's step waits for them
(docs/check.md, "Gradient buckets beside the backward").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.uses import bucket_of
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Instruction, Module
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.tracing.layers import layer_of_parameters

CHUNK_BYTES = 25 * 2**20  # that travel together


@dataclass(frozen=True)
class LateGradient(Diagnostic):
    title: ClassVar[str] = (
        "the gradient of `{parameter}` came twice in one backward, the second time after its sum began"
    )
    help: ClassVar[str] = (
        "a backward inside the model's own backward does this, as reentrant checkpointing does: let arachnec recompute "
        "instead, or compile without the pass `bucket`"
    )
    parameter: str


@dataclass
class GradientSums:
    """The sums of one iteration on one rank.

    ``parameters`` are those that train, by name; ``layers`` says for some of them which of the stage's layers holds
    them: all others belong to a bucket's ``rest``.
    """

    parameters: Mapping[str, Tensor]
    layers: Mapping[str, int | None]
    groups: ProcessGroups
    _started: list[Instruction] = field(default_factory=list)
    _pending: list[_Chunk] = field(default_factory=list)

    def start(self, reduce: Instruction) -> None:
        """Start a sum with the gradients as they are, unless it was started before; zeros where there are none."""
        if any(reduce is other for other in self._started):
            return
        self._started.append(reduce)
        group = self.groups.get(reduce.peers)
        if group is not None:
            self._pending += [_Chunk.sent(values, group) for values in _chunks(self._members(reduce).values())]

    @contextmanager
    def inside_backward(self, reduces: Sequence[Instruction]) -> Iterator[None]:
        """Run a backward inside, the last of its stage: each sum starts once it and those before it have all they need.

        A gradient is whole when autograd has added it to the parameter, once in a backward however often the parameter
        was used. What this rank does not use never comes: such a sum starts later, in its place in the program.
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
                raise UserError(LateGradient(None, name))
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

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(chunk.work.is_completed() for chunk in self._pending)

    def wait(self) -> None:
        """Wait for all that was started; the gradients are whole then, and None where no rank had one."""
        for chunk in self._pending:
            chunk.finish()
        self._pending.clear()

    def _members(self, reduce: Instruction) -> dict[str, Tensor]:
        bucket = bucket_of(reduce)
        if bucket is None:
            return dict(self.parameters)
        layers, rest = set(bucket[0]), bucket[1]
        places = ((name, self.layers.get(name)) for name in self.parameters)
        return {n: self.parameters[n] for n, layer in places if (rest if layer is None else layer in layers)}


def layers_in(module: Module, model: nn.Module) -> dict[str, int | None]:
    """The layer of every parameter of the trained stage, where the module names its layers."""
    stage = next((stage for stage in module.stages if stage.trained), None)
    paths = [] if stage is None else [path for path, _ in layers_of(stage)]
    return layer_of_parameters(model, paths) if paths else {}


@dataclass(frozen=True)
class _Chunk:
    """Gradients on their way in one flat tensor, and behind them, for each, how many ranks had one."""

    values: list[Tensor]
    flat: Tensor
    work: dist.Work

    @classmethod
    @torch.no_grad()
    def sent(cls, values: list[Tensor], group: dist.ProcessGroup) -> _Chunk:
        gradients = [torch.zeros_like(v) if v.grad is None else v.grad for v in values]
        used = torch.tensor([v.grad is not None for v in values]).to(gradients[0])
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), used])
        # The parts of the sum take the place of the gradients, which are not needed any more.
        parts = torch.split(flat[: -len(values)], [value.numel() for value in values])
        for value, part in zip(values, parts, strict=True):
            value.grad = part.view_as(value)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return cls(values, flat, work)

    def finish(self) -> None:
        self.work.wait()
        for value, count in zip(self.values, self.flat[-len(self.values) :].tolist(), strict=True):
            if count == 0:
                value.grad = None


def _chunks(values: Iterable[Tensor]) -> list[list[Tensor]]:
    """Runs of parameters of one dtype of about ``CHUNK_BYTES``; the same on every rank."""
    chunks: list[list[Tensor]] = []
    size = 0
    for value in values:
        if not chunks or size >= CHUNK_BYTES or chunks[-1][0].dtype != value.dtype:
            chunks.append([])
            size = 0
        chunks[-1].append(value)
        size += value.numel() * value.element_size()
    return chunks
