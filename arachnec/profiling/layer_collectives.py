"""What a layer's gather and reduce-scatter take in a cell of these ranks, alone and beside what the layers compute.

Copies of a model's block run one behind the other, forward and backward, as the layers of a cell do: gathered one
ahead, released, gathered again, their gradients put together and reduce-scattered. What they take longer than the same
copies with nothing to move is what compute beside the collectives was measured to take longer: the cores' time for
them, values that come cold, and what ranks wait for each other at every layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.cost.profile import GATHER, SCATTER, Collective
from arachnec.ir.nodes import Instruction
from arachnec.ir.values import Attributes
from arachnec.model_state.cells.flat_layer import FlatLayer, FlatLayout, layouts_of
from arachnec.model_state.cells.gathering import Gathering, Slots
from arachnec.model_state.kept_gradients import set_gradient

SMALL = 1024  # parameters of the layer that tells the latency
LAYERS = 4  # one behind the other
SIZES = ("small", "large")
PHASES = tuple(f"{op} {size}{how}" for size in SIZES for op in (GATHER, SCATTER) for how in ("", " overlapped"))
ALL = tuple(range(LAYERS))
FORWARD = Instruction("forward", "layers", (), Attributes.of(gather=ALL, release=ALL))
BACKWARD = Instruction("backward", "layers", (), Attributes.of(gather=ALL, release=ALL, scatter=ALL))


@dataclass(frozen=True)
class Call:
    """What a block was called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, block: nn.Module, run: Callable[[], object]) -> Call:
        """The first one of ``block`` while ``run`` goes on, its activations as leaves that train."""
        seen: list[Call] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(cls(*pytree.tree_map_only(Tensor, _leaf, (args, kwargs))))

        handle = block.register_forward_pre_hook(note, with_kwargs=True)
        try:
            run()
        finally:
            handle.remove()
        return seen[0]

    def of_block(self, block: nn.Module) -> list[Tensor]:
        """Everything that the block makes and that has a gradient."""
        leaves = pytree.tree_leaves(block(*self.args, **self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@dataclass(frozen=True)
class DealtLayers:
    """Layers of a cell; what of them is ``dealt`` out, by layer."""

    modules: Sequence[nn.Module]
    dealt: Mapping[int, Sequence[FlatLayer]]
    gathering: Gathering
    group: dist.ProcessGroup
    call: Call
    now: Callable[[], float]  # in seconds

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        whole: frozenset[str],
        group: dist.ProcessGroup,
        call: Call,
        now: Callable[[], float],
    ) -> DealtLayers:
        """With the parameters of ``modules`` taken over, but for those that are ``whole``."""
        named = {
            f"{number}.{name}": value
            for number, module in enumerate(modules)
            for name, value in module.named_parameters()
            if name not in whole
        }
        layers = {name: int(name.partition(".")[0]) for name in named}
        layouts = layouts_of(named, layers, dist.get_world_size(group))
        device = next(iter(named.values())).device
        slots = Slots.of([(layouts, len(modules))], device)
        dealt: dict[int, list[FlatLayer]] = {number: [] for number in range(len(modules))}
        for number, flats in dealt.items():
            own = [layout for layout in layouts if layout.layer == number]
            for layout, place in zip(own, slots.places(number, len(modules), own), strict=True):
                flats.append(_flat(named, layout, place, group))
        gathering = Gathering(dealt, dict(enumerate(modules)), group, slots)
        return cls(modules, dealt, gathering, group, call, now)

    def run(self) -> tuple[float, ...]:
        """ms of a gather alone, what a layer takes longer beside it, and both of a reduce-scatter. Collective."""
        gather, scatter = self._alone()
        moving, still = self._passes(moves=True), self._passes(moves=False)
        forward, backward = (
            _between(with_it - without, first)
            for with_it, without, first in (
                (moving[0], still[0], gather),
                (moving[1], still[1], gather + scatter),
            )
        )
        return gather, forward, scatter, max(0.0, backward - forward)

    def bytes_of(self, op: str) -> int:
        """Of a layer: what a gather makes whole, or what of its gradients is summed."""
        moved = self.dealt[0] if op == GATHER else [flat for flat in self.dealt[0] if flat.layout.trained]
        sizes = [flat.whole.dtype.itemsize if op == GATHER else flat.gradient_dtype.itemsize for flat in moved]
        return sum(flat.whole.numel() * size for flat, size in zip(moved, sizes, strict=True))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [value for module in self.modules for value in module.parameters()]

    def _alone(self) -> tuple[float, float]:
        """ms of a gather and a reduce-scatter of a layer with nothing beside it."""
        dist.barrier(self.group)
        flats = self.dealt[0]
        started = self.now()
        for work in [flat.gather(self.group) for flat in flats]:
            work.wait()
        middle = self.now()
        for scattering in [flat.scatter(self.group) for flat in flats]:
            if scattering is not None:
                scattering.finish()
        return (middle - started) * 1e3, (self.now() - middle) * 1e3

    def _passes(self, *, moves: bool) -> tuple[float, float]:
        """ms of a forward and a backward through all layers, which come and go if it ``moves``."""
        dist.barrier(self.group)
        started = self.now()
        with self.gathering.forward(FORWARD) if moves else nullcontext():
            outputs = [leaf for module in self.modules for leaf in self.call.of_block(module)]
        middle = self.now()
        gradients = [torch.ones_like(output) for output in outputs]
        with self.gathering.backward(BACKWARD, FORWARD.target) if moves else nullcontext():
            torch.autograd.backward(outputs, gradients)
        ended = self.now()
        for value in [*self._parameters, *pytree.tree_leaves((self.call.args, dict(self.call.kwargs)))]:
            if isinstance(value, Tensor):
                set_gradient(value, None)
        return (middle - started) * 1e3, (ended - middle) * 1e3


class _Beside(nn.Module):
    """A small layer that takes as long as a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        some = next(block.parameters())
        self.small = nn.Parameter(some.detach().new_zeros(SMALL))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs)


@dataclass(frozen=True)
class LayerCollectives:
    """A small layer, and one like the largest block of a model."""

    small: DealtLayers
    large: DealtLayers

    @classmethod
    def of(cls, block: nn.Module, call: Call, group: dist.ProcessGroup, now: Callable[[], float]) -> LayerCollectives:
        """``block`` is not touched. Collective."""
        copies = [copy.deepcopy(block) for _ in range(LAYERS)]
        shared = copy.deepcopy(block)
        beside = [_Beside(shared) for _ in range(LAYERS)]
        kept = frozenset(f"block.{name}" for name, _ in shared.named_parameters())
        return cls(
            DealtLayers.of(beside, kept, group, call, now), DealtLayers.of(copies, frozenset(), group, call, now)
        )

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES

    def run(self) -> tuple[float, ...]:
        """ms by ``phases``. Collective."""
        return (*self.small.run(), *self.large.run())

    def measurements(self, times: Mapping[str, float]) -> list[Collective]:
        """What the ms of each phase say."""
        return [
            Collective(
                op,
                len(dist.get_process_group_ranks(layers.group)),
                layers.bytes_of(op),
                times[f"{op} {size}"],
                times[f"{op} {size} overlapped"],
            )
            for size, layers in zip(SIZES, (self.small, self.large), strict=True)
            for op in (GATHER, SCATTER)
        ]


def largest_block(model: nn.Module, paths: Sequence[str]) -> nn.Module | None:
    """Of the blocks at these paths the one with the most that trains; None where none trains."""
    blocks = [model.get_submodule(path) for path in paths]
    sizes = [sum(value.numel() for value in block.parameters() if value.requires_grad) for block in blocks]
    return blocks[sizes.index(max(sizes))] if any(sizes) else None


def _between(longer: float, first: float) -> float:
    """ms for each layer but the first, whose collectives have nothing to hide behind."""
    return max(0.0, longer - first) / (LAYERS - 1)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _flat(named: Mapping[str, nn.Parameter], layout: FlatLayout, place: Tensor, group: dist.ProcessGroup) -> FlatLayer:
    """A layer's flat tensor with the values that its parameters have."""
    member, size = dist.get_rank(group), layout.shard_size
    own = {slot.name: named[slot.name] for slot in layout.slots}
    flat = torch.cat([value.detach().reshape(-1) for value in own.values()])
    flat = nn.functional.pad(flat, (0, size * layout.ranks - flat.numel()))
    return FlatLayer.of(layout, flat[member * size : (member + 1) * size].clone(), place, own, member)
