"""On a GPU: the kernels over lists of key blocks against float64, and the choice of the lists against a processor's."""

from __future__ import annotations

import pytest
import torch

from arachnec.kernels.sparse.critical_keys import critical_keys
from arachnec.kernels.sparse.token_cubes import token_cubes
from tests.kernels.sparse import dense_truth
from tests.kernels.sparse.dense_truth import Case

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}  # fp32 is multiplied in three products of TF32
LSE = 2e-5  # sums in fp32, whatever is multiplied
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: Triton's kernels cannot run"),
]


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "masked"), [(64, "bias"), (128, ""), (128, "keys"), (256, "")])
def test_the_kernels_are_dense_attention_under_the_mask_of_their_lists(
    size: int, masked: str, dtype: torch.dtype
) -> None:
    case = Case(size, dtype, masked)
    error, of_lse, same = dense_truth.errors(case, dense_truth.given(case, torch.device("cuda")))
    assert error <= LIMITS[dtype] and of_lse <= LSE
    assert same


def test_a_gpu_chooses_as_a_processor_does_and_twice_the_same() -> None:
    cubes = token_cubes((9, 14, 27), captions=77)
    blocks, cells = len(cubes.blocks) - 1 - cubes.captions, len(cubes.cells) - 1
    features = [torch.randn(2, 3, cells, 16, generator=torch.Generator().manual_seed(n)) / 2 for n in range(2)]
    kept = [1, blocks // 3, blocks]
    there = critical_keys(*features, cubes, kept)
    here, again = (critical_keys(*(x.cuda() for x in features), cubes, kept) for _ in range(2))
    assert torch.equal(here.indices, again.indices) and torch.equal(here.counts.cpu(), there.counts)
    assert float((here.indices.cpu() != there.indices).float().mean()) <= 1e-3  # masses that are equal to rounding


def test_ties_go_to_the_lower_index_on_a_gpu() -> None:
    cubes = token_cubes((8, 16, 32), captions=5)
    alike = torch.zeros(1, 2, len(cubes.cells) - 1, 16)
    there = critical_keys(alike, alike, cubes, [2, 7])
    here = critical_keys(alike.cuda(), alike.cuda(), cubes, [2, 7])
    assert torch.equal(here.indices.cpu(), there.indices)


def test_the_host_does_not_wait_for_the_device() -> None:
    case = Case(128, torch.bfloat16)
    given = dense_truth.given(case, torch.device("cuda"))
    cubes, lists, (query, key, value, grad) = case.cubes, given.lists, given.heads
    dense_truth.sparse(case, given)  # compiles, and copies what is kept
    kept = [3] * query.shape[1]
    features = torch.randn(case.clips, query.shape[1], len(cubes.cells) - 1, 16, device="cuda")
    critical_keys(features, features, cubes, kept)
    torch.cuda.synchronize()
    order = cubes.order.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        where = (order, cubes.groups, cubes.blocks, 0.1)
        rest = [x.detach().requires_grad_() for x in (query, key, value)]
        out = torch.ops.arachnec.sparse_attention(*rest, None, lists.indices, lists.counts, *where)[0]
        torch.autograd.grad(out, rest, grad)
        critical_keys(features, features, cubes, kept)
    finally:
        torch.cuda.set_sync_debug_mode("default")
