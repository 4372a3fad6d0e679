"""Recording. In: a model and an example call. Out: every call of its blocks, and which inputs are which outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from arachnec.models.argument_trees import flatten, register_dataclasses
from arachnec.models.compiled_modules import running_as_written
from arachnec.tracing.find import SettingsWatch, Unread, structure

RESHAPES = frozenset(
    {Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten, Tensor.unsqueeze, Tensor.squeeze}
    | {torch.reshape, torch.flatten, torch.unflatten, torch.unsqueeze, torch.squeeze}
)
PERMUTATIONS = frozenset(
    {Tensor.permute, Tensor.transpose, Tensor.movedim, Tensor.swapaxes, Tensor.swapdims, Tensor.mT.__get__}  # type: ignore[attr-defined]
    | {torch.permute, torch.transpose, torch.movedim, torch.swapaxes, torch.swapdims}
)
COPIES = frozenset({Tensor.contiguous, Tensor.clone, torch.clone})
TOKEN_VIEWS = RESHAPES | PERMUTATIONS | COPIES


# Reading these of a shard gives what the whole tensor would: they do not count as a use.
HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "is_cpu")
) | {torch.Tensor.is_floating_point, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_complex}


@dataclass(frozen=True)
class ExampleCall:
    """One forward of the model: its keyword arguments, and the sizes they were made for.

    ``clip`` is frames, height, width: calls with equal ``clip`` have equal token counts. ``text`` counts the caption.
    """

    arguments: Mapping[str, Any]
    clip: tuple[int, ...]
    batch: int
    text: int


@dataclass(frozen=True)
class BlockCall:
    """One call of one block, flattened. ``names`` are the leaves' names after the forward's own parameters."""

    path: str
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: pytree.TreeSpec
    outputs: tuple[Any, ...]
    output_spec: pytree.TreeSpec
    origins: tuple[tuple[int, int] | None, ...]  # per leaf: the call and output it is, where it is one
    rewritten: bool = False  # the block put a tensor that it does not return into something that it was given


@dataclass(frozen=True)
class Recording:
    """All block calls of one forward, in order; ``escapes`` are the outputs that something outside the blocks reads,
    ``handed`` those of which another block takes a view."""

    calls: tuple[BlockCall, ...]
    escapes: frozenset[tuple[int, int]]
    handed: frozenset[tuple[int, int]] = frozenset()


def flatten_call(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a call in the order of the forward's parameters, however the caller wrote it."""
    arguments = inspect.signature(block.forward).bind(*args, **kwargs).arguments
    return flatten(dict(arguments))


