"""Attention over video tokens in a traced block becomes sparse; dense training stays as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from arachnec.ir.stage_sizes import layers_of
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.video_attention import is_full
from arachnec.planning.sparse_stages import attentions_of
from arachnec.spmd.rewrite import shard_block
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sparse_block import sparsify_block
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade, after
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.cost import trained_stage
from arachnec.tracing.dims import counts_captions
from arachnec.tracing.graph import block_graph
from tests.slow import quick
from tests.spmd.sequence_models import MODELS, ModelCase, Size

SIZE = Size(6, 8, 8)
JOINT = MODELS["cogvideox-rotary"]
GRID = (6, 4, 4)


@pytest.fixture(scope="module")
def joint() -> tuple[SequenceModel, dict[Layer, LayerState]]:
    torch.manual_seed(0)
    model = JOINT.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    sequence = install(model, capture_blocks(model, JOINT.examples(), verify=False))
    return sequence, sequence.sparsify(rank=4)


def step(
    sequence: SequenceModel, sparse: SparseCascade | None, recompute: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    sequence.model.zero_grad(set_to_none=True)
    with sequence.use(None, recompute=recompute, sparse=sparse):
        output = sequence.model(**JOINT.arguments(SIZE))
        (output if isinstance(output, Tensor) else output[0]).square().mean().backward()
    first = output if isinstance(output, Tensor) else output[0]
    return first.detach(), {n: p.grad.clone() for n, p in sequence.model.named_parameters() if p.grad is not None}


def test_self_and_joint_attention_are_found_and_the_rest_says_why_not(
    joint: tuple[SequenceModel, dict[Layer, LayerState]],
) -> None:
    outputs = {}
    plain = capture_blocks(MODELS["plain"].build(), MODELS["plain"].examples(), verify=False)
    for name, captured in {"joint": joint[0].captured, "plain": plain}.items():
        sparse = [sparsify_block(shard_block(block)) for block in captured.blocks]
        outputs[name] = [([site.captions for site in b.sites], [why.reason for why in b.dense]) for b in sparse]
    assert outputs["joint"] == [(["first"], [])]
    assert outputs["plain"] == [([None], ["its keys are not the tokens of the clip"])]


@pytest.mark.parametrize("case", quick({n: c for n, c in MODELS.items() if c.only is None}, "multihead"))
def test_no_layer_is_planned_sparse_that_a_run_finds_no_attention_in(case: ModelCase) -> None:
    model, examples = case.build(), case.examples()
    captured = capture_blocks(model, examples, verify=False)
    stage = trained_stage("model", model, captured, examples, source="Model")
    paths = [path for path, _ in layers_of(stage)]
    blocks = [(block, sparsify_block(shard_block(block))) for block in captured.blocks]
    runs = {paths.index(path) for block, sparse in blocks if len(sparse.sites) == 1 for path in block.instances}
    planned = set(attentions_of(stage, [block_graph(block) for block in captured.blocks]))
    assert planned == (set() if counts_captions(captured.sizes) else runs)


def test_captions_that_a_model_joins_outside_its_blocks_count_among_its_tokens() -> None:
    """Nothing in the blocks has the video's own length, so a graph cannot tell."""
    for name, counted in {"joined": True, "plain": False}.items():
        captured = capture_blocks(MODELS[name].build(), MODELS[name].examples(), verify=False)
        assert counts_captions(captured.sizes) == counted


@pytest.mark.parametrize("recompute", [False, True])
def test_training_predictors_beside_a_dense_model_changes_no_bit_of_its_gradient(
    joint: tuple[SequenceModel, dict[Layer, LayerState]], recompute: bool
) -> None:
    sequence, layers = joint
    untrained, truth = step(sequence, SparseCascade(layers, GRID, ("0/0/a",)), recompute)
    cascade = SparseCascade(layers, GRID, ("0/0/a",), weight=0.5)
    output, gradients = step(sequence, cascade, recompute)
    assert torch.equal(output, untrained)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in truth.items() if "sparse_" not in name)
    learned = {name for name in gradients if "sparse_" in name}
    assert len(learned) == 2 * len(layers) and all(gradients[name].any() for name in learned)
    assert set(cascade.measured) == set(layers)
    eager, dense = step(sequence, None)
    torch.testing.assert_close(output, eager, rtol=1e-5, atol=1e-6)
    for name, gradient in dense.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def test_layers_that_rest_learn_nothing_whatever_their_path(
    joint: tuple[SequenceModel, dict[Layer, LayerState]],
) -> None:
    sequence, layers = joint
    first, *others = layers
    for sparse in (False, True):
        states = {layer: replace(state, sparse=sparse) for layer, state in layers.items()}
        cascade = SparseCascade(states, GRID, ("0/0/a",), weight=1.0, resting=frozenset((first,)))
        output, gradients = step(sequence, cascade)
        every, _ = step(sequence, SparseCascade(states, GRID, ("0/0/a",), weight=1.0))
        assert torch.equal(output, every) and set(cascade.measured) == set(others)
        learned = {name.rsplit(".", 1)[0] for name in gradients if "sparse_" in name}
        assert learned == {path for path, _ in others}


def test_a_predictor_s_gradient_is_its_share_of_the_loss_whatever_the_model_s_is(
    joint: tuple[SequenceModel, dict[Layer, LayerState]],
) -> None:
    sequence, layers = joint
    halves = [step(sequence, SparseCascade(layers, GRID, ("0/0/a",), weight=w))[1] for w in (1.0, 0.25)]
    for name in (name for name in halves[0] if "sparse_" in name):
        torch.testing.assert_close(halves[0][name] * 0.25, halves[1][name])


def test_lists_are_chosen_once_and_replayed_by_recomputation_backward_and_another_run(
    joint: tuple[SequenceModel, dict[Layer, LayerState]],
) -> None:
    sequence, layers = joint
    sparse = {
        layer: replace(state, sparse=True, densities=(0.4,) * state.site.heads) for layer, state in layers.items()
    }
    first = SparseCascade(sparse, GRID, ("0/0/a",), weight=1.0)
    output, gradients = step(sequence, first)
    assert all(isinstance(lists, KeyLists) for lists in first.lists.values())
    dense, _ = step(sequence, SparseCascade(layers, GRID, ("0/0/a",)))
    assert not any(is_full(lists, first.cubes(96 + SIZE.text, "first")) for lists in first.lists.values() if lists)
    for recompute in (True, False):
        again = SparseCascade(layers, GRID, ("0/0/a",), weight=1.0, replay=first.lists)  # predictors say dense
        output2, gradients2 = step(sequence, again, recompute)
        assert torch.equal(output, output2)
        assert all(torch.equal(gradients[name], gradients2[name]) for name in gradients)
    assert not torch.allclose(output, dense)


def test_a_layer_s_state_follows_what_was_measured(joint: tuple[SequenceModel, dict[Layer, LayerState]]) -> None:
    sequence, layers = joint
    cascade = SparseCascade(layers, GRID, ("0/0/a",), weight=1.0)
    step(sequence, cascade)
    for layer, state in layers.items():
        measured = cascade.measured[layer]
        following = after(state, measured)
        assert following.sparsities == pytest.approx([0.1 * x for x in measured.sparsity.tolist()])
        assert following.densities == pytest.approx([0.9 + 0.1 * x for x in measured.needed.tolist()])
        assert not following.sparse
        good = replace(measured, loss=measured.loss * 0, of_best=measured.of_best * 0 + 1)
        assert after(state, good).sparse
