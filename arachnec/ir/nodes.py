"""The nodes of the cascade IR. Frozen; a pass returns a new module.

Fields hold what a node *is*. Attributes hold what passes *decided* about it; ``arachnec.ir.tables`` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import cast

from arachnec.ir.diagnostic import Span as Span
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value


class Level(IntEnum):
    """How far a module has been lowered. Each level keeps what the earlier ones hold."""

    TRACED = 0
    PARTITIONED = 1
    COSTED = 2
    SCHEDULED = 3
    PLACED = 4
    LOWERED = 5

    @property
    def word(self) -> str:
        return self.name.lower()


class Phase(StrEnum):
    """What a cascade does with its stage."""

    ENCODE = "encode"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the weight-gradient half of a split backward
    TRAIN = "train"  # forward and backward together
    DENOISE = "denoise"  # a run of sampling steps
    DECODE = "decode"  # latents to video


NO_ATTRIBUTES = Attributes()


@dataclass(frozen=True)
class Cluster:
    """``cluster @pod { nodes = 2, gpus = 8, device = "h100-80g", memory = 80 GiB, intra = 450 GB/s, ... }``."""

    name: str
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)

    @cached_property
    def nodes(self) -> int:
        return integer(self.attrs["nodes"])

    @cached_property
    def gpus(self) -> int:
        """Devices per node."""
        return integer(self.attrs["gpus"])

    @cached_property
    def world(self) -> int:
        """Ranks in the cluster."""
        return self.nodes * self.gpus

    @property
    def memory(self) -> float:
        """GiB of one device."""
        return quantity(self.attrs["memory"])


@dataclass(frozen=True)
class Clip:
    """``clip 7 : 81 x 480 x 832 text 226 tokens 32760 { name = "a" }``; frames, height, width in pixels."""

    id: int
    frames: int
    height: int
    width: int
    text: int
    tokens: int
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Stage:
    """A part of the model that is placed as one unit: ``stage @dit trained { ... }``."""

    name: str
    trained: bool
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class TensorType:
    """``bf16[B, S, 1536]``; a dimension is a number or an expression over symbols."""

    dtype: str
    dims: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphInput:
    """``%hidden : f32[B, S, 1536]`` in a graph's parameter list."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class GraphOp:
    """``%3 = "aten.linear.default"(%hidden, %weight) : f32[B, S, 1536] { ... }``.

    ``operands`` are the names of the tensors it reads; every other argument is in ``attrs``.
    """

    name: str
    target: str
    operands: tuple[str, ...]
    type: TensorType | None
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Fused:
    """``fused @row_0 (%mul_0, %add_2) { schedule = "row", ... }``: operations of a graph that run as one region.

    ``ops`` are names of the graph's operations, in its order.
    """

    name: str
    ops: tuple[str, ...]
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Graph:
    """The graph of one block class, traced once with symbolic sizes, and its fused regions.

    ``graph @Block (inputs) -> (%9) { attributes } [ ops, fused regions ]``.
    """

    name: str
    inputs: tuple[GraphInput, ...]
    ops: tuple[GraphOp, ...]
    outputs: tuple[str, ...]
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)
    fused: tuple[Fused, ...] = ()


