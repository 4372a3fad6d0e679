"""The environment that a rank runs in: what is set, to what, and why. A value that the user gives stays.

Ranks of a host come to the same kernels at the same time. One compiles a kernel; the others wait, and read it from the
cache. A process holds a lock on a file, one for each kernel, while Triton compiles it, and no longer: a kernel that is
loaded or launched may wait for the device, and so for ranks that would wait for the lock.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import tempfile
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from arachnec.cluster.device_selection import MASK

OF_RANKS = "ARACHNEC_GPUS_OF_RANKS"  # the mask that ranks get, where their launcher has another
UNMASKED = "all"
EVENTS_FD = "ARACHNEC_EVENTS_FD"  # where rank 0 writes what its launcher shows
ERROR_FD = "ARACHNEC_ERROR_FD"  # an open file of the launcher for a failure; it has no name: nothing is left of it
PLACE_FD = "ARACHNEC_PLACE_FD"  # an open file of the launcher, where the rank writes its places
CHECKED = "ARACHNEC_CHECKED"  # set where ranks are to wait for this key of the store, before they leave anything behind
AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's: whether the launcher keeps the store


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    reason: str
    instead: str = ""  # another name of the same, which a user may have set

    def given(self, environment: MutableMapping[str, str]) -> bool:
        return self.name in environment or (bool(self.instead) and self.instead in environment)


SETTINGS = (
    Setting(
        "CUDA_MODULE_LOADING",
        "EAGER",
        "the first launch of a lazily loaded kernel waits for the whole device, and so for a receive that is pending",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "streams that share one of the 8 default hardware queues wait for each other; compute, copies and "
        "communicators have one each",
    ),
    Setting(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        "clips of mixed length fragment fixed segments, and the retry that frees them waits for the whole device",
        "PYTORCH_ALLOC_CONF",
    ),
    Setting(
        "NCCL_RUNTIME_CONNECT",
        "0",
        "channels are connected when a communicator is made, not within a step at the first use of an algorithm",
    ),
    Setting(
        "TORCH_GLOO_LAZY_INIT",
        "1",
        "gloo connects ranks that talk, not all n^2 pairs",
    ),
    Setting(
        "MALLOC_MMAP_THRESHOLD_",
        str(2**20),
        "what large tensors leave goes back to the system: between small ones glibc would keep a fifth more",
        "MALLOC_TOP_PAD_",
    ),
    Setting(
        "MALLOC_TRIM_THRESHOLD_",
        str(2**30),
        "small tensors stay with the process: by default glibc gives back the end of its heap behind every backward, "
        "and the next forward asks for it page by page",
    ),
    Setting(
        "TRITON_CACHE_DIR",
        "{local}/triton",
        "a cache on the host's own disk: one in a home that hosts share is written by all of them at once",
    ),
    Setting(
        "TORCHINDUCTOR_CACHE_DIR",
        "{local}/inductor",
        "as for Triton",
    ),
)


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set what is not set yet. It counts before torch is imported."""
    for setting in SETTINGS:
        if not setting.given(environment):
            environment[setting.name] = setting.value.format(local=local_cache())


def leave_gpus_to_ranks(environment: MutableMapping[str, str]) -> None:
    """Hide the GPUs from this process and those that it starts, but for ranks. It counts before torch uses CUDA.

    ``torch.export`` makes a context wherever it sees a GPU, also for a model without values: half a GiB of the first
    GPU, and none of the process's forks can compute any more.
    """
    if OF_RANKS not in environment:
        environment[OF_RANKS] = environment.get(MASK, UNMASKED)
        environment[MASK] = ""


def show_gpus(environment: MutableMapping[str, str]) -> None:
    """What ``leave_gpus_to_ranks`` has hidden is there again, for processes that get this environment."""
    mask = environment.pop(OF_RANKS, None)
    if mask == UNMASKED:
        environment.pop(MASK, None)
    elif mask is not None:
        environment[MASK] = mask


@contextmanager
def shown_gpus(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, they can be counted."""
    hidden = OF_RANKS in environment
    show_gpus(environment)
    try:
        yield
    finally:
        if hidden:
            leave_gpus_to_ranks(environment)


def table() -> str:
    """The settings as the table of docs/running.md."""
    rows = [f"| `{s.name}` | `{s.value}` | {s.reason} |" for s in SETTINGS]
    return "\n".join(("| variable | value | why |", "|---|---|---|", *rows))


def local_cache() -> Path:
    """Where this user's processes of this host keep what they can make again."""
    return Path(tempfile.gettempdir()) / f"arachnec-{getpass.getuser()}"


@dataclass
class CompileLocks:
    """Locks in ``folder``, which the processes of a host share; ``before`` and ``after`` are hooks of Triton's."""

    folder: Path
    _held: dict[tuple[int, str], TextIO] = field(default_factory=dict)  # by thread and kernel

    def before(self, *, key: Any, fn: Any, **_: Any) -> bool:
        """Wait until no other process compiles this kernel. Triton compiles it, or finds it in its cache."""
        name = _name(key, fn)
        if (threading.get_ident(), name) not in self._held:  # a compilation that failed has left its lock
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / name).open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            self._held[threading.get_ident(), name] = file
        return False

    def after(self, *, key: Any, fn: Any, **_: Any) -> None:
        """The kernel is in the cache."""
        file = self._held.pop((threading.get_ident(), _name(key, fn)), None)
        if file is not None:
            file.close()


def compile_once(folder: Path) -> None:
    """Have kernels compiled by one process of the host at a time, where nobody else has hooked into Triton."""
    try:
        from triton import knobs
    except ImportError:
        return
    if knobs.runtime.jit_cache_hook is None and knobs.runtime.jit_post_compile_hook is None:
        locks = CompileLocks(folder)
        knobs.runtime.jit_cache_hook = locks.before
        knobs.runtime.jit_post_compile_hook = locks.after


def _name(key: Any, fn: Any) -> str:
    return hashlib.sha256(f"{fn.module}.{fn.name} {key!r}".encode()).hexdigest()
