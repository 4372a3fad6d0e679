"""One process of a host compiles a kernel; the others wait, and read it from the cache.

Ranks come to the same kernels at the same time. Without this every one of them compiles every kernel.

A process holds a lock on a file, one for each kernel, while Triton compiles it, and no longer: a kernel that is loaded
or launched may wait for the device, and so for ranks that would wait for the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


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
