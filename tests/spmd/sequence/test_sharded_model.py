"""What installing the wrappers leaves as it was, and what a shard of a sequence answers without being gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.ir.diagnostic import UserError
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sharded_tokens import ShardedTokens
from arachnec.tracing.blocks import capture_blocks
from tests.spmd.sequence_models import MODELS, Size

LONG_SKIP = MODELS["long-skip-outside"]


@pytest.fixture(scope="module")
def sequence() -> SequenceModel:
    torch.manual_seed(0)
    model = LONG_SKIP.build()
    return install(model, capture_blocks(model, LONG_SKIP.examples(), verify=False))


def gradients(sequence: SequenceModel) -> dict[str, Tensor]:
    sequence.model.zero_grad(set_to_none=True)
    sequence.model(**LONG_SKIP.arguments(Size())).square().mean().backward()
    return {name: p.grad.clone() for name, p in sequence.model.named_parameters() if p.grad is not None}


def test_parameters_and_state_keep_their_names_and_storages() -> None:
    model = LONG_SKIP.build()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    sequence = install(model, capture_blocks(model, LONG_SKIP.examples(), verify=False))
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert all("forward" in block.__dict__ for block in model.down)
    sequence.restore()
    assert not any("forward" in block.__dict__ for block in model.down)


def test_one_rank_runs_the_model_as_it_was(sequence: SequenceModel) -> None:
    truth = gradients(sequence)
    shard = SequenceShard((0,), 0, (LONG_SKIP.tokens(Size()),), 1, 1)
    for recompute in (False, True):
        with sequence.use(shard, recompute=recompute):
            actual = gradients(sequence)
        assert actual.keys() == truth.keys()
        for name, gradient in truth.items():
            torch.testing.assert_close(actual[name], gradient, rtol=0, atol=0)


def test_recomputation_keeps_only_the_inputs_of_blocks(sequence: SequenceModel) -> None:
    def saved(recompute: bool | frozenset[str]) -> int:
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.data_ptr()] = tensor.numel()
            return tensor

        with sequence.use(None, recompute=recompute), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            sequence.model(**LONG_SKIP.arguments(Size()))
        return sum(held.values())

    assert saved(True) < saved(False) / 2
    assert saved(True) < saved(frozenset({"down.0", "down.1"})) < saved(frozenset({"down.0"})) < saved(False)


def test_what_the_shell_reads_between_blocks_is_announced(sequence: SequenceModel) -> None:
    assert [line.split("`")[1] for line in sequence.warnings] == ["down.0", "down.1", "middle.0", "up.0"]


def test_a_call_of_another_form_than_the_traced_ones_is_refused(sequence: SequenceModel) -> None:
    x = torch.randn(2, 96, 12)
    with sequence.use(SequenceShard((0, 1), 0, (48, 48), 2, 1)), pytest.raises(UserError, match=r"down\.0 was called"):
        sequence.model.down[0](x, skip=x)


def test_a_shard_answers_for_the_whole_without_gathering() -> None:
    shard = SequenceShard((0, 1), 1, (5, 3), 2, 1)
    local = torch.randn(2, 3, 4, requires_grad=True)
    tokens = ShardedTokens(local, 1, shard)
    assert isinstance(tokens, Tensor)
    assert (tokens.shape, tokens.size(1), tokens.ndim, len(tokens)) == ((2, 8, 4), 8, 3, 2)
    assert (tokens.dtype, tokens.device, tokens.requires_grad) == (local.dtype, local.device, True)
    assert tokens.local is local
    assert repr(tokens) == "ShardedTokens([2, 8, 4], tokens (5, 3) along 1)"


def test_anything_else_gets_the_whole_tensor_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def gather(x: Tensor, dim: int, shard: SequenceShard) -> Tensor:
        gathered.append(dim)
        return torch.cat([torch.zeros(2, 5, 4), x], dim)

    monkeypatch.setattr("arachnec.spmd.sharded_tokens.gather_tokens", gather)
    tokens = ShardedTokens(torch.ones(2, 3, 4), 1, SequenceShard((0, 1), 1, (5, 3), 2, 1))
    assert (tokens + 1).sum().item() == 2 * 8 * 4 + 24
    assert torch.cat([tokens, tokens], -1)[0, -1].tolist() == [1.0] * 8
    assert F.layer_norm(tokens[:, 5:], [4]).abs().max().item() == 0
    assert gathered == [1]


def test_a_look_without_gradients_does_not_cut_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arachnec.spmd.sharded_tokens.gather_tokens", lambda x, dim, shard: torch.cat([x, x], dim))
    local = torch.ones(2, 3, 4, requires_grad=True)
    tokens = ShardedTokens(local, 1, SequenceShard((0, 1), 1, (3, 3), 2, 1))
    with torch.no_grad():
        assert tokens.mean().item() == 1
    (tokens * 3).sum().backward()
    assert local.grad is not None
    assert local.grad.unique().tolist() == [6.0]


def test_a_custom_autograd_function_may_not_lose_the_gradient_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 2

    monkeypatch.setattr("arachnec.spmd.sharded_tokens.gather_tokens", lambda x, dim, shard: torch.cat([x, x], dim))
    local = torch.ones(2, 3, 4, requires_grad=True)
    tokens = ShardedTokens(local, 1, SequenceShard((0, 1), 1, (3, 3), 2, 1))
    with pytest.raises(RuntimeError, match="custom autograd function"):
        Double.apply(tokens).sum().backward()
    Double.apply(tokens + 0).sum().backward()
    assert local.grad is not None
