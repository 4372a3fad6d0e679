"""What flows between the parts of a model. In: a model, its blocks, one call. Out: its units in order, what each reads.

A *unit* is a block, or a module outside the blocks that has parameters: an embedding, a head. A tensor that a unit made
is followed through everything that the model's own forward does with it between the units, by the storages that its
operations read and write. What has no parameters, such as a table of positions, is no unit: whoever needs it makes it
again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.tracing.record import storage_of, training_mode

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class CannotFollow(Diagnostic):
    title = "the model cannot be cut into stages: `{path}` {reason}"
    help = "train it as one stage: leave `stages` out"
    path: str
    reason: str


@dataclass(frozen=True, order=True)
class Output:
    """A tensor that a unit made: the number of the call, and the leaf of what it returned."""

    call: int
    leaf: int


Source: TypeAlias = Output | str  # a unit's tensor, or the name of a parameter that is read outside of all units
Sources: TypeAlias = frozenset[Source]


@dataclass(frozen=True)
class Form:
    """Shape and precision of a tensor, and whether the loss depends on trained parameters through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Given:
    """An output that is one of the call's own arguments: the position of that leaf."""

    leaf: int


@dataclass(frozen=True, eq=False)
class UnitCall:
    """One call of a unit. ``results`` has a leaf each of what it returned: a form, an argument, or a plain value."""

    path: str
    is_block: bool
    reads: Sources
    parameters: tuple[str, ...]
    results: tuple[Form | Given | Any, ...]
    spec: pytree.TreeSpec


@dataclass(frozen=True, eq=False)
class Dataflow:
    """The calls of all ``units``, by path, in the order of the forward, and what the prediction is made of."""

    calls: tuple[UnitCall, ...]
    prediction: Sources
    units: tuple[str, ...]

    def form(self, output: Output) -> Form:
        form = self.calls[output.call].results[output.leaf]
        assert isinstance(form, Form)
        return form


