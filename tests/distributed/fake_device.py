"""A device that computes nothing: shapes, autograd, streams and collectives are there, values are not.

Tensors on it are fake tensors of a private-use back end, those of the host are real. So the executor takes the branches
that it takes on a GPU, and two things can be seen that no processor shows: which operations of a thread would wait for
the device, and how many bytes are allocated at most. Collectives go to torch's fake process group, in which one process
stands for a rank of many. ``register`` is for a process of its own: it names torch's private-use back end.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.kernels.attention import attention_block
from arachnec.kernels.attention.attention_backend import FLASH2

NAME = "faked"
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::item", "aten::tolist")


@dataclass
class Waits:
    """What made a thread wait for the device, by the thread's name and with the lines that did."""

    seen: list[tuple[str, str]] = field(default_factory=list)
    noting: bool = False

    def note(self, what: str) -> None:
        if self.noting:
            stack = "".join(traceback.format_stack(sys._getframe(2), limit=8))
            self.seen.append((threading.current_thread().name, f"{what}\n{stack}"))


@dataclass
class Memory:
    """Bytes of the device's storages that live; each is counted once, and until it is freed."""

    now: int = 0
    peak: int = 0
    _known: set[int] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)

    def add(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        with self._lock:
            if storage._cdata in self._known:
                return
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.now -= size


class Stream:
    """All that is queued has run at once; only waiting for it is noted."""

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None:
        DEVICE.waits.note("Stream.synchronize")


class Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        DEVICE.waits.note("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Module(backend_registration._DummyBackendModule):
    """What ``torch.get_device_module`` gives for the device."""

    Stream, Event = Stream, Event

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def synchronize(self, device: Any = None) -> None:
        DEVICE.waits.note("synchronize")

    def max_memory_allocated(self, device: Any = None) -> int:
        return DEVICE.memory.peak


class _Dispatch(TorchDispatchMode):
    """Runs what concerns the device on fake tensors, and notes what waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [value for value in _pytree.tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]
        target = kwargs.get("device")
        there = target is not None and torch.device(target).type == NAME
        name = func.name().partition(".")[0]
        if not there and not given:
            if name == "aten::_pin_memory":
                return args[0]
            return func(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
        if given and name in READS:
            DEVICE.waits.note(name)
            return _read(name, given[0])
        if _crosses(name, args, kwargs, given) and not kwargs.get("non_blocking", False):
            DEVICE.waits.note(f"{name}, blocking, between host and device")
        if name == "aten::_to_copy" and there and not given:
            return DEVICE.tensor(args[0].to(kwargs.get("dtype")))
        with _LOCK, DEVICE.mode:  # a mode counts who is inside, not by thread
            result = func(*args, **kwargs)
        for value in _pytree.tree_leaves(result):
            if isinstance(value, FakeTensor) and value.device.type == NAME:
                DEVICE.memory.add(value)
        return result


def _crosses(name: str, args: Any, kwargs: Mapping[str, Any], given: list[FakeTensor]) -> bool:
    if name == "aten::copy_":
        return len({value.device.type for value in args[:2]}) > 1 and not (len(args) > 2 and args[2])
    if name == "aten::_to_copy" and kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type != args[0].device.type
    return False


def _read(name: str, value: Tensor) -> Any:
    if name == "aten::_local_scalar_dense":
        return 1.0 if value.is_floating_point() else 1
    raise RuntimeError(f"{name} of a tensor on the device")


class _Mode(FakeTensorMode):
    """A tensor's device reads as ``meta`` inside a kernel: here in the thread that is inside, and in no other."""

    _inside = threading.local()

    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        return getattr(self._inside, "now", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        self._inside.now = inside


@dataclass
class FakeDevice:
    mode: FakeTensorMode = field(default_factory=lambda: _Mode(allow_non_fake_inputs=True))
    waits: Waits = field(default_factory=Waits)
    memory: Memory = field(default_factory=Memory)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def tensor(self, like: Tensor) -> FakeTensor:
        """A tensor of this shape on the device; may be called from any thread."""
        value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        fake = FakeTensor(self.mode, value, self.device)
        self.memory.add(fake)
        return fake

    def move(self, model: nn.Module) -> None:
        """A model's parameters and buffers, from wherever they are."""
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(self.tensor(value.detach()), value.requires_grad)
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = self.tensor(value)

    def used(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread can work with the device, and so can the backwards that it starts."""
        return _Dispatch()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Waits]:
        self.waits.noting = True
        try:
            yield self.waits
        finally:
            self.waits.noting = False


DEVICE: FakeDevice
_LOCK = threading.RLock()


class _FusedAttention(torch.autograd.Function):
    """Attention by a kernel that keeps its inputs, its output and the log-sum-exp, and no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = fused_forward(FLASH2, query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return fused_backward(FLASH2, grad, *ctx.saved_tensors[:3])


def fused_forward(backend: str, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    alike = query.shape[3] == value.shape[3]  # kernels lay their output out as the query
    out = torch.empty_like(query) if alike else query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def fused_backward(
    backend: str, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    out: Tensor = _FusedAttention.apply(query, key, value)
    return out


KERNELS = {"backend_for": lambda *_, **__: FLASH2, "fused_forward": fused_forward, "fused_backward": fused_backward}
LIBRARY = torch.library.Library("aten", "IMPL")


def _there_or(kernel: Any, plain: Any, *given: Any, **options: Any) -> Any:
    """The device's kernel for its tensors, the plain one for others."""
    there = any(isinstance(value, Tensor) and value.device.type == NAME for value in given)
    return (kernel if there else plain)(*given, **options)


@functools.cache
def register(rank: int, ranks: int) -> FakeDevice:
    """Make the device known to torch, and this process a rank of so many, once and for all."""
    global DEVICE
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    DEVICE = FakeDevice()
    FakeTensor.record_stream = lambda self, stream: None  # takes streams of torch's own classes only
    plain = {name: getattr(attention_block, name) for name in KERNELS}
    for name, kernel in KERNELS.items():
        setattr(attention_block, name, partial(_there_or, kernel, plain[name]))
    LIBRARY.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    dist.init_process_group(f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=rank, world_size=ranks)
    return DEVICE
