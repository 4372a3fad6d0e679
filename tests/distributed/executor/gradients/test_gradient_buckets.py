"""Gradients that are all-reduced in buckets, inside the last backward where they can be, are the gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arachnec.analysis.uses import overlapped_reduces
from arachnec.executable.folder import write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Instruction, Level, Module
from arachnec.ir.values import Attributes, Quantity
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.lowering.programs import lower
from arachnec.model_state.gradients import GradientSynchronisation
from arachnec.models.file import load_model_file
from arachnec.passes.check import find_problems
from tests.distributed.executor_cases import (
    MODEL,
    Work,
    as_planned,
    assert_same_gradients,
    clip,
    losses,
    lowered,
    plain_loop,
    traced,
    train_on,
)
from tests.distributed.harness import run_ranks
from tests.slow import slow

LAYERS = (("blocks.0", 1000), ("blocks.1", 1000))
CLIPS = [clip(i, 1 + i % 3) for i in range(6)]
UNEVEN = {  # ranks to a plan in which they end at different times, alone and in groups
    2: [Work((0,), (0, 1), 0), Work((1,), (0,), 1), Work((2,), (0,), 2), Work((3,), (1,), 1), Work((4, ), (0, 1), 5),
        Work((5,), (0, 1), 6)],
    3: [Work((0,), (0, 1), 0), Work((1,), (2,), 0), Work((2,), (0, 1), 1), Work((3,), (2,), 1), Work((4,), (2,), 2),
        Work((5,), (0, 1, 2), 9)],
    4: [Work((0,), (1, 2), 0), Work((1,), (0,), 0), Work((2,), (2, 3), 2), Work((3,), (1,), 3), Work((4,), (0,), 1),
        Work((5,), (2, 3), 4)],
}  # fmt: skip


def bucketed(module: Module, buckets: tuple[int, ...], layers: tuple[tuple[str, int], ...] = LAYERS) -> Module:
    """A lowered module, lowered again with its gradients in these buckets."""
    stages = tuple(
        replace(stage, attrs=stage.attrs.updated(layers=layers)) if stage.trained else stage for stage in module.stages
    )
    cut = tuple(replace(node, attrs=node.attrs.updated(buckets=buckets)) for node in module.reductions)
    return lower(replace(module, stages=stages, reductions=cut, programs=(), level=Level.PLACED))


def run_plan(
    folder: Path, module: Module, world: int, model: str = MODEL, steps: int = 1, training: Training | None = None
) -> tuple[Path, list[float]]:
    """Train on gloo ranks; the gradients of the last step, and the losses."""
    folder.mkdir(parents=True)
    source = folder / "source.py"
    source.write_text(model)
    model = traced(world, [CLIPS])
    write_executable(
        folder, program=module, traced=model, model=as_planned(model, module), pipeline="default",
        model_file=load_model_file(source), clips=CLIPS, training=training,
    )  # fmt: skip
    file = folder / "gradients.safetensors"
    train_on(world, folder, steps=steps, save_gradients=file)
    return file, losses(folder / "run.json")


@pytest.mark.parametrize("world", [2, slow(3), 4])
@pytest.mark.parametrize("buckets", [(1, 1), (1, 1, 0)])
def test_gradients_in_buckets_are_those_of_a_plain_loop(tmp_path: Path, world: int, buckets: tuple[int, ...]) -> None:
    module = bucketed(lowered(traced(world, [CLIPS]), UNEVEN[world]), buckets)
    assert not find_problems(module)
    assert any(overlapped_reduces(program) for program in module.programs)
    saved, (loss,) = run_plan(tmp_path / "run", module, world)
    expected, gradients = plain_loop(tmp_path / "run", CLIPS)
    assert_same_gradients(saved, gradients)
    assert loss == pytest.approx(expected, rel=1e-6)


def test_training_in_buckets_goes_the_way_of_training_without(tmp_path: Path) -> None:
    whole = lowered(traced(4, [CLIPS]), UNEVEN[4])
    training = Training(clip_norm=0.01)
    _, expected = run_plan(tmp_path / "whole", whole, 4, steps=2, training=training)
    _, losses = run_plan(tmp_path / "cut", bucketed(whole, (1, 1, 0)), 4, steps=2, training=training)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_a_cascade_adds_zeros(tmp_path: Path) -> None:
    works = [Work((i,), (i % 2,), i // 2) for i in range(6)]
    module = bucketed(lowered(traced(3, [CLIPS]), works), (1, 1))
    assert not [i for i in module.programs[2].instructions if i.op == "backward"]
    saved, _ = run_plan(tmp_path / "run", module, 3)
    assert_same_gradients(saved, plain_loop(tmp_path / "run", CLIPS)[1])


def test_frozen_and_shared_parameters_and_recomputed_layers_are_summed_once(tmp_path: Path) -> None:
    more = """

