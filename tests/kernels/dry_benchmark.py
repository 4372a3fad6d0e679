"""Runs the kernel benchmark whole as on a GPU: Triton's interpreter, CPU tensors, a clock that stands still."""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

import speed
import torch

from tests.kernels.triton_interpreter import let_one_element_be_an_index


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return 0.5


def main() -> None:
    let_one_element_be_an_index()
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.is_available = lambda: True
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.Event = Event
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
    torch.cuda._sleep = lambda cycles: None
    torch.cuda.get_device_name = lambda: "no device"
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(L2_cache_size=64)
    torch.compile = lambda run, mode, dynamic: run
    speed.DEVICE = torch.device("cpu")
    speed.CHECKED = dict.fromkeys(speed.LAYOUTS, 12)
    speed.COPIED = 1 << 12
    speed.WARM_UP, speed.FEWEST, speed.MOST = 1, 1, 1
    speed.main()


if __name__ == "__main__":
    main()
