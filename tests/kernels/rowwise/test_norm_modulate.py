"""Norm, modulation, gate and residual on CPUs: against eager in float64, by finite differences, and as operators."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from arachnec.kernels.rowwise.norm_modulate import gate_residual_norm_modulate, norm_modulate

LENGTHS = [1, 5, 7, 32, 0, 3]
HIDDEN = 12
KINDS = ["none", "all", "sample", "token", "packed"]


def cu_seqlens(lengths: list[int] = LENGTHS) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def shapes(kind: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Of the rows, and of the vectors."""
    return {
        "none": ((2, 5, HIDDEN), None),
        "all": ((2, 5, HIDDEN), (HIDDEN,)),
        "sample": ((3, 5, HIDDEN), (3, 1, HIDDEN)),
        "token": ((2, 4, HIDDEN), (2, 4, HIDDEN)),
        "packed": ((sum(LENGTHS), HIDDEN), (len(LENGTHS), HIDDEN)),
    }[kind]


def eager(
    branch: Tensor | None, x: Tensor, gate: Any, scale: Any, shift: Any, weight: Any, bias: Any, norm: str, packed: bool
) -> tuple[Tensor, Tensor]:
    """Written with PyTorch's own norms, and indexing for packed rows."""
    if packed:
        segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        gate, scale, shift = (v if v is None else v[segment] for v in (gate, scale, shift))
    if branch is not None:
        x = x + (branch if gate is None else gate * branch)
    size = (x.shape[-1],)
    if norm == "layer":
        y = torch.nn.functional.layer_norm(x, size, weight, bias, 1e-6)
    else:
        y = torch.nn.functional.rms_norm(x, size, weight, 1e-6)
        y = y if bias is None else y + bias
    y = y if scale is None else y * (1 + scale)
    return x, y if shift is None else y + shift


def inputs(kind: str, affine: bool, gated: bool, dtype: torch.dtype) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    rows, vectors = shapes(kind)
    tensors: dict[str, Tensor | None] = {"x": torch.randn(rows, dtype=dtype)}
    tensors["branch"] = torch.randn(rows, dtype=dtype) if gated else None
    for name in ("gate", "scale", "shift"):
        tensors[name] = None if vectors is None or (name == "gate" and not gated) else torch.randn(vectors, dtype=dtype)
    for name in ("weight", "bias"):
        tensors[name] = torch.randn(HIDDEN, dtype=dtype) if affine else None
    return {name: t if t is None else t.requires_grad_() for name, t in tensors.items()}


def fused(t: dict[str, Any], norm: str, lengths: Tensor | None) -> tuple[Tensor, ...]:
    keywords = {"weight": t["weight"], "bias": t["bias"], "cu_seqlens": lengths, "norm": norm}
    if t["branch"] is None:
        return (norm_modulate(t["x"], t["scale"], t["shift"], **keywords),)
    return gate_residual_norm_modulate(t["branch"], t["x"], t["gate"], t["scale"], t["shift"], **keywords)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient_equal_eager(kind: str, norm: str, affine: bool, gated: bool) -> None:
    mine, theirs = (inputs(kind, affine, gated, torch.float64) for _ in range(2))
    lengths = cu_seqlens() if kind == "packed" else None
    got = fused(mine, norm, lengths)
    order = [theirs[name] for name in ("branch", "x", "gate", "scale", "shift", "weight", "bias")]
    expected = eager(*order, norm, kind == "packed")
    weights = [torch.randn_like(e) for e in expected]
    sum((e * w).sum() for e, w in zip(expected[-len(got) :], weights, strict=False)).backward()
    sum((g * w).sum() for g, w in zip(got, weights, strict=False)).backward()
    for g, e in zip(got, expected[-len(got) :], strict=True):
        torch.testing.assert_close(g, e)
    for name, tensor in mine.items():
        if tensor is not None:
            torch.testing.assert_close(tensor.grad, theirs[name].grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    given = inputs(kind, affine=True, gated=True, dtype=torch.float64)
    names = [name for name, tensor in given.items() if tensor is not None]
    lengths = cu_seqlens() if kind == "packed" else None

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return fused({**dict.fromkeys(given), **dict(zip(names, tensors, strict=True))}, "layer", lengths)

    assert torch.autograd.gradcheck(run, [given[name] for name in names], fast_mode=True)


@pytest.mark.parametrize("used", [0, 1])
def test_one_unused_output_is_no_gradient_of_zero_only(used: int) -> None:
    mine, theirs = (inputs("sample", True, True, torch.float64) for _ in range(2))
    fused(mine, "layer", None)[used].square().sum().backward()
    order = [theirs[name] for name in ("branch", "x", "gate", "scale", "shift", "weight", "bias")]
    eager(*order, "layer", False)[used].square().sum().backward()
    for name in ("x", "branch", "gate"):
        torch.testing.assert_close(mine[name].grad, theirs[name].grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_float64_than_eager_is(dtype: torch.dtype) -> None:
    exact = {
        k: v if v is None else v.detach().to(dtype) for k, v in inputs("sample", True, True, torch.float64).items()
    }
    order = ("branch", "x", "gate", "scale", "shift", "weight", "bias")
    truth = eager(*(exact[n].double() for n in order), "layer", False)
    theirs = eager(*(exact[n] for n in order), "layer", False)
    for got, e, t in zip(fused(exact, "layer", None), theirs, truth, strict=True):
        assert got.dtype == dtype
        assert (got.double() - t).abs().mean() <= (e.double() - t).abs().mean()


def test_vectors_keep_their_own_dtype_and_may_be_views() -> None:
    table = torch.randn(2, 6, HIDDEN, requires_grad=True)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    shift, scale, *_ = table.chunk(6, dim=1)
    norm_modulate(x, scale, shift).float().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert (
        table.grad.dtype == torch.float32 and table.grad[:, :2].abs().sum() > 0 and table.grad[:, 2:].abs().sum() == 0
    )


@pytest.mark.parametrize("kind", ["sample", "packed", "token"])
@pytest.mark.parametrize("gated", [False, True])
def test_operators_keep_pytorch_s_rules(kind: str, gated: bool) -> None:
    given = inputs(kind, affine=True, gated=gated, dtype=torch.float32)
    lengths = cu_seqlens() if kind == "packed" else None
    flat = [v if v is None else v.reshape(-1, HIDDEN) for v in (given["scale"], given["shift"])]
    tail = (given["weight"], given["bias"], *flat, lengths, kind == "token", True, 1e-6)
    gate = given["gate"].reshape(-1, HIDDEN) if gated else None
    arguments = (given["branch"] if gated else None, given["x"], gate, *tail)
    leaves = (a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments)
    torch.library.opcheck(torch.ops.arachnec.norm_modulate.default, tuple(leaves))


def test_export_sees_one_operator_for_every_number_of_samples_and_tokens() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, branch: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            shift, scale, gate = table.chunk(3, dim=1)
            return gate_residual_norm_modulate(branch, x, gate, scale, shift)

    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    example = (torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 3, 8))
    rows = {0: batch, 1: tokens}
    exported = torch.export.export(Block(), example, dynamic_shapes=(rows, rows, {0: batch}), strict=False)
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.arachnec.norm_modulate.default) == 1
    other = (torch.randn(3, 7, 8), torch.randn(3, 7, 8), torch.randn(3, 3, 8))
    for got, expected in zip(exported.module()(*other), Block()(*other), strict=True):
        torch.testing.assert_close(got, expected)