def build():
    model = Tiny()
    model.blocks[1].out.weight = model.blocks[0].out.weight
    model.blocks[0].qkv.weight.requires_grad_(False)
    model.embed.requires_grad_(False)
    return model
"""
    blocks = itertools.cycle((True, 1))
    works = [replace(work, attrs=(("recompute", next(blocks)),)) for work in UNEVEN[3]]
    module = bucketed(lowered(traced(3, [CLIPS]), works), (1, 1))
    saved, _ = run_plan(tmp_path / "run", module, 3, MODEL + more)
    expected = plain_loop(tmp_path / "run", CLIPS)[1]
    names = set(load_file(saved))
    assert "blocks.0.out.weight" in names
    assert "embed.weight" not in names
    assert_same_gradients(saved, {name: value for name, value in expected.items() if name in names})


def test_a_layer_that_a_rank_does_not_use_is_summed_when_its_backward_has_ended(tmp_path: Path) -> None:
    skips = MODEL.replace("for block in self.blocks:", "for block in self.blocks[: x.shape[1] // 4]:")
    module = bucketed(lowered(traced(4, [CLIPS]), [Work((i,), (i % 4,), i // 4) for i in range(6)]), (1, 1))
    saved, _ = run_plan(tmp_path / "run", module, 4, skips)
    assert_same_gradients(saved, plain_loop(tmp_path / "run", CLIPS)[1])


def test_layers_that_the_model_does_not_have_leave_their_parameters_to_the_rest(tmp_path: Path) -> None:
    module = bucketed(lowered(traced(2, [CLIPS]), UNEVEN[2]), (1, 1), (("nowhere", 5), ("blocks.1", 1000)))
    saved, _ = run_plan(tmp_path / "run", module, 2)
    assert_same_gradients(saved, plain_loop(tmp_path / "run", CLIPS)[1])


AGAIN = """

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, t):
        ctx.block = block
        ctx.save_for_backward(x, t)
        with torch.no_grad():
            return block(x, t)

    @staticmethod
    def backward(ctx, gradient):
        x, t = (value.detach().requires_grad_() for value in ctx.saved_tensors)
        for share in (0.5, 0.5):
            with torch.enable_grad():
                ctx.block(x, t).backward(share * gradient)
        return None, x.grad, t.grad


def again(block, x, t):
    return Again.apply(block, x, t) + 0 * nn.functional.linear(x, block.out.weight)
"""


def test_a_gradient_that_comes_after_its_sum_began_ends_the_run(tmp_path: Path) -> None:
    nested = MODEL.replace("x = block(x, t)", "x = again(block, x, t)") + AGAIN
    module = bucketed(lowered(traced(1, [CLIPS]), [Work((i,), (0,), i) for i in range(6)]), (1, 1))
    with pytest.raises(AssertionError, match="came twice in one backward"):
        run_plan(tmp_path / "run", module, 1, nested)


def test_sums_start_in_order_and_inside_the_backward() -> None:
    run_ranks(1, _order)


def _order() -> None:
    """Layer 1 is passed first; its sum starts while layer 0 is still to come, and only with its whole gradient."""
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
    parameters = dict(layers.named_parameters())
    reduces = [
        Instruction("reduce", "dit", (0,), Attributes.of(layers=(layer,), early=Quantity(float(layer), "ms")))
        for layer in (1, 0)
    ]
    synchronisation = GradientSynchronisation(parameters, {name: int(name[0]) for name in parameters}, ProcessGroups())
    started: list[tuple[int, bool]] = []
    begin = synchronisation.start

    def start(reduce: Instruction) -> None:
        started.append((reduce.attrs["layers"][0], layers[0].weight.grad is not None))  # type: ignore[index]
        begin(reduce)

    synchronisation.start = start  # type: ignore[method-assign]
    hidden = layers[1](layers[0](torch.ones(2, 3)))
    with synchronisation.inside_backward(reduces):
        hidden.sum().backward()
    assert started == [(1, False), (0, True)]
