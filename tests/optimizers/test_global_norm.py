"""The norm of a gradient is that of its values, whatever precision they are kept in."""

from __future__ import annotations

import pytest
import torch

from arachnec.model_state.optimizer import WIDENED, global_norm


@pytest.mark.parametrize("numbers", [1, 1000, WIDENED, 3 * WIDENED + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_norm_is_that_of_the_values_in_float64(numbers: int, dtype: torch.dtype) -> None:
    value = torch.randn(numbers, generator=torch.Generator().manual_seed(numbers)).to(dtype)
    norm = global_norm({"weight": value, "nothing": value.new_empty(0)})
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(norm.double(), value.double().norm(), rtol=2e-5, atol=0)


def test_values_that_do_not_lie_in_a_row_and_of_several_precisions_count_all() -> None:
    low, high = torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t(), torch.tensor([3.0, 4.0])
    expected = (low.double().square().sum() + 25).sqrt()
    torch.testing.assert_close(global_norm({"low": low, "high": high}).double(), expected, rtol=1e-6, atol=0)
    assert global_norm({"low": torch.tensor([1.0, torch.inf], dtype=torch.bfloat16)}).isinf()
