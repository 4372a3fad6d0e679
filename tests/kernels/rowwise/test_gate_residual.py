"""The gated residual on CPUs: against its operations, by finite differences, as an operator."""

import itertools

import pytest
import torch

from arachnec.kernels.rowwise.gate_residual import gate_residual

GATES = {"all": (6,), "sample": (2, 1, 6), "token": (2, 5, 6)}


@pytest.mark.parametrize("shape", GATES.values(), ids=GATES)
def test_output_and_gradients_equal_the_operations(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    branch, residual = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    given = (branch, residual, gate)
    mine, theirs = gate_residual(*given), residual + gate * branch
    torch.testing.assert_close(mine, theirs)
    out = torch.randn_like(mine)
    torch.testing.assert_close(*(torch.autograd.grad(y, given, out) for y in (mine, theirs)))
    assert torch.autograd.gradcheck(gate_residual, given)


@pytest.mark.parametrize("lengths", [[0, 1, 1, 8, 9], [0, 9, 9, 9, 9]])
def test_a_gate_per_segment_is_that_of_each_clip_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    branch, residual = torch.randn(2, 9, 6, dtype=torch.float64)
    gate = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mine = gate_residual(branch, residual, gate, cu_seqlens=torch.tensor(lengths))
    parts = itertools.pairwise(lengths)
    theirs = torch.cat([residual[a:b] + gate[i] * branch[a:b] for i, (a, b) in enumerate(parts)])
    torch.testing.assert_close(mine, theirs)
    out = torch.randn_like(mine)
    torch.testing.assert_close(*(torch.autograd.grad(y, gate, out) for y in (mine, theirs)))


def test_the_operator_keeps_pytorch_s_rules() -> None:
    branch, residual, gate = (torch.randn(n, 4, requires_grad=True) for n in (3, 3, 1))
    torch.library.opcheck(torch.ops.arachnec.gate_residual.default, (branch, residual, gate, None, False))


def test_rows_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        gate_residual(torch.randn(3, 4), torch.randn(4, 4), torch.randn(4))
