"""Norm and rotary positions on CPUs: against Diffusers' way of writing them, by finite differences, as an operator."""

import pytest
import torch
from torch import Tensor

from arachnec.kernels.rowwise.norm_rope import norm_rope

SHAPE = (2, 5, 3, 8)


def tables(rows: int, size: int = SHAPE[3]) -> tuple[Tensor, Tensor]:
    angle = torch.randn(rows, size // 2, dtype=torch.float64)
    return angle.cos(), angle.sin()


def eager(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, cos: Tensor, sin: Tensor, norm: str, interleaved: bool
) -> Tensor:
    """With repeated tables and rotated copies; x [B, S, heads, D]."""
    across = weight is not None and weight.shape[0] != x.shape[3]
    flat = x.flatten(2) if across else x
    size = flat.shape[-1:]
    if norm == "rms":
        flat = torch.nn.functional.rms_norm(flat, size, weight, 1e-6)
    else:
        flat = torch.nn.functional.layer_norm(flat, size, weight, bias, 1e-6)
    x = flat.reshape(x.shape)
    table_shape = (-1, x.shape[1], 1, x.shape[3])
    if interleaved:
        cos, sin = (t.repeat_interleave(2, -1).reshape(table_shape) for t in (cos, sin))
        lo, hi = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([-hi, lo], -1).flatten(-2)
    else:
        cos, sin = (torch.cat([t, t], -1).reshape(table_shape) for t in (cos, sin))
        lo, hi = x.chunk(2, -1)
        rotated = torch.cat([-hi, lo], -1)
    return x * cos + rotated * sin


@pytest.mark.parametrize("rows", [5, 10])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("width", [0, 8, 24])
def test_output_and_every_gradient_equal_eager(width: int, norm: str, interleaved: bool, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    vectors = [torch.randn(width, dtype=torch.float64, requires_grad=True) if width else None for _ in range(2)]
    if norm == "rms":
        vectors[1] = None
    cos, sin = tables(rows)
    given = [t for t in (x, *vectors) if t is not None]
    out = torch.randn(SHAPE, dtype=torch.float64)
    mine = norm_rope(x, *vectors, cos, sin, norm=norm, interleaved=interleaved)
    theirs = eager(x, *vectors, cos, sin, norm, interleaved)
    torch.testing.assert_close(mine, theirs)
    grads = [torch.autograd.grad(y, given, out) for y in (mine, theirs)]
    torch.testing.assert_close(*grads)


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: norm_rope(x, w, None, *tables_of_one_seed()), (x, weight))


def tables_of_one_seed() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return tables(5)


def test_without_angles_it_is_the_norm_alone() -> None:
    x, weight = torch.randn(SHAPE), torch.randn(8)
    torch.testing.assert_close(norm_rope(x, weight), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))


def test_a_token_with_cosine_one_and_sine_zero_keeps_its_place() -> None:
    x = torch.randn(1, 5, 3, 8)
    cos, sin = tables(5)
    cos[:2], sin[:2] = 1, 0
    torch.testing.assert_close(norm_rope(x, None, None, cos, sin)[:, :2], norm_rope(x)[:, :2])


def test_heads_first_tensors_keep_their_order_in_memory() -> None:
    x = torch.randn(2, 3, 5, 8).transpose(1, 2).requires_grad_()
    y = norm_rope(x, torch.randn(8), None, *tables(5))
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, norm_rope(x.contiguous(), None, None, *tables(5)).new_tensor(y.tolist()))


@pytest.mark.parametrize("width", [8, 24])
def test_the_operator_keeps_pytorch_s_rules(width: int) -> None:
    x, weight = torch.randn(SHAPE, requires_grad=True), torch.randn(width, requires_grad=True)
    cos, sin = (t.float() for t in tables(5))
    arguments = (x, weight, None, cos, sin, width == 24, False, True, 1e-6)
    torch.library.opcheck(torch.ops.arachnec.norm_rope.default, arguments)


@pytest.mark.parametrize(
    ("weight", "rows", "says"), [(7, 5, "weight and bias have 8 or 24 values"), (8, 4, "4 rows of angles")]
)
def test_shapes_that_fit_nothing_are_refused(weight: int, rows: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        norm_rope(torch.randn(SHAPE), torch.randn(weight), None, *tables(rows))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [8, 24])
def test_tables_as_wide_as_a_head_may_hold_two_values_for_a_pair(width: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(width, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 10, SHAPE[3], dtype=torch.float64)
    normed = torch.nn.functional.rms_norm(x.flatten(2) if width == 24 else x, (width,), weight, 1e-6).reshape(SHAPE)
    if interleaved:
        lo, hi = normed.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([-hi, lo], -1).flatten(-2)
    else:
        lo, hi = normed.chunk(2, -1)
        rotated = torch.cat([-hi, lo], -1)
    theirs = normed * cos.reshape(2, 5, 1, 8) + rotated * sin.reshape(2, 5, 1, 8)
    mine = norm_rope(x, weight, None, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(mine, theirs)
    out = torch.randn(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, weight), out) for y in (mine, theirs)))