def unflatten_call(
    block: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Back to positional and keyword arguments."""
    bound = inspect.BoundArguments(inspect.signature(block.forward), pytree.tree_unflatten(leaves, spec))
    return bound.args, bound.kwargs


def leaf_names(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    arguments = dict(inspect.signature(block.forward).bind(*args, **kwargs).arguments)
    register_dataclasses(arguments)
    paths = [path for path, _ in pytree.tree_flatten_with_path(arguments)[0]]
    return tuple("_".join(map(_key_name, path)) for path in paths)


def _key_name(key: Any) -> str:
    return str(next(value for name in ("key", "idx", "name") if (value := getattr(key, name, None)) is not None))


def record(
    model: nn.Module, blocks: Mapping[str, nn.Module], call: ExampleCall, repeats: Repeats, *, grad: bool = False
) -> Recording:
    """Run ``model(**call.arguments)`` and record the calls of ``blocks`` (module path to module).

    ``grad`` keeps autograd on, to learn which inputs of the blocks need a gradient.
    """
    tape = _Tape()
    with contextlib.ExitStack() as stack:
        for path, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(tape.enter(path), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(tape.leave, with_kwargs=True).remove)
        stack.enter_context(training_mode(model))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(repeats)
        if is_meta(model):
            stack.enter_context(torch.device("meta"))
        stack.enter_context(tape)
        output = model(**call.arguments)
    tape.escapes |= tape.made_by_blocks(flatten(output)[0])
    return Recording(tuple(tape.calls), frozenset(tape.escapes), frozenset(tape.handed))


class Repeats:
    """On the meta device, where results are shapes alone, blocks of one structure need to run but once per input shape.

    Without ``unread`` settings the first forward runs all blocks that differ in any, and finds those that none reads.
    Within ``with repeats:`` the other runs return outputs like the first one's. On other devices nothing changes, but
    where ``values`` is set: there they return the first one's outputs themselves, and only its weights are read.
    Blocks with the same one of ``forwards`` are of one structure, and run it instead of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        unread: Unread | None = None,
        *,
        values: bool = False,
        forwards: Mapping[nn.Module, Callable[..., Any]] | None = None,
    ) -> None:
        self._forwards = forwards or {}
        self._members = tuple(blocks.values()) if values or is_meta(model) else ()
        self._watch = SettingsWatch(blocks) if self._members and unread is None else None
        self.blocks = self._kinds(unread or frozenset())
        self.seen: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}
        self._own: dict[nn.Module, Any] = {}  # forwards that a block was given for itself

    def _kinds(self, unread: Unread) -> dict[nn.Module, Any]:
        return {block: self._forwards.get(block) or structure(block, unread) for block in self._members}

    def __enter__(self) -> None:
        if self._watch:
            self._watch.__enter__()
        first: dict[Any, Any] = {}
        self._own = {block: block.__dict__["forward"] for block in self.blocks if "forward" in block.__dict__}
        for block, kind in self.blocks.items():
            forward = self._forwards.get(block, block.forward)
            block.__dict__["forward"] = self._once(first.setdefault(kind, forward), kind)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for block in self.blocks:
            del block.__dict__["forward"]
        for block, forward in self._own.items():
            block.__dict__["forward"] = forward
        if self._watch:
            self._watch.__exit__(None, None, None)
            if kind is None:
                self.blocks, self._watch = self._kinds(self._watch.unread), None

    def _once(self, forward: Any, kind: Any) -> Any:
        @functools.wraps(forward)
        def once(*args: Any, **kwargs: Any) -> Any:
            inputs, form = flatten((args, kwargs))
            key = kind, str(form), torch.is_grad_enabled(), tuple(_form(leaf) for leaf in inputs)
            if key not in self.seen:
                outputs, spec = flatten(forward(*args, **kwargs))
                places = {id(leaf): i for i, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
                self.seen[key] = [_Input(places[id(leaf)]) if id(leaf) in places else leaf for leaf in outputs], spec
                return pytree.tree_unflatten(outputs, spec)
            outputs, spec = self.seen[key]
            return pytree.tree_unflatten(
                [inputs[x.place] if isinstance(x, _Input) else _like(x) for x in outputs], spec
            )

        return once


@dataclass(frozen=True)
class _Input:
    """An output that is the block's own input of this place."""

    place: int


def form_of_call(arguments: Mapping[str, Any]) -> Hashable:
    """Equal for calls that differ in the numbers of their tensors alone."""
    leaves, spec = pytree.tree_flatten(dict(arguments))
    return str(spec), tuple(map(_form, leaves))


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    empty = partial(torch.empty_strided, leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return computed(empty) if leaf.requires_grad else empty()


def computed(make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` gives, as a result that needs a gradient: unlike a leaf it may be written in place."""
    output: Tensor = _Computed.apply(torch.zeros((), requires_grad=True), make)  # type: ignore[no-untyped-call]
    return output


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def run_once(model: nn.Module, call: ExampleCall) -> None:
    """The model's own forward, for what can be seen of it from outside."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(training_mode(model))
        stack.enter_context(torch.no_grad())
        if is_meta(model):
            stack.enter_context(torch.device("meta"))
        model(**call.arguments)


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """``train()`` without gradient checkpointing, which export would drop silently, and without ``torch.compile``;
    afterwards as before.

    On the meta device, which has no values, every place of a mask is taken to be set: a size is the most it can be.
    """
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    checkpointing = [module for module in modules if _attribute(module, "gradient_checkpointing") is True]
    if not all(training for _, training in modes):
        model.train()
    for module in checkpointing:
        module.__dict__["gradient_checkpointing"] = False
    try:
        all_set = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with all_set, running_as_written():
            yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
        for module in checkpointing:
            module.__dict__["gradient_checkpointing"] = True


def _attribute(module: nn.Module, name: str) -> Any:
    """None where it is no plain attribute; ``getattr`` searches parameters, buffers and modules first, and raises."""
    return module.__dict__.get(name, getattr(type(module), name, None))


def storage_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def is_meta(module: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in module.parameters())


@dataclass
class _Frame:
    path: str
    leaves: list[Any]
    names: tuple[str, ...]
    spec: pytree.TreeSpec
    origins: tuple[tuple[int, int] | None, ...]


@dataclass
class _Tape(TorchFunctionMode):
    """What the hooks write. ``owner`` maps a tensor's id to the output it is, ``views`` a view's; tensors are kept, so
    ids stay unique."""

    calls: list[BlockCall] = field(default_factory=list)
    escapes: set[tuple[int, int]] = field(default_factory=set)
    handed: set[tuple[int, int]] = field(default_factory=set)
    owner: dict[int, tuple[int, int]] = field(default_factory=dict)
    views: dict[int, tuple[Tensor, tuple[int, int]]] = field(default_factory=dict)
    open: list[_Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def enter(self, path: str) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch._C.DisableTorchFunction():
                leaves, spec = flatten_call(block, args, kwargs)
                names = leaf_names(block, args, kwargs)
            origins = tuple(self.owner.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves)
            self.handed |= {self.views[id(leaf)][1] for leaf in leaves if id(leaf) in self.views}
            self.open.append(_Frame(path, leaves, names, spec, origins))

        return hook

    def leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        frame = self.open.pop()
        outputs, spec = flatten(output)
        with torch._C.DisableTorchFunction():
            left, _ = flatten_call(block, args, kwargs)
        known = {id(leaf) for leaf in (*frame.leaves, *outputs)}
        rewritten = any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in left)
        index = len(self.calls)
        self.owner |= {id(leaf): (index, i) for i, leaf in enumerate(outputs) if isinstance(leaf, Tensor)}
        self.calls.append(
            BlockCall(
                frame.path, tuple(frame.leaves), frame.names, frame.spec, tuple(outputs), spec, frame.origins, rewritten
            )
        )

    def made_by_blocks(self, values: Sequence[Any]) -> set[tuple[int, int]]:
        """The outputs that these are, or are views of."""
        tensors = [x for x in values if isinstance(x, Tensor)]
        viewed = {self.views[id(x)][1] for x in tensors if id(x) in self.views}
        return viewed | {self.owner[id(x)] for x in tensors if id(x) in self.owner}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.open or func in HARMLESS:
            return func(*args, **kwargs)
        read = self.made_by_blocks(pytree.tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        if func in TOKEN_VIEWS and len(read) == 1:
            self.views[id(result)] = result, *read
        else:
            self.escapes |= read
        return result
