"""Costs of encoders and of what lies outside the blocks, counted in runs on the meta device."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from arachnec.data.clip import VideoClip
from arachnec.models.encoders import tiles_called, tiling_vae
from arachnec.tracing.captured import CapturedModel
from arachnec.tracing.dataflow import units_of
from arachnec.tracing.memory import Flash
from arachnec.tracing.record import ExampleCall, computed, is_meta, training_mode


@dataclass
class CountedAttention(TorchFunctionMode):
    """Counts attention by its formula; a ``stub`` of it computes nothing, and keeps what a fused one keeps."""

    stub: bool
    flops: int = 0
    seen: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given: Mapping[str, Any] = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        q, k, v = given["query"], given["key"], given["value"]
        output: Tensor
        if self.stub:
            with torch._C.DisableTorchFunction():
                output = Flash.apply(q, k, v, given.get("attn_mask"))  # type: ignore[no-untyped-call]
        else:
            with _disable_current_modes():  # counted here, whatever kernel it is
                output = func(*args, **kwargs)
        self.flops += 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        size = sum(x.numel() * x.element_size() for x in (q, k, v, output))
        if q.shape[-2] == k.shape[-2]:  # as long as its queries: no attention over the caption
            self.seen.append((int(q.shape[-3]) if q.ndim > 3 else 1, size))
        return output


@dataclass(frozen=True)
class _OneModule:
    """In place of torch's tracker of modules: all that runs is in none in particular."""

    parents: frozenset[str] = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class TotalFlops(FlopCounterMode):
    """Counts inside; ``get_total_flops`` says how many.

    torch's counter also counts by module, with hooks that fail for a module that is given a view of a parameter while
    no gradients are computed, as of learned tokens that are expanded to the batch.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        tracker: Any = _OneModule()
        self.mod_tracker = tracker


@dataclass(frozen=True)
class Measured:
    """One run: floating-point operations, bytes kept for backward, and the most bytes alive at once.

    ``between`` has both, of what lies between the blocks, for every call of a block that it is computed with: a unit
    with the block before it, what has no unit behind it with the block that reads it.
    """

    flops: int
    saved: int
    peak: int
    output: int = 0
    flops_before: int = 0  # of them what comes before the first block
    saved_before: int = 0
    peak_after: int = 0  # the most bytes alive at once of those that are made behind the last block
    flops_after: int = 0  # what comes behind the last block
    saved_after: int = 0
    between: tuple[tuple[int, int], ...] = ()


def measure_shell(model: nn.Module, captured: CapturedModel, call: ExampleCall) -> Measured:
    """The forward of a model whose blocks return at once, on its device: its embeddings, tables and head."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def bytes_kept() -> int:
        return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)

    counter, alive, attentions = TotalFlops(), PeakBytes(), CountedAttention(is_meta(model))
    reached: list[tuple[int, int]] = []  # at every block
    done: list[tuple[int, int]] = []  # at the end of the last unit behind it

    def now() -> tuple[int, int]:
        return counter.get_total_flops() + attentions.flops, bytes_kept()

    def reach() -> None:
        reached.append(now())
        done.append(reached[-1])
        alive.begin()

    def end(*_: Any) -> None:
        if done:
            done[-1] = now()

    blocks = {path for block in captured.blocks for path in block.instances}
    with contextlib.ExitStack() as stack:
        for path, unit in units_of(model, blocks).items():
            if path not in blocks:
                stack.callback(unit.register_forward_hook(end).remove)
        stack.enter_context(training_mode(model))
        stack.enter_context(without_blocks(model, captured, call, reach))
        stack.enter_context(next(model.parameters()).device)
        stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(alive)
        stack.enter_context(counter)
        stack.enter_context(attentions)
        output = model(**call.arguments)
    assert output is not None
    flops, saved = now()
    first, last = (reached[0], reached[-1]) if reached else ((0, 0), (0, 0))
    return Measured(
        flops,
        saved,
        alive.peak,
        flops_before=first[0],
        saved_before=first[1],
        peak_after=alive.since,
        flops_after=flops - last[0],
        saved_after=saved - last[1],
        between=_between(reached, done),
    )