def test_compile_traces_through_forward_and_backward_without_a_break() -> None:
    def step(x: Tensor, scale: Tensor) -> Tensor:
        return norm_modulate(x * 2, scale, scale).square().mean()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 7):
        grads = []
        for run in (step, compiled):
            torch.manual_seed(rows)
            x, scale = torch.randn(2, rows, 8, requires_grad=True), torch.randn(2, 1, 8, requires_grad=True)
            run(x, scale).backward()
            grads.append((x.grad, scale.grad))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("scale", "lengths", "says"),
    [
        ((4, 12), None, "neither per sample"),
        ((2, 5, 4), None, "does not belong"),
        ((2, 12), [0, 3, 9], "rise from 0 to the 10 rows"),
        ((3, 12), [0, 3, 10], "neither per sample"),
    ],
)
def test_shapes_that_fit_nothing_are_refused(scale: tuple[int, ...], lengths: list[int] | None, says: str) -> None:
    x = torch.randn(10, HIDDEN) if lengths else torch.randn(2, 5, HIDDEN)
    with pytest.raises(ValueError, match=says):
        norm_modulate(x, torch.randn(scale), cu_seqlens=None if lengths is None else torch.tensor(lengths))


def test_gradients_of_very_uneven_segments_are_those_of_float64() -> None:
    torch.manual_seed(0)
    lengths, size = torch.tensor([1, 1560, 7, 32760]), 16
    segment = torch.repeat_interleave(torch.arange(4), lengths)
    rows = [torch.randn(int(lengths.sum()), size, requires_grad=True) for _ in range(2)]
    vectors = [torch.randn(4, size, requires_grad=True) for _ in range(3)]
    given = (*rows, *vectors)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    result = gate_residual_norm_modulate(*given, cu_seqlens=ends)
    branch, residual, gate, scale, shift = exact = [t.detach().double().requires_grad_() for t in given]
    h = residual + gate[segment] * branch
    truth = h, torch.nn.functional.layer_norm(h, (size,), eps=1e-6) * (1 + scale[segment]) + shift[segment]
    outer = [torch.randn_like(t) for t in result]
    true_grads = torch.autograd.grad(truth, exact, [t.double() for t in outer])
    for got, want in zip(torch.autograd.grad(result, given, outer), true_grads, strict=True):
        for first, second in itertools.pairwise(ends) if got.shape[0] > 4 else [(0, 4)]:
            part = want[first:second]
            assert (got[first:second] - part).abs().max() <= 1e-5 * part.abs().max()
