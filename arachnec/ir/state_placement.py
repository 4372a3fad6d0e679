"""Bytes of a stage's state on a rank: parameters, gradients, optimizer state and buffers, by where they lie.

In: a stage, which says of what tensors it consists (``tensors``, ``outside``, ``unsharded``) and where these lie
(``cell``, ``sharded``, ``host``, ``gradients``). Out: the bytes on the rank that has most, the first of a cell. Shards
are cut, and the last one padded, as ``arachnec.model_state`` does. ``place`` writes the sums into ``state``,
``host_state`` and ``optimizer``. They follow from where things lie, and not from the order in which that was decided.

A stage without ``tensors``, written by hand, has sums alone: of these the parts are taken to be as large as the numbers
of parameters say.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby

from arachnec.ir.nodes import Stage, integer, integers
from arachnec.ir.stage_sizes import count_in, element_bytes, gib, gradient_element_bytes, trained_count
from arachnec.ir.values import Quantity, Value

GIB = 2**30
FP32 = 4  # bytes: masters and their gradients have at least so many
PREDICTOR_BYTES = 16  # of a parameter: itself, its gradient and AdamW's moments, all fp32


@dataclass(frozen=True)
class TensorSize:
    """One parameter. ``kept`` are the bytes of optimizer state for each element, ``kept_once`` those for the tensor."""

    precision: str
    elements: int
    trained: bool
    kept: int = 0
    kept_once: int = 0

    @property
    def element(self) -> int:
        bits = re.search(r"\d+", self.precision)
        return max(1, int(bits[0]) // 8) if bits else 1


@dataclass(frozen=True)
class Outside:
    """Parameters in no layer, or not in one alone. ``layer`` is that which gathers them, the last number for none;
    ``readers`` are the layers with which they are read. Where several ``parts`` of a model hold them, none shards
    them over a cell."""

    layer: int
    readers: tuple[int, ...]
    parts: tuple[int, ...]
    tensors: tuple[TensorSize, ...]


@dataclass(frozen=True)
class Bytes:
    """On one rank."""

    device: int = 0
    host: int = 0
    optimizer: int = 0  # of the optimizer, wherever it lies

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.optimizer + other.optimizer)

    def times(self, count: int) -> Bytes:
        return Bytes(self.device * count, self.host * count, self.optimizer * count)


@dataclass(frozen=True)
class _Placement:
    cell: int | None
    sharded: int
    exact: bool  # gradients of low precision are kept in fp32
    optimizer_in_host: bool
    layers_in_host: bool

    @classmethod
    def of(cls, stage: Stage) -> _Placement:
        return cls(
            _integer(stage, "cell"),
            _integer(stage, "sharded") or 1,
            stage.attrs.get("gradients") == "f32",
            _in_host(stage, "optimizer"),
            _in_host(stage, "parameters"),
        )

    def gradient(self, tensor: TensorSize) -> int:
        """Bytes of an element of its gradient."""
        return max(FP32, tensor.element) if self.exact else tensor.element

    def optimizer(self, tensor: TensorSize, held: int, *, whole: bool) -> Bytes:
        """Of the optimizer for ``held`` elements of a tensor on this rank: what it keeps, its master, and the gradient
        that it reads where that is no tensor of the model's. What is ``whole`` on the rank stays on the device."""
        own, master = math.ceil(held / self.sharded), max(FP32, tensor.element)
        if not tensor.trained or not own:
            return Bytes()
        if not self.optimizer_in_host or self.layers_in_host:
            copies = (master if tensor.element < master else 0) + (FP32 if self.gradient(tensor) < FP32 else 0)
            size = own * (tensor.kept + copies) + tensor.kept_once
            return Bytes(0, size, size) if self.layers_in_host and not whole else Bytes(size, 0, size)
        scattered = self.sharded > 1 and self.cell is None
        taken = max(FP32, self.gradient(tensor)) if scattered else self.gradient(tensor)
        moved = taken + (FP32 if taken < FP32 else 0) + (tensor.element if self.sharded == 1 else 0)
        size = own * (tensor.kept + master + moved) + tensor.kept_once
        return Bytes(0, size, size)

    def unsharded(self, tensors: Iterable[TensorSize]) -> Bytes:
        total = Bytes()
        for tensor in tensors:
            size = tensor.elements * (tensor.element + (self.gradient(tensor) if tensor.trained else 0))
            total += Bytes(size) + self.optimizer(tensor, tensor.elements, whole=True)
        return total

    def layer(self, tensors: tuple[TensorSize, ...]) -> Bytes:
        """Of one layer: on the first rank of a cell the first shard of each flat tensor."""
        if self.cell is None:
            return self.unsharded(tensors)
        total = Bytes()
        for own in flat_tensors(tensors):
            shard, first = math.ceil(sum(tensor.elements for tensor in own) / self.cell), 0
            size = shard * (own[0].element + (self.gradient(own[0]) if own[0].trained else 0))
            total += Bytes(0, size) if self.layers_in_host else Bytes(size)
            for tensor in own:
                if first < shard:
                    total += self.optimizer(tensor, min(tensor.elements, shard - first), whole=False)
                first += tensor.elements
        return total


