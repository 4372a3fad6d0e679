"""Parameters dealt out over cells of ranks: gradients, steps and checkpoints are those of a model that is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.passes.check import checked
from tests.distributed.executor.runs.test_executor_ncclish import train_ncclish
from tests.distributed.executor_cases import (
    ADAPTERS,
    DOUBLE,
    TIED,
    Work,
    assert_same_gradients,
    clip,
    losses,
    lowered,
    plain_loop,
    proved_executable,
    traced,
    train_on,
)
from tests.distributed.harness import run_ranks
from tests.distributed.ncclish import Settings
from tests.slow import slow

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 1, 24, 16), clip("e", 7))
LAYERS = (("blocks.0", 1236), ("blocks.1", 1236))


def in_cells(
    module: Module, cell: int, layers: Sequence[tuple[str, int]] = LAYERS, *, dealt_out: bool = False
) -> Module:
    """With ``dealt_out`` the optimizer's state of a shard lies in parts on the ranks that hold the shard."""
    assert module.cluster is not None
    over = module.cluster.world // cell if dealt_out else None
    attrs = {"layers": tuple(layers), "cell": cell if cell > 1 else None, "params": 2614, "sharded": over}
    return replace(
        module, stages=tuple(replace(s, attrs=s.attrs.updated(**attrs)) if s.trained else s for s in module.stages)
    )


def executable(
    folder: Path,
    works: Sequence[Work],
    world: int,
    cell: int,
    *,
    more: str = DOUBLE,
    layers: Sequence[tuple[str, int]] = LAYERS,
    training: Training | None = None,
    clips: Sequence[VideoClip] = CLIPS,
    dealt_out: bool = False,
) -> Path:
    module = in_cells(traced(world, [clips]), cell, layers, dealt_out=dealt_out)
    return proved_executable(folder, module, works, clips, training=training, more=more)


def ordered(*groups: tuple[tuple[int, ...], tuple[int, ...]], **attrs: object) -> list[Work]:
    pairs = tuple(attrs.items())
    return [Work(clips, ranks, float(at), attrs=pairs) for at, (clips, ranks) in enumerate(groups)]  # type: ignore[arg-type]


PAIR, FOUR, LOW, HIGH = (0, 1), (0, 1, 2, 3), (0, 1), (2, 3)
WHOLE_WORLD = ordered(((0, 1), FOUR), ((2,), FOUR), ((3,), FOUR), ((4,), FOUR))
ONE_CELL = ordered(((0, 1), PAIR), ((2,), PAIR), ((3,), PAIR), ((4,), PAIR))
UNEVEN = ordered(((0, 1), LOW), ((2,), HIGH), ((3,), LOW), ((4,), LOW))
BOTH = ordered(((0, 1), LOW), ((2,), HIGH), ((3,), FOUR), ((4,), HIGH))
ALONE = (("degree", 1), ("side", 2), ("ulysses", None), ("ring", None))
BESIDE = [replace(BOTH[0], attrs=ALONE), *BOTH[1:]]  # clips a and b, of one shape
PAIRS = (("degree", 2), ("side", 2), ("ulysses", 2), ("ring", 1))
TWO_BY_TWO = [replace(WHOLE_WORLD[0], attrs=PAIRS), *WHOLE_WORLD[1:]]
AGAIN = ordered(((0, 1), LOW), ((2,), HIGH), ((3,), FOUR), ((4,), HIGH), recompute=True)
FIRST = ordered(((0, 1), LOW), ((2,), HIGH), ((3,), FOUR), ((4,), HIGH), recompute=1)


@pytest.mark.parametrize(
    ("ranks", "cell", "works", "more", "layers"),
    [
        slow(2, 2, ONE_CELL, DOUBLE, LAYERS, id="one-cell"),
        slow(4, 4, WHOLE_WORLD, DOUBLE, LAYERS, id="all-ranks"),
        pytest.param(4, 2, UNEVEN, DOUBLE, LAYERS, id="uneven-numbers-of-cascades"),
        slow(4, 2, BOTH, DOUBLE, LAYERS, id="one-cell-and-two"),
        slow(4, 2, BESIDE, DOUBLE, LAYERS, id="clips-side-by-side"),
        slow(4, 2, TWO_BY_TWO, DOUBLE, LAYERS, id="two-clips-on-two-ranks-each"),
        pytest.param(4, 4, TWO_BY_TWO, DOUBLE, LAYERS, id="side-by-side-in-a-cell"),
        slow(4, 2, AGAIN, DOUBLE, LAYERS, id="recomputing"),
        pytest.param(4, 2, FIRST, DOUBLE, LAYERS, id="recomputing-one-block-of-two"),
        slow(4, 2, BOTH, ADAPTERS, (("blocks.0", 12), ("blocks.1", 156)), id="most-are-frozen"),
        pytest.param(4, 2, BOTH, TIED, (("blocks.0", 1092), ("blocks.1", 1092)), id="two-layers-share-a-weight"),
        pytest.param(4, 1, WHOLE_WORLD, DOUBLE, LAYERS, id="cells-of-one"),
    ],
)
def test_gradients_are_those_of_a_plain_loop(
    tmp_path: Path, ranks: int, cell: int, works: list[Work], more: str, layers: Sequence[tuple[str, int]]
) -> None:
    folder = executable(tmp_path, works, ranks, cell, more=more, layers=layers)
    report = train_on(ranks, folder, save_gradients=tmp_path / "g.safetensors")
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(report["steps"][0]["loss"] - loss) <= 1e-9 * abs(loss)
    trained = {name for name, count in gradients.items() if count is not None}
    if more is ADAPTERS:
        trained = {n for n in trained if n.startswith("blocks.1.out") or n == "blocks.0.norm.weight"}
    assert_same_gradients(tmp_path / "g.safetensors", {n: g for n, g in gradients.items() if n in trained}, 1e-9)