def units_of(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Path to unit: the blocks, and the outermost modules that hold none, have parameters and a forward."""
    known = frozenset(blocks)
    around = {path.rpartition(".")[0] for path in known}
    while more := {path.rpartition(".")[0] for path in around} - around:
        around |= more
    units: dict[str, nn.Module] = {}

    def walk(path: str, module: nn.Module) -> None:
        called = path and path not in around and type(module).forward is not nn.Module.forward
        if path in known or called:
            if module not in units.values() and any(True for _ in module.parameters()):
                units[path] = module
            return
        for name, child in module.named_children():
            walk(f"{path}.{name}" if path else name, child)

    walk("", model)
    return units


def record_dataflow(
    model: nn.Module,
    blocks: Iterable[str],
    arguments: Mapping[str, Any],
    prediction_of: Callable[[Any], Tensor],
    instead: AbstractContextManager[None] | None = None,
) -> Dataflow:
    """Run ``model(**arguments)`` on its own device, meta as well, and follow what its units make.

    ``prediction_of`` finds the prediction in what the model returns. Inside ``instead``, blocks may do less than
    theirs: ``Repeats``, ``without_blocks``. Raises ``UserError`` for a unit that others cannot stand in for.
    """
    blocks = frozenset(blocks)
    units = units_of(model, blocks)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owned = {path: tuple(names[id(p)] for p in unit.parameters()) for path, unit in units.items()}
    tape = _Tape({path: (path in blocks, owned[path]) for path in units})
    for name, parameter in model.named_parameters():
        tape.mark(parameter, {name})
    device = next(model.parameters()).device
    with contextlib.ExitStack() as stack:
        stack.enter_context(training_mode(model))
        if instead is not None:
            stack.enter_context(instead)
        stack.enter_context(replaced({path: (unit, tape.follow(path, unit)) for path, unit in units.items()}))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(device)
        stack.enter_context(tape)
        output = model(**arguments)
    return Dataflow(tuple(tape.calls), tape.sources([prediction_of(output)]), tuple(units))


@contextlib.contextmanager
def replaced(forwards: Mapping[str, tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, modules run these forwards in the place of theirs."""
    before = [(module, module.__dict__.get("forward")) for module, _ in forwards.values()]
    for module, forward in forwards.values():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


@dataclass
class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which units' tensors every storage was computed from; all tensors are kept, so that no storage comes twice."""

    units: Mapping[str, tuple[bool, tuple[str, ...]]]
    calls: list[UnitCall] = field(default_factory=list)
    _of: dict[int, set[Source]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _inside: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def mark(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        self._kept.append(tensor)
        self._of.setdefault(storage_of(tensor), set()).update(sources)

    def sources(self, tensors: Iterable[Any]) -> Sources:
        known = (self._of.get(storage_of(x), set()) for x in tensors if isinstance(x, Tensor))
        return frozenset(source for sources in known for source in sources)

    def follow(self, path: str, unit: nn.Module) -> Callable[..., Any]:
        forward = unit.forward

        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            if _reentrant():
                raise UserError(CannotFollow(None, path, "is checkpointed with `use_reentrant=True`, not `False`"))
            given = pytree.tree_leaves((args, kwargs))
            versions = [x._version for x in given if isinstance(x, Tensor)]
            reads = self.sources(given)
            self._inside = True
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = False
            if versions != [x._version for x in given if isinstance(x, Tensor)]:
                raise UserError(CannotFollow(None, path, "changes its input in place"))
            self._made(path, reads, given, output)
            return output

        return followed

    def _made(self, path: str, reads: Sources, given: list[Any], output: Any) -> None:
        leaves, spec = pytree.tree_flatten(output)
        places = {id(leaf): place for place, leaf in enumerate(given) if isinstance(leaf, Tensor)}
        results: list[Any] = []
        for number, leaf in enumerate(leaves):
            if id(leaf) in places:
                results.append(Given(places[id(leaf)]))
            elif isinstance(leaf, Tensor):
                results.append(Form(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
                self.mark(leaf, {Output(len(self.calls), number)})
            elif isinstance(leaf, PLAIN):
                results.append(leaf)
            else:
                raise UserError(CannotFollow(None, path, f"returns a {type(leaf).__name__}"))
        is_block, parameters = self.units[path]
        self.calls.append(UnitCall(path, is_block, reads, parameters, tuple(results), spec))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        given = pytree.tree_leaves((args, kwargs))
        sources = self.sources(given)
        written = pytree.tree_leaves(result) + (given if func._schema.is_mutable else [])
        for tensor in written:
            if isinstance(tensor, Tensor):
                self.mark(tensor, sources)
        return result


def _reentrant() -> bool:
    """Whether this runs inside reentrant checkpointing: what is made there is in no graph, and cannot be handed on."""
    frame = None if torch.is_grad_enabled() else inspect.currentframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True, eq=False)
class Cut:
    """``parts`` are the paths of each stage's blocks, in the order in which they run.

    A unit outside the blocks runs where the forward comes to it: with the block before it, or with the first. A tensor
    that several later stages need is sent from each stage to the next, so that a stage receives from its neighbours
    alone.
    """

    flow: Dataflow
    parts: tuple[tuple[str, ...], ...]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of every call. Raises ``UserError`` where the model comes back to the blocks of an earlier one."""
        of = {path: number for number, part in enumerate(self.parts) for path in part}
        stages, now = [], 0
        for call in self.flow.calls:
            if call.is_block:
                if of[call.path] < now:
                    raise UserError(CannotFollow(None, call.path, "is called again after blocks of a later stage"))
                now = of[call.path]
            stages.append(now)
        return tuple(stages)

    @cached_property
    def _needs(self) -> tuple[frozenset[Source], ...]:
        """What the units of every stage, and at the end the prediction, are computed from."""
        needs: list[set[Source]] = [set() for _ in self.parts]
        for call, stage in zip(self.flow.calls, self.stages, strict=True):
            needs[stage] |= call.reads
        needs[-1] |= self.flow.prediction
        return tuple(map(frozenset, needs))

    def handed_on(self, stage: int) -> tuple[Output, ...]:
        """What goes from a stage to the next one."""
        return self._handed_on[stage]

    @cached_property
    def _handed_on(self) -> tuple[tuple[Output, ...], ...]:
        handed: list[tuple[Output, ...]] = []
        for stage in range(len(self.parts)):
            later = frozenset().union(*self._needs[stage + 1 :])
            handed.append(tuple(sorted(x for x in later if isinstance(x, Output) and self.stages[x.call] <= stage)))
        return tuple(handed)

    @cached_property
    def parameters(self) -> tuple[frozenset[str], ...]:
        """The parameters that every stage computes with; those that nobody reads are the first one's."""
        owned: list[set[str]] = [{x for x in needs if isinstance(x, str)} for needs in self._needs]
        for call, stage in zip(self.flow.calls, self.stages, strict=True):
            owned[stage] |= set(call.parameters)
        return tuple(map(frozenset, owned))

    def bytes_on(self, stage: int) -> int:
        """Of what goes from a stage to the next one."""
        return sum(self.flow.form(output).bytes for output in self.handed_on(stage))

    def block_bytes_on(self, stage: int) -> int:
        """Of this, what blocks have made."""
        of_blocks = (output for output in self.handed_on(stage) if self.flow.calls[output.call].is_block)
        return sum(self.flow.form(output).bytes for output in of_blocks)


def single_blocks(layers: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Every block a stage of its own."""
    return tuple((layer,) for layer in layers)