def flat_tensors(tensors: Iterable[TensorSize]) -> list[list[TensorSize]]:
    """The tensors of a layer that are flattened into one: of one precision, all trained or all frozen."""
    flat: dict[tuple[str, bool], list[TensorSize]] = defaultdict(list)
    for tensor in tensors:
        flat[tensor.precision, tensor.trained].append(tensor)
    return list(flat.values())


def state_bytes(stage: Stage) -> Bytes | None:
    """What the stage's tensors take on the rank that holds most of them, predictors apart; None where it has none."""
    if "tensors" not in stage.attrs:
        return None
    placement = _Placement.of(stage)
    every = (placement.layer(tensors).times(count) for tensors, count in Counter(_layers(stage)).items())
    total = sum(every, Bytes(count_in(stage, "unsharded")))
    return total + placement.unsharded(tensor for group in outside_of(stage) if group.parts for tensor in group.tensors)


def _layers(stage: Stage) -> list[tuple[TensorSize, ...]]:
    """The tensors that every layer gathers; the last one's lie in no layer, or in several."""
    layers = [*layer_tensors(stage), ()]
    for group in outside_of(stage):
        if not group.parts:
            layers[group.layer] += group.tensors
    return layers


def place(stage: Stage, **placement: Value | None) -> Stage:
    """The stage with these attributes that say where its state lies, and with the sums that follow."""
    placed = replace(stage, attrs=stage.attrs.updated(**placement))
    sizes = state_bytes(placed)
    if sizes is None:
        return _by_sums(stage, placed)
    learned = predictor_gib(stage)
    whole = state_bytes(replace(placed, attrs=placed.attrs.updated(cell=None, sharded=None, host=None)))
    assert whole is not None
    elementwise = "optimizer" in stage.attrs
    return replace(
        placed,
        attrs=placed.attrs.updated(
            state=Quantity(sizes.device / GIB + learned, "GiB"),
            optimizer=Quantity(whole.optimizer / GIB, "GiB") if elementwise else None,
            host_state=Quantity(sizes.host / GIB, "GiB") if "host" in placed.attrs else None,
        ),
    )


def held_twice(stages: Iterable[Stage]) -> Bytes:
    """What the states of these stages, which lie on one rank, count more than once: of the parts of a model its buffers
    and the parameters that several of them hold."""
    seen: Counter[object] = Counter()
    total = Bytes()
    for stage in stages:
        whole = str(stage.attrs.get("part_of", stage.name))
        own: Counter[object] = Counter()
        sizes = {}
        for group in outside_of(stage):
            if group.parts:
                key = whole, group.parts, group.tensors
                own[key] += 1
                sizes[key] = _Placement.of(stage).unsharded(group.tensors)
        buffers = whole, "buffers"
        own[buffers] += 1
        sizes[buffers] = Bytes(count_in(stage, "unsharded"))
        for key, count in own.items():
            total += sizes[key].times(min(count, seen[key]))
        seen |= own
    return total


def inference_bytes(stage: Stage) -> float:
    """Of a model that trains nothing: parameters and buffers."""
    if "tensors" not in stage.attrs:
        return count_in(stage, "params") * element_bytes(stage)
    every = chain(*layer_tensors(stage), *(group.tensors for group in outside_of(stage)))
    return count_in(stage, "unsharded") + sum(tensor.elements * tensor.element for tensor in every)


def predictor_gib(stage: Stage) -> float:
    """GiB of the predictors of a stage, with their gradients and moments: on every rank that has the stage."""
    return PREDICTOR_BYTES * count_in(stage, "predictors") / GIB


def gathered_elements(stage: Stage) -> list[tuple[int, int]]:
    """Of every layer, the one outside all of them last, how many parameters are gathered, and how many train."""
    layers = _layers(stage)
    return [(sum(t.elements for t in own), sum(t.elements for t in own if t.trained)) for own in layers]