def _between(reached: Sequence[tuple[int, int]], done: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    sums = [(0, 0)] * len(reached)
    for layer, (start, middle, end) in enumerate(zip(reached, done, reached[1:], strict=False)):
        sums[layer] = _sum(sums[layer], _sum(middle, start, -1))
        sums[layer + 1] = _sum(end, middle, -1)
    return tuple(sums)


def _sum(a: tuple[int, int], b: tuple[int, int], sign: int = 1) -> tuple[int, int]:
    return a[0] + sign * b[0], a[1] + sign * b[1]


@contextlib.contextmanager
def without_blocks(
    model: nn.Module, captured: CapturedModel, call: ExampleCall, reached: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Every captured block replaced by one that returns zeros of the right shape; each call is ``reached`` first."""
    changed = []
    device = next(model.parameters()).device
    recorded = [(size.clip, size.batch, size.text) for size in captured.sizes]
    index = recorded.index((call.clip, call.batch, call.text))
    for block in captured.blocks:
        values = block.examples[index]
        shapes = [[int(dim.subs(values)) for dim in dims] for dims in block.output_dims]
        types = [node.meta["val"].dtype for node in block.exported.graph.output_node().args[0]]

        def forward(*args: Any, _block: Any = block, _shapes: Any = shapes, _types: Any = types, **kwargs: Any) -> Any:
            reached()
            empty = [partial(torch.zeros, s, dtype=t, device=device) for s, t in zip(_shapes, _types, strict=True)]
            outputs = [computed(make) for make in empty]
            return _block.unflatten(outputs)

        for path in block.instances:
            module = model.get_submodule(path)
            changed.append(module)
            module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def measure_encoder(encoder: nn.Module, clip: VideoClip) -> Measured:
    """One encoder on the meta device, for one clip. A tile of a size that was counted before counts as that one."""
    counter, alive, vae = TotalFlops(), PeakBytes(), tiling_vae(encoder)
    tiles: dict[torch.Size, _Tile] = {}
    repeated = 0

    def count(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal repeated
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):  # caches go along
            return run(*args, **kwargs)
        tile = tiles.get(args[0].shape)
        if tile is None:
            before = counter.get_total_flops()
            alive.begin()
            output = run(*args)
            tiles[args[0].shape] = _Tile(counter.get_total_flops() - before, alive.since, output)
            return output
        repeated += tile.flops
        alive.reach(tile.bytes)
        return pytree.tree_map_only(Tensor, torch.empty_like, tile.output)

    with torch.no_grad(), torch.device("meta"):
        loaded = encoder.load(clip, torch.device("meta"))  # type: ignore[operator]
        with alive, counter, contextlib.nullcontext() if vae is None else tiles_called(vae, count):
            output = encoder(loaded)
    return Measured(counter.get_total_flops() + repeated, 0, alive.peak, output.numel() * output.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class _Tile:
    """What a tile costs; ``bytes`` are the most that it adds to what is alive when it begins."""

    flops: int
    bytes: int
    output: Any


@dataclass
class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, less those whose last tensor is gone; ``peak`` is the most.

    ``since`` is by how much the sum was higher, at most, than when ``begin`` was called last.
    """

    peak: int = 0
    since: int = 0
    _now: int = 0
    _begun: int = 0
    _users: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self.since, self._begun = 0, self._now

    def reach(self, size: int) -> None:
        """As if so many bytes had been made and were gone again."""
        self.peak = max(self.peak, self._now + size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor, known)
        self.peak, self.since = max(self.peak, self._now), max(self.since, self._now - self._begun)
        return result

    def _hold(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, count = storage._cdata, storage.nbytes()
        if key not in self._users and key in known:
            return  # a view of something that was there before
        if key not in self._users:
            self._now += count
        self._users[key] = self._users.get(key, 0) + 1
        weakref.finalize(tensor, self._drop, key, count)

    def _drop(self, key: int, count: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._now -= count
