"""Bias and GELU on CPUs: against PyTorch's own, by finite differences, as an operator."""

import pytest
import torch

from arachnec.kernels.rowwise.bias_gelu import bias_gelu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_output_and_gradients_equal_pytorch_s(approximate: str) -> None:
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(12, dtype=torch.float64, requires_grad=True)
    mine = bias_gelu(x, bias, approximate=approximate)
    theirs = torch.nn.functional.gelu(x + bias, approximate=approximate)
    torch.testing.assert_close(mine, theirs)
    out = torch.randn_like(mine)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, bias), out) for y in (mine, theirs)))
    assert torch.autograd.gradcheck(lambda x, b: bias_gelu(x, b, approximate=approximate), (x, bias))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_without_bias_it_is_gelu(approximate: str) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    expected = torch.nn.functional.gelu(x, approximate=approximate)
    torch.testing.assert_close(bias_gelu(x, approximate=approximate), expected)


def test_the_operator_keeps_pytorch_s_rules() -> None:
    x, bias = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    torch.library.opcheck(torch.ops.arachnec.bias_gelu.default, (x, bias, True))


def test_a_bias_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias has shape \(4,\)"):
        bias_gelu(torch.randn(3, 4), torch.randn(3))
