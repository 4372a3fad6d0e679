"""Gradients of bf16 parameters are added up and summed in fp32: errors do not grow with cascades or ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Instruction, Level, Module, Stage
from arachnec.ir.values import Attributes
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.model_state.gradients import (
    EXCHANGED,
    LARGEST_PIECE,
    SMALLEST_PIECE,
    GradientSynchronisation,
    Piece,
    piece_size,
)
from arachnec.model_state.kept_gradients import gradient_of, keep_gradients, says_low, set_gradient
from arachnec.model_state.optimizer import Optimizer
from tests.distributed.executor_cases import cluster
from tests.distributed.harness import run_ranks

WIDTH = 64
ROUNDING = 2**-9  # of bf16


def module(**attrs: str) -> Module:
    stage = Stage("dit", True, Attributes.of(dtype="bf16", params=WIDTH, **attrs))
    return Module("m", Level.TRACED, cluster(2), stages=(stage,))


def parameter(precision: str) -> torch.nn.Parameter:
    value = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
    keep_gradients({"w": value}, module(gradients=precision))
    return value


def error(ranks: int, cascades: int, precision: str) -> float:
    """Of the sum over ranks of the gradients of so many cascades in all, against float64, relative."""
    generator = torch.Generator().manual_seed(0)
    given = (1 + torch.randn(cascades, WIDTH, generator=generator)).to(torch.bfloat16)
    total = torch.zeros(WIDTH, dtype=torch.float32 if precision == "f32" else torch.bfloat16)
    for rank in range(ranks):  # a ring adds one rank's part after the other
        held = parameter(precision)
        for gradient in given[rank::ranks]:
            (held * gradient).sum().backward()
        kept = gradient_of(held)
        if kept is not None:
            total += kept
    exact = given.double().sum(0)
    return float((total.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_errors_against_float64_do_not_grow_with_the_number_of_cascades(ranks: int) -> None:
    errors = [error(ranks, cascades, "f32") for cascades in (64, 256, 1024)]
    assert max(errors) < 1e-6  # fp32's own rounding; bf16's is 2e-3


def test_in_bf16_they_do_grow() -> None:
    assert error(2, 1024, "bf16") > 1.5 * error(2, 64, "bf16") > ROUNDING


@pytest.mark.parametrize("uses", [4, 64, 1024])
def test_in_bf16_a_cascade_is_rounded_once_however_often_it_uses_a_parameter(uses: int) -> None:
    """In a backward autograd adds up in fp32; nothing of that stays, and the buffer is of low precision."""
    generator = torch.Generator().manual_seed(0)
    given = (1 + torch.randn(uses, WIDTH, generator=generator)).to(torch.bfloat16)
    held = parameter("bf16")
    torch.stack([(held * gradient).sum() for gradient in given]).sum().backward()
    kept = gradient_of(held)
    assert kept is not None
    assert held.grad is None
    assert kept.dtype is torch.bfloat16
    torch.testing.assert_close(kept, given.double().sum(0).to(torch.bfloat16), rtol=2**-8, atol=0)
    assert float((kept.double() - given.double().sum(0)).norm() / given.double().sum(0).norm()) < ROUNDING


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_in_bf16_ranks_add_no_error(ranks: int) -> None:
    """With one cascade a rank, rounded once, the sum in fp32 is as exact at 64 ranks as at 2."""
    generator = torch.Generator().manual_seed(0)
    given = (1 + torch.randn(ranks, WIDTH, generator=generator)).to(torch.bfloat16)
    reduced_parts = []
    for gradient in given:
        held = parameter("bf16")
        (held * gradient).sum().backward()
        kept = gradient_of(held)
        assert kept is not None
        reduced_parts.append(kept)
    total = torch.stack(reduced_parts).sum(0, dtype=torch.float32)
    assert float((total - given.double().sum(0)).norm() / given.double().sum(0).norm()) < 1e-6


def test_the_optimizer_reads_the_fp32_gradient_itself() -> None:
    value = parameter("f32")
    (value * 3).sum().backward()
    optimizer = Optimizer({"w": value}, Training(lr=1e-2, clip_norm=0, dtype="bf16"))
    seen: list[int] = []
    (master,) = optimizer._masters.values()
    step = optimizer.torch.step

    def noted() -> None:
        assert master.grad is not None
        seen.append(master.grad.data_ptr())
        step()

    optimizer.torch.step = noted  # type: ignore[method-assign, assignment]
    assert value.grad is not None
    assert value.grad.dtype is torch.float32
    place = value.grad.data_ptr()
    optimizer.step()
    assert seen == [place]


def test_a_plan_with_gradients_of_low_precision_says_so() -> None:
    low, exact = {"w": parameter("bf16")}, {"w": parameter("f32")}
    assert "kept in bf16, and added up in fp32 within a cascade and over ranks" in str(
        says_low(module(gradients="bf16"), low)
    )
    assert says_low(module(gradients="f32"), exact) is None
    assert says_low(module(), {"w": torch.nn.Parameter(torch.ones(3))}) is None


def reduced(precision: str, count: int) -> torch.Tensor:
    """Three gradients of unequal size on every rank, all-reduced as one piece."""
    values = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (5, count, 1)]
    keep_gradients({str(i): value for i, value in enumerate(values)}, module(gradients=precision))
    dtype = torch.float32 if precision == "f32" else torch.bfloat16
    for number, value in enumerate(values[:2]):
        set_gradient(value, torch.full_like(value, 1 + 2**-6 * dist.get_rank() + number, dtype=dtype))
    assert dist.group.WORLD is not None
    piece = Piece.sent(values, dist.group.WORLD)
    piece.finish()
    return torch.cat([kept.float() for value in values if (kept := gradient_of(value)) is not None])


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_piece_is_the_sum_over_ranks_rounded_once(precision: str, ranks: int) -> None:
    first = sum(1 + 2**-6 * rank for rank in range(ranks))
    expected = torch.tensor([*[first] * 5, *[first + ranks] * 7, 0.0])
    if precision == "bf16":
        expected = expected.to(torch.bfloat16).float()
    for reduced_parts in run_ranks(ranks, reduced, precision, 7):
        torch.testing.assert_close(reduced_parts, expected, rtol=0, atol=0)


def synchronised(sharded: bool, count: int) -> tuple[int, list[float]]:
    """How many pieces had memory twice at most, and the sum of each gradient as this rank has it."""
    values = {str(i): torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for i in range(count)}
    keep_gradients(values, module(gradients="bf16"))
    for number, value in enumerate(values.values()):
        set_gradient(value, torch.full_like(value, number + dist.get_rank()))
    everyone = tuple(range(dist.get_world_size()))
    groups = ProcessGroups()
    groups.ensure([everyone])
    gradients = GradientSynchronisation(values, {}, groups, piece_bytes=1, sharded=sharded)
    gradients.start(Instruction("reduce", "dit", everyone))
    doubled = sum(piece.doubled for started in gradients._pending for piece in started.pieces)
    gradients.wait()
    groups.close()
    kept = gradients.parts if sharded else {name: gradient_of(value) for name, value in values.items()}
    return doubled, [float(value.float().mean()) for value in kept.values() if value is not None]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_few_pieces_of_low_precision_have_memory_twice(sharded: bool) -> None:
    for doubled, reduced_parts in run_ranks(2, synchronised, sharded, 7):
        assert 0 < doubled <= EXCHANGED
        assert reduced_parts == [2.0 * number + 1 for number in range(7)]


def test_pieces_are_larger_where_latency_weighs_more() -> None:
    here = cluster(8)
    few, many = piece_size(here, (0, 1)), piece_size(here, tuple(range(8)))
    assert SMALLEST_PIECE <= few <= many <= LARGEST_PIECE
    far = here.attrs
    slow = type(here)(here.name, far.updated(latency=type(far["latency"])(2000.0, "us")))  # type: ignore[call-arg]
    assert piece_size(slow, tuple(range(8))) > many
    assert piece_size(None, (0, 1)) == SMALLEST_PIECE
