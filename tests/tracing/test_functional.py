"""A block made functional is what ``run_decompositions`` makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional

from arachnec.tracing import export
from arachnec.tracing.export import FlatBlock, export_block


class Written(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(functional.linear(x, self.weight))


def written(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., ::2] = x[..., 1::2]
    y[..., 1::2] = x[..., ::2]
    return y


def silent(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean()
    return x * scale


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda x: x.to(torch.float64).float() * 2,
    "cast-by-keyword": lambda x: x.to(dtype=torch.float64, device="cpu"),
    "cast-to-itself": lambda x: x.to(torch.float32) + 1,
    "chunk": lambda x: torch.cat([a * i for i, a in enumerate(x.chunk(5, dim=-1))], -1),
    "chunk-of-a-first-dimension": lambda x: x[:, :, :8].transpose(0, 2).chunk(3)[1],
    "heads": lambda x: x.unflatten(2, (3, -1)).transpose(1, 2).transpose(1, 2).flatten(2, 3),
    "heads-of-a-view": lambda x: x.view(x.shape[0], -1, 3, 4).transpose(1, 2).reshape(x.shape[0], 3, -1, 2, 2),
    "dropout": lambda x: functional.dropout(x, 0.0, training=True) + functional.dropout(x, 0.5, training=False),
}
LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "written-in-place": written,
    "without-gradient": silent,
    "chunk-of-tokens": lambda x: x.chunk(2, dim=1)[0] + 1,
    "tokens-as-rows": lambda x: x.flatten(0, 1).softmax(0),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "added-to": lambda x: x.mul(2).add_(1),
}


@pytest.mark.parametrize(("name", "calls"), [*((name, 0) for name in WHOLE), *((name, 1) for name in LEFT)])
def test_a_block_is_exported_as_its_decomposition_and_only_where_no_rule_says_it_by_that(name: str, calls: int) -> None:
    block, x = Written((WHOLE | LEFT)[name]), torch.randn(2, 10, 12, generator=torch.Generator().manual_seed(1))
    decompose, called = ExportedProgram.run_decompositions, []
    with patch.object(ExportedProgram, "run_decompositions", lambda *said: called.append(1) or decompose(*said)):
        short = exported(block, x)
    with patch.object(export, "functional", lambda program: program.run_decompositions({})):
        long = exported(block, x)
    assert len(called) == calls
    assert kinds(short) == kinds(long)
    for size in ((2, 10, 12), (3, 7, 12)):
        y = torch.randn(size, generator=torch.Generator().manual_seed(2))
        one, other = (gradients(program, block, y) for program in (short, long))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one[0], block(y), rtol=0, atol=0)


def exported(block: nn.Module, x: Tensor) -> ExportedProgram:
    flat = FlatBlock(block, [x], torch.utils._pytree.tree_flatten({"x": x})[1])
    return export_block("block", flat, [x], [(0, 1)])


def kinds(program: ExportedProgram) -> Counter[str]:
    """Its operations, less those that tell a size."""
    return Counter(str(n.target) for n in program.graph.nodes if isinstance(n.meta.get("val"), Tensor | tuple | list))


def gradients(program: ExportedProgram, block: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    weight = block.weight.detach().clone().requires_grad_()
    (output,) = program.graph_module(weight, x)
    return output.detach(), *torch.autograd.grad(output.double().square().sum(), (weight, x), allow_unused=True)