@dataclass(frozen=True)
class Cascade:
    """One stage applied to one micro-batch in one phase, the unit that is scheduled.

    ``%1 = train @dit clips [7] : 1 x 118800 text 256 (%0) { degree = 8, ... }``. ``inputs`` name the cascades whose
    outputs this one reads. The name stands without its ``%``.
    """

    name: str
    phase: Phase
    stage: str
    clips: tuple[int, ...]
    batch: int
    tokens: int
    text: int
    inputs: tuple[str, ...] = ()
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)

    @cached_property
    def degree(self) -> int:
        return integer(self.attrs["degree"])

    @cached_property
    def side(self) -> int:
        """Clips side by side."""
        return integer(self.attrs.get("side", 1))

    @property
    def unconditional(self) -> tuple[int, int] | None:
        """Ulysses and ring of a denoise's unconditional branch, where that has ranks of its own number."""
        ulysses, ring = integers(self.attrs.get("unconditional", (0, 0)))
        return (ulysses, ring) if ulysses else None

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """The ranks of each of its clips or branches side by side."""
        if (other := self.unconditional) is not None:
            return self.degree, other[0] * other[1]
        return (self.degree,) * self.side

    @cached_property
    def width(self) -> int:
        """How many ranks it takes: ``side`` x ``degree``, or those of both branches."""
        return sum(self.sides)

    @cached_property
    def even_width(self) -> int:
        """How many it would take if every side had as few ranks as the one that has fewest."""
        return self.side * min(self.sides)

    @property
    def start(self) -> float:
        """ms from the start of the iteration."""
        return quantity(self.attrs["start"])

    @property
    def end(self) -> float:
        """ms from the start of the iteration."""
        return quantity(self.attrs["end"])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return integers(self.attrs["ranks"])

    @property
    def round(self) -> int:
        """Before it, the rest of the requests is planned again so many times."""
        return integer(self.attrs.get("round", 0))

    @property
    def recomputes(self) -> bool:
        """Whether blocks of it run again in the backward; ``arachnec.ir.stage_sizes`` says how many."""
        return bool(self.attrs.get("recompute", False))

    def with_attrs(self, **values: Value | None) -> Cascade:
        return replace(self, attrs=self.attrs.updated(**values))


@dataclass(frozen=True)
class Reduce:
    """``reduce @dit (%1, %3) { ranks = [0..15] }``: the all-reduce of a stage's gradients from these cascades."""

    stage: str
    inputs: tuple[str, ...]
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Step:
    """``step @dit``: the optimizer's update of a stage."""

    stage: str
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Instruction:
    """One line of a rank's program.

    ``op`` is one of ``tables.INSTRUCTION``. ``target`` is the name of a cascade; of a stage for those of ``STAGE_OPS``.
    ``peers`` is the other end of a send or receive (``send %0 to 4``, ``receive %0 from 2``). For a collective it is
    the group, this rank included (``forward %1 on [0..2]``).
    """

    op: str
    target: str
    peers: tuple[int, ...] = ()
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


STAGE_OPS = ("gather", "reduce", "norm", "step", "learn", "replan")


@dataclass(frozen=True)
class Program:
    """``program rank 0 { state = 12 GiB } [ instructions ]``: everything one rank does in one iteration, in order."""

    rank: int
    instructions: tuple[Instruction, ...]
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Module:
    """One training iteration at one level."""

    name: str
    level: Level
    cluster: Cluster | None = None
    clips: tuple[Clip, ...] = ()
    stages: tuple[Stage, ...] = ()
    graphs: tuple[Graph, ...] = ()
    cascades: tuple[Cascade, ...] = ()
    reductions: tuple[Reduce, ...] = ()
    steps: tuple[Step, ...] = ()
    programs: tuple[Program, ...] = ()
    attrs: Attributes = NO_ATTRIBUTES
    span: Span | None = field(default=None, compare=False, repr=False)

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def with_attrs(self, **values: Value | None) -> Module:
        return replace(self, attrs=self.attrs.updated(**values))


def integer(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer attribute, got {value!r}")
    return value


def integers(value: Value) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"expected a list of integers, got {value!r}")
    if set(map(type, value)) <= {int}:
        return cast(tuple[int, ...], value)
    return tuple(integer(item) for item in value)


def quantity(value: Value) -> float:
    """The number of a quantity whose unit the verifier has already held to the table."""
    if not isinstance(value, Quantity):
        raise TypeError(f"expected a quantity, got {value!r}")
    return value.value


def formula(value: Value) -> Formula:
    """A plain quantity stands for a formula without variables."""
    if isinstance(value, Quantity):
        return Formula((Term(value.value),), value.unit)
    if not isinstance(value, Formula):
        raise TypeError(f"expected a formula, got {value!r}")
    return value