def test_a_step_over_nccls_semantics_has_the_gradients_of_a_plain_loop(tmp_path: Path) -> None:
    """Gathers and reduce-scatters of a cell beside the cascades' own collectives, each host ahead of its device."""
    folder, saved = executable(tmp_path, BOTH, 4, 2, more=""), tmp_path / "g.safetensors"
    settings = Settings(eager=True, kernels=2, delay=1e-3)
    for counts in run_ranks(4, train_ncclish, folder, RunOptions(save_gradients=saved), settings):
        assert not counts.freed_in_flight and not counts.written_in_flight
        assert counts.connected_in_use == 0
    assert_same_gradients(saved, plain_loop(folder, CLIPS)[1])


@pytest.mark.parametrize(
    ("dtype", "dealt_out"),
    [
        slow("fp32", False, id="fp32-optimizer-in-each-cell"),
        slow("fp32", True, id="fp32-optimizer-over-cells"),
        slow("bf16", False, id="bf16-optimizer-in-each-cell"),
        pytest.param("bf16", True, id="bf16-optimizer-over-cells"),
    ],
)
def test_steps_clip_and_average_as_a_model_that_is_whole(tmp_path: Path, dtype: str, dealt_out: bool) -> None:
    training = Training(lr=1e-2, ema=0.9, dtype=dtype, clip_norm=0.5)  # type: ignore[arg-type]
    reports = []
    for cell in (1, 2):
        folder = executable(
            tmp_path / str(cell), BOTH, 4, cell, more="", training=training, dealt_out=dealt_out and cell > 1
        )
        reports.append(train_on(4, folder, steps=3, report=tmp_path / f"{cell}.json"))
    whole, in_cells = ([(s["loss"], s["gradient_norm"]) for s in report["steps"]] for report in reports)
    for (a, norm_a), (b, norm_b) in zip(whole, in_cells, strict=True):
        assert abs(a - b) <= (1e-5 if dtype == "fp32" else 2e-3) * abs(a)
        assert abs(norm_a - norm_b) <= (1e-4 if dtype == "fp32" else 2e-2) * norm_a


@pytest.mark.parametrize(
    ("before", "after"), [slow((4, 2), (2, 2)), slow((2, 2), (4, 4)), slow((4, 4), (2, 1)), ((2, 1), (4, 2))]
)
def test_a_checkpoint_resumes_with_other_cells_on_another_number_of_ranks(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    training = Training(lr=1e-2, ema=0.9, clip_norm=0.5)
    plans = {4: WHOLE_WORLD, 2: ONE_CELL}
    folders = [
        executable(tmp_path / str(at), plans[ranks], ranks, cell, training=training)
        for at, (ranks, cell) in enumerate((before, after))
    ]
    straight = train_on(before[0], folders[0], steps=3, report=tmp_path / "straight.json")
    train_on(before[0], folders[0], steps=1, checkpoint=tmp_path / "kept")
    train_on(after[0], folders[1], more=2, checkpoint=tmp_path / "kept", resume=True, report=tmp_path / "rest.json")
    whole = [step["loss"] for step in straight["steps"]]
    for resumed, expected in zip(losses(tmp_path / "rest.json"), whole[1:], strict=True):
        assert abs(resumed - expected) <= 1e-9 * abs(expected)


def test_a_checkpoint_of_an_optimizer_over_cells_resumes_in_each_cell_and_the_other_way_round(tmp_path: Path) -> None:
    training = Training(lr=1e-2, ema=0.9, clip_norm=0.5)
    over, apart = (
        executable(tmp_path / str(dealt_out), BOTH, 4, 2, training=training, dealt_out=dealt_out)
        for dealt_out in (True, False)
    )
    expected = losses_of(train_on(4, apart, steps=3, report=tmp_path / "straight.json"))
    train_on(4, over, steps=1, checkpoint=tmp_path / "kept")
    for folder, steps in ((apart, 1), (over, 1)):
        rest = train_on(4, folder, more=steps, checkpoint=tmp_path / "kept", resume=True, report=tmp_path / "r.json")
        losses, expected = losses_of(rest), expected[1:]
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-9)


def losses_of(report: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in report["steps"]]


def test_what_other_cells_have_updated_is_gathered_before_it_is_read_by_the_ranks_of_the_shard() -> None:
    module = lowered(in_cells(traced(4, [CLIPS]), 2, dealt_out=True), BOTH)
    gathers = [step for program in module.programs for step in program.instructions if step.op == "gather"]
    assert {step.peers for step in gathers} == {(0, 2), (1, 3)}
    checked(module)
    first, *others = module.programs
    without = tuple(step for step in first.instructions if step.op != "gather")
    elsewhere = tuple(replace(s, peers=(0, 1)) if s.op == "gather" else s for s in first.instructions)
    for instructions in (without, elsewhere):
        with pytest.raises(UserError):
            checked(replace(module, programs=(replace(first, instructions=instructions), *others)))
