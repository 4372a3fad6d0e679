"""Stage attributes of a model without one graph for all shapes. In: runs of the whole model. Out: a ``Stage``.

The model runs at several sizes, on the meta device if it can, and polynomials in B, S and T are laid through what was
counted: exact at these sizes, and between them as good as the polynomial.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.ir.nodes import Stage
from arachnec.ir.state_placement import place
from arachnec.ir.values import Attributes, Formula, Quantity
from arachnec.tracing.captured import CapturedModel
from arachnec.tracing.cost import GIB, TERA, batch_bytes, dtype_of, layers_in_order, polynomial
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.errors import random_operation_error, writes_state_error
from arachnec.tracing.export import is_seeded
from arachnec.tracing.graph import dtype_name
from arachnec.tracing.layers import tensor_sizes
from arachnec.tracing.memory import closest
from arachnec.tracing.record import ExampleCall, flatten_call, is_meta, training_mode
from arachnec.tracing.shell import CountedAttention, PeakBytes, TotalFlops

ONE = sympy.Integer(1)
LINEAR = (B * S, B * T, B, ONE)
CLOSE = 0.02  # of what was counted
QUADRATIC = (B * S**2, B * S * T, B * T**2, *LINEAR)


@dataclass(frozen=True)
class Run:
    """What one forward of the whole model comes to; bytes that autograd keeps do not count parameters."""

    flops: int
    outside: int  # bytes kept of what lies outside the blocks
    blocks: tuple[int, ...]  # bytes kept of each call of a block
    inputs: tuple[int, ...]  # bytes of what each call is given by other blocks
    workspace: int
    attentions: tuple[tuple[int, int], ...]  # heads and bytes of query, key, value and output
    hidden: int


def measured_stage(
    name: str, model: nn.Module, captured: CapturedModel, calls: Sequence[ExampleCall], *, source: str
) -> Stage:
    """The transformer, from running it. Raises ``UserError`` for blocks that draw random numbers or write state."""
    paths = [call.path for call in captured.calls]
    counter = _Counter(model, captured)
    refuse_state_and_chance(model, paths, calls[0])
    runs = [counter.run(call) for call in calls]
    points = [{B: call.batch, S: counter.tokens[i], T: call.text} for i, call in enumerate(calls)]

    def gib(values: Sequence[float]) -> Formula:
        return polynomial(_fitted(values, points), "GiB", GIB)

    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    recomputing = [max(run.blocks, default=0) for run in runs]
    attentions = runs[0].attentions
    stage = Stage(
        name,
        trained=True,
        attrs=Attributes.of(
            source=source,
            params=sum(p.numel() for p in parameters),
            trained=None if all(p.requires_grad for p in parameters) else trained,
            dtype=dtype_name(dtype_of(model)),
            layers=layers_in_order(model, captured),
            hidden=runs[0].hidden or None,
            heads=min((heads for heads, _ in attentions), default=None),
            attentions=len(attentions) or None,
            flops=polynomial(_fitted([run.flops for run in runs], points), "TFLOP", TERA),
            saved=gib([run.outside + sum(run.blocks) for run in runs]),
            saved_recompute=gib([r.outside + sum(r.inputs) + once for r, once in zip(runs, recomputing, strict=True)]),
            recomputing=gib(recomputing),
            shell=gib([run.outside for run in runs]),
            workspace=gib([run.workspace for run in runs]),
            batch=gib([batch_bytes(call) for call in calls]),
            traffic=gib([sum(size for _, size in run.attentions) for run in runs]) if attentions else None,
            state=Quantity(0.0, "GiB"),
            optimizer=Quantity(0.0, "GiB"),
            **tensor_sizes(model, tuple(dict.fromkeys(paths)), {}),
        ),
    )
    return place(stage)


def _fitted(values: Sequence[float], points: Sequence[dict[sympy.Symbol, int]]) -> sympy.Expr:
    """Linear in the tokens where that is close, else with their squares; what adds nothing is left out."""
    moved = {B, *(symbol for symbol in (S, T) if len({point[symbol] for point in points}) > 1)}
    for terms in (LINEAR, QUADRATIC):
        fitted = closest([term for term in terms if term.free_symbols <= moved], values, points)
        at = [float(fitted.subs(point)) for point in points]
        if all(abs(a - value) <= CLOSE * value for a, value in zip(at, values, strict=True)):
            break
    largest = max(points, key=lambda point: point[B] * point[S])
    parts = [part for part in sympy.Add.make_args(fitted) if float(part.subs(largest)) > 1e-9 * max(values)]
    return sympy.Add(*parts)


@dataclass
class _Counter:
    """Runs the model and keeps what each run counted; ``tokens`` is S of each."""

    model: nn.Module
    captured: CapturedModel
    tokens: list[int] = field(default_factory=list)

    def run(self, call: ExampleCall) -> Run:
        place, hidden = self.captured.tokens_at, [0]

        def seen(path: str, leaves: list[Any]) -> None:
            if path == place.path and len(self.tokens) == before:
                self.tokens.append(place.count(leaves, call.batch))
                hidden[0] = int(leaves[place.leaf].shape[-1]) if path else 0

        before = len(self.tokens)
        seen("", flatten_call(self.model, (), call.arguments)[0])
        alive = PeakBytes()
        with _running(self.model), torch.no_grad(), alive, CountedAttention(is_meta(self.model)):
            self.model(**call.arguments)
        blocks = _Blocks([c.path for c in self.captured.calls], seen)
        flops, attentions = TotalFlops(), CountedAttention(is_meta(self.model))
        own = {tensor.untyped_storage()._cdata for tensor in [*self.model.parameters(), *self.model.buffers()]}
        kept: dict[int, tuple[int, Tensor]] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage()._cdata, (blocks.current, tensor))
            return tensor

        with contextlib.ExitStack() as stack:
            keeping = saved_tensors_hooks(pack, lambda tensor: tensor)
            for context in (_running(self.model), blocks.watching(self.model), keeping, flops, attentions):
                stack.enter_context(context)
            output = self.model(**call.arguments)
        assert output is not None
        saved = [0] * (len(blocks.inputs) + 1)  # the last are of no block
        for key, (number, tensor) in kept.items():
            if key not in own:
                saved[number] += tensor.untyped_storage().nbytes()
        return Run(
            flops=flops.get_total_flops() + attentions.flops,
            outside=saved[-1],
            blocks=tuple(saved[:-1]),
            inputs=tuple(blocks.inputs),
            workspace=alive.peak,
            attentions=tuple(attentions.seen),
            hidden=hidden[0],
        )


@contextlib.contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    with training_mode(model), torch.device(next(model.parameters()).device):
        yield


@dataclass
class _Blocks:
    """Follows which block runs; ``current`` is -1 outside of all."""

    paths: Sequence[str]
    seen: Callable[[str, list[Any]], None]
    inputs: list[int] = field(default_factory=list)
    current: int = -1
    _made: list[Any] = field(default_factory=list)  # by blocks, kept so that no id is used twice

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path in dict.fromkeys(self.paths):
                block = model.get_submodule(path)
                stack.callback(block.register_forward_pre_hook(self._enter(path), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, path: str) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves, _ = flatten_call(block, args, kwargs)
            self.seen(path, leaves)
            outputs = {id(x) for x in self._made}
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            given = [x for x in tensors if id(x) in outputs] or (tensors[:1] if not self._made else [])
            self.current = len(self.inputs)
            self.inputs.append(sum(x.numel() * x.element_size() for x in given))

        return hook

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self.current = -1
        self._made += [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]


def refuse_state_and_chance(model: nn.Module, paths: Sequence[str], call: ExampleCall) -> None:
    """Raises ``UserError`` where a block draws random numbers, or leaves a buffer with other values."""
    blocks = _Blocks(paths, lambda path, leaves: None)
    drawn = _Drawn(blocks)
    buffers = {name: (value, value._version) for name, value in model.named_buffers()}
    with _running(model), torch.no_grad(), blocks.watching(model), drawn:
        model(**call.arguments)
    if drawn.name:
        raise random_operation_error("a block", drawn.name)
    for path in dict.fromkeys(paths):
        for name, (value, version) in buffers.items():
            if name.startswith(f"{path}.") and value._version != version:
                raise writes_state_error(f"`{path}`", name.removeprefix(f"{path}."))


@dataclass
class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    blocks: _Blocks
    name: str = ""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_seeded(func) and self.blocks.current >= 0:
            self.name = str(func)
        return func(*args, **(kwargs or {}))
