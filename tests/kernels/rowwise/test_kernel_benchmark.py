"""The checks of the kernel benchmark hold on this machine, and on its GPU where it has one."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]
LARGEST_ERROR = 2e-5


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_benchmark", ROOT / "benchmarks" / "kernels" / "speed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ["batch 1", "batch 4", "packed"])
def test_every_case_equals_its_eager_form_in_outputs_and_gradients(speed: ModuleType, layout: str) -> None:
    cases = list(speed.cases(64, 256, layout, torch.float32, torch.device("cpu")))
    assert len(cases) == 6
    for case in cases:
        assert max(speed.errors(case)) < LARGEST_ERROR, case.kernel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: Triton's kernels cannot run")
@pytest.mark.parametrize("layout", ["batch 1", "batch 4", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1536, 5120])
def test_on_a_gpu_every_kernel_is_that_of_float64_and_gives_the_same_bits_twice(
    speed: ModuleType, hidden: int, dtype: torch.dtype, layout: str
) -> None:
    for case in speed.cases(1560, hidden, layout, dtype, torch.device("cuda")):
        assert max(speed.errors(case)) <= speed.TOLERANCE[dtype], case.kernel
