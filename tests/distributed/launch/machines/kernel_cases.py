"""A process that compiles one kernel for a GPU that is not there, and says when. Triton knows of no device here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from arachnec.launch.environment import compile_once


class Driver:
    """Of an H100, for compiling only."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def doubled(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at))


class Pointer:
    dtype = torch.float32

    @staticmethod
    def data_ptr() -> int:
        return 0


def main(locks: str, *, slowly: bool) -> None:
    driver.set_active(Driver())
    compile_once(Path(locks))
    compile = triton.compiler.compile

    def noted(*args: Any, **options: Any) -> Any:
        print("begins", time.monotonic(), flush=True)
        kernel = compile(*args, **options)
        time.sleep(1.0 if slowly else 0.0)
        print("ends", time.monotonic(), flush=True)
        return kernel

    triton.compiler.compile = noted  # what the hooks stand around
    doubled.warmup(Pointer(), Pointer(), N=16, grid=(1,))
    doubled.warmup(Pointer(), Pointer(), N=16, grid=(1,))


if __name__ == "__main__":
    main(sys.argv[1], slowly=sys.argv[2] == "slowly")