def gathered_bytes(stage: Stage) -> list[tuple[int, int]]:
    """Of every layer, the one outside all of them last, bytes of its parameters and of its gradients as they are while
    it is gathered, with the padding; empty where the stage does not list its tensors."""
    cell, placement = _integer(stage, "cell") or 1, _Placement.of(stage)
    sizes = []
    for tensors in _layers(stage) if "tensors" in stage.attrs else ():
        flat = flat_tensors(tensors)
        whole = [(math.ceil(sum(t.elements for t in own) / cell) * cell, own[0]) for own in flat]
        parameters = sum(size * first.element for size, first in whole)
        gradients = sum(size * placement.gradient(first) for size, first in whole if first.trained)
        sizes.append((parameters, gradients))
    return sizes


# -- the attributes ------------------------------------------------------------------------------------------------


def layer_tensors(stage: Stage) -> tuple[tuple[TensorSize, ...], ...]:
    """Of every layer what it alone consists of, in order."""
    return _parsed_layers(stage.attrs.get("tensors", ()), integers(stage.attrs.get("tensor_kinds", ())))


@lru_cache(maxsize=256)
def _parsed_layers(value: Value, kinds: tuple[int, ...]) -> tuple[tuple[TensorSize, ...], ...]:
    tensors: dict[int, tuple[TensorSize, ...]] = defaultdict(tuple)
    for row in value if isinstance(value, tuple) else ():
        assert isinstance(row, tuple)
        tensors[integer(row[0])] += _run(row[1:])
    return tuple(tensors[kind] for kind in kinds)


def outside_of(stage: Stage) -> tuple[Outside, ...]:
    return _parsed_outside(stage.attrs.get("outside", ()))


@lru_cache(maxsize=256)
def _parsed_outside(value: Value) -> tuple[Outside, ...]:
    groups: list[Outside] = []
    for row in value if isinstance(value, tuple) else ():
        assert isinstance(row, tuple)
        groups = joined(groups, Outside(integer(row[0]), integers(row[1]), integers(row[2]), _run(row[3:])))
    return tuple(groups)


def joined(groups: list[Outside], group: Outside) -> list[Outside]:
    """The groups with one more, which is part of the last where both are held and read alike."""
    if not groups or replace(groups[-1], tensors=group.tensors) != group:
        return [*groups, group]
    return [*groups[:-1], replace(group, tensors=(*groups[-1].tensors, *group.tensors))]


def _run(row: Sequence[Value]) -> tuple[TensorSize, ...]:
    precision, elements, count, trained, kept, kept_once = row
    tensor = TensorSize(str(precision), integer(elements), trained is True, integer(kept), integer(kept_once))
    return (tensor,) * integer(count)


def _rows(tensors: Iterable[TensorSize]) -> Iterator[tuple[Value, ...]]:
    """Runs of equal tensors: precision, elements, how many, whether they train, what the optimizer keeps."""
    for tensor, run in groupby(tensors):
        yield tensor.precision, tensor.elements, len(list(run)), tensor.trained, tensor.kept, tensor.kept_once


def tensor_attributes(layers: Iterable[tuple[TensorSize, ...]], outside: Iterable[Outside]) -> dict[str, Value | None]:
    """The attributes of a stage that say what its layers consist of, and what lies outside of them."""
    layers = tuple(layers)
    kinds = {tensors: number for number, tensors in enumerate(dict.fromkeys(layers))}
    return {
        "tensors": tuple((kind, *row) for tensors, kind in kinds.items() for row in _rows(tensors)),
        "tensor_kinds": tuple(kinds[tensors] for tensors in layers),
        "outside": tuple((g.layer, g.readers, g.parts, *row) for g in outside for row in _rows(g.tensors)) or None,
    }


def with_kept(stage: Stage, kept: int, kept_once: int, unsharded: int = 0) -> Stage:
    """The stage with an optimizer that keeps so many bytes for each element that trains, and for each tensor; and so
    many that lie on every rank."""

    def updated(tensors: Iterable[TensorSize]) -> tuple[TensorSize, ...]:
        return tuple(replace(t, kept=kept, kept_once=kept_once) if t.trained else t for t in tensors)

    layers = (updated(tensors) for tensors in layer_tensors(stage))
    outside = (replace(group, tensors=updated(group.tensors)) for group in outside_of(stage))
    attributes = tensor_attributes(layers, outside)
    return place(stage, **attributes, unsharded=count_in(stage, "unsharded") + unsharded or None)


# -- parts of a stage ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTensors:
    """What a part of a model holds of its parameters; ``params`` and ``trained`` count them."""

    layers: tuple[tuple[TensorSize, ...], ...]
    outside: tuple[Outside, ...]

    @property
    def every(self) -> Iterator[TensorSize]:
        return chain(*self.layers, *(group.tensors for group in self.outside))

    @property
    def params(self) -> int:
        return sum(tensor.elements for tensor in self.every)

    @property
    def trained(self) -> int:
        return sum(tensor.elements for tensor in self.every if tensor.trained)


def tensors_of_part(stage: Stage, bounds: Sequence[int], number: int) -> PartTensors | None:
    """Of the layers from ``bounds[number]`` to the next bound; what no layer reads goes with the first part. None where
    the stage does not list its tensors."""
    if "tensors" not in stage.attrs:
        return None
    begin, end = bounds[number], bounds[number + 1]

    def own(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(layer - begin for layer in numbers if begin <= layer < end)

    def part(layer: int) -> int:
        return sum(layer >= bound for bound in bounds[1:-1])

    outside = []
    for group in outside_of(stage):
        parts = tuple(dict.fromkeys(part(layer) for layer in group.readers)) or (0,)
        if number in parts:
            layer = group.layer - begin if begin <= group.layer < end else end - begin
            shared = parts if len(parts) > 1 else ()
            outside.append(replace(group, layer=layer, readers=own(group.readers), parts=shared))
    return PartTensors(layer_tensors(stage)[begin:end], tuple(outside))


# -- stages of sums ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """GiB of a stage that lies unsharded on a rank, its gradients in the parameters' precision: parameters, gradients
    and buffers, and the optimizer."""

    others: float
    optimizer: float

    @classmethod
    def of(cls, stage: Stage) -> Sums:
        """Of a stage wherever it lies now."""
        placement, larger, copy = _Placement.of(stage), *_exact(stage)
        optimizer = gib(stage.attrs.get("optimizer"))
        held = gib(stage.attrs.get("state")) + gib(stage.attrs.get("host_state")) - predictor_gib(stage)
        held -= _buffers(stage) if "host_state" in stage.attrs else 0.0
        cell = placement.cell or 1
        return cls(held * cell - optimizer / placement.sharded - larger, optimizer + copy)

    def place(self, stage: Stage) -> Stage:
        """The stage with ``state``, ``host_state`` and ``optimizer`` of these sums, as its other attributes say."""
        placement, larger, copy = _Placement.of(stage), *_exact(stage)
        cell, optimizer = placement.cell or 1, max(0.0, self.optimizer - copy)
        own, others = optimizer / placement.sharded / cell, (self.others + larger) / cell
        gone = own + (_figures(stage) / cell if placement.layers_in_host else 0.0) if "host" in stage.attrs else 0.0
        return replace(
            stage,
            attrs=stage.attrs.updated(
                state=Quantity(max(0.0, others + own - gone) + predictor_gib(stage), "GiB"),
                optimizer=Quantity(optimizer, "GiB") if "optimizer" in stage.attrs else None,
                host_state=Quantity(gone + _buffers(stage), "GiB") if "host" in stage.attrs else None,
            ),
        )


def _buffers(stage: Stage) -> float:
    """GiB in the host beside an optimizer whose parameters lie on the device: what comes and goes, and masters of
    parameters that need none on the device."""
    placement = _Placement.of(stage)
    if not placement.optimizer_in_host or placement.layers_in_host:
        return 0.0
    each = gradient_element_bytes(stage) + (element_bytes(stage) if placement.sharded == 1 else 0)
    each += element_bytes(stage) if element_bytes(stage) >= FP32 else 0
    return trained_count(stage) * each / placement.sharded / (placement.cell or 1) / GIB


def _by_sums(stage: Stage, placed: Stage) -> Stage:
    return Sums.of(stage).place(placed) if "state" in stage.attrs else placed


def _exact(stage: Stage) -> tuple[float, float]:
    """GiB that gradients in fp32 take more, and that the optimizer then spares: its own copy of them."""
    if stage.attrs.get("gradients") != "f32" or element_bytes(stage) >= FP32 or not stage.trained:
        return 0.0, 0.0
    trained = trained_count(stage) / GIB
    return trained * (FP32 - element_bytes(stage)), trained * FP32 if "optimizer" in stage.attrs else 0.0


def _figures(stage: Stage) -> float:
    """GiB of parameters and gradients by their numbers."""
    sizes = count_in(stage, "params") * element_bytes(stage), trained_count(stage) * gradient_element_bytes(stage)
    return sum(sizes) / GIB


def _in_host(stage: Stage, name: str) -> bool:
    listed = stage.attrs.get("host")
    return isinstance(listed, tuple) and name in listed


def _integer(stage: Stage, name: str) -> int | None:
    value = stage.attrs.get(name)
    return value if isinstance(value, int) else None
