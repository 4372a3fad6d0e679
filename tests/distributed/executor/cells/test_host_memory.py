"""Parts of a model in host memory: gradients, steps and checkpoints are those of a model that lies on its devices.

On a CPU both sides are its memory; what crosses is copied, and counted, as on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.data.clip import VideoClip
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.host_placement import PLACED
from arachnec.ir.nodes import Module, integer
from arachnec.ir.values import Formula, Quantity, Term
from tests.distributed.executor.cells.test_cells import (
    ADAPTERS,
    AGAIN,
    BOTH,
    CLIPS,
    DOUBLE,
    FIRST,
    ONE_CELL,
    TIED,
    UNEVEN,
    ordered,
)
from tests.distributed.executor_cases import (
    Work,
    assert_same_gradients,
    losses,
    plain_loop,
    proved_executable,
    traced,
    train_on,
)
from tests.slow import quick, slow

PARAMETERS = 2707
LAYERS = (("blocks.0", 1284), ("blocks.1", 1284))
TIED_LAYERS = (("blocks.0", 1140), ("blocks.1", 1140))
ALONE = ordered(*(((number,), (0,)) for number in range(5)))
ALONE_AGAIN = ordered(*(((number,), (0,)) for number in range(5)), recompute=True)
ALONE_FIRST = ordered(*(((number,), (0,)) for number in range(5)), recompute=1)
APART = ordered(((0, 1), (0,)), ((2,), (1,)), ((3,), (0, 1)), ((4,), (1,)), recompute=True)


def in_host(
    module: Module, what: str, cell: int, layers: Sequence[tuple[str, int]], dtype: str, trained: int
) -> Module:
    listed = PLACED[: PLACED.index(what) + 1]
    size = 8 if dtype == "f64" else 4
    inputs = Formula((Term(2 * 12 * size / 2**30, (("B", 1), ("S", 1))),), "GiB")
    assert module.cluster is not None
    cluster = replace(module.cluster, attrs=module.cluster.attrs.updated(host_memory=Quantity(1.0, "GiB")))

    def placed(attrs: object) -> dict[str, object]:
        return {
            "layers": tuple(layers),
            "params": PARAMETERS if trained < 1000 else trained,
            "layer_params": tuple(1284 for _ in layers) if trained < 1000 else None,  # some are frozen
            "trained": trained,
            "dtype": dtype,
            "cell": cell if cell > 1 or len(listed) > 1 else None,
            "host": listed,
            "host_state": Quantity(1e-3, "GiB"),
            "host_inputs": inputs if what == "inputs" else None,
        }

    stages = tuple(replace(s, attrs=s.attrs.updated(**placed(s.attrs))) if s.trained else s for s in module.stages)  # type: ignore[arg-type]
    return replace(module, cluster=cluster, stages=stages)


def executable(
    folder: Path,
    works: Sequence[Work],
    world: int,
    what: str | None,
    cell: int = 1,
    *,
    more: str = DOUBLE,
    layers: Sequence[tuple[str, int]] = LAYERS,
    trained: int = PARAMETERS,
    training: Training | None = None,
    clips: Sequence[VideoClip] = CLIPS,
) -> Path:
    module = traced(world, [clips])
    if what is not None:
        module = in_host(module, what, cell, layers, "f64" if more else "f32", trained)
    return proved_executable(folder, module, works, clips, training=training, more=more)


def planned_bytes(folder: Path) -> tuple[int, int]:
    steps = [step for program in read_executable(folder).program.programs for step in program.instructions]
    from_host, to_host = (sum(integer(s.attrs.get(name, 0)) for s in steps) for name in ("from_host", "to_host"))
    return from_host, to_host


ADAPTER_LAYERS = (("blocks.0", 12), ("blocks.1", 156))


@pytest.mark.parametrize(
    ("ranks", "works", "what", "cell", "more", "layers", "trained"),
    [
        slow(1, ALONE, "optimizer", 1, DOUBLE, LAYERS, PARAMETERS, id="optimizer"),
        slow(1, ALONE, "parameters", 1, DOUBLE, LAYERS, PARAMETERS, id="one-rank"),
        pytest.param(2, ONE_CELL, "parameters", 1, DOUBLE, LAYERS, PARAMETERS, id="two-ranks-share-clips"),
        pytest.param(2, APART, "inputs", 1, DOUBLE, LAYERS, PARAMETERS, id="two-ranks-apart-and-together"),
        slow(4, BOTH, "parameters", 2, DOUBLE, LAYERS, PARAMETERS, id="cells"),
        slow(4, UNEVEN, "parameters", 2, DOUBLE, LAYERS, PARAMETERS, id="uneven-numbers-of-cascades"),
        pytest.param(4, AGAIN, "inputs", 2, DOUBLE, LAYERS, PARAMETERS, id="cells-and-inputs"),
        slow(4, FIRST, "inputs", 2, DOUBLE, LAYERS, PARAMETERS, id="inputs-of-one-block-of-two"),
        slow(1, ALONE_AGAIN, "inputs", 1, DOUBLE, LAYERS, PARAMETERS, id="inputs-of-all-blocks"),
        pytest.param(1, ALONE_FIRST, "inputs", 1, DOUBLE, LAYERS, PARAMETERS, id="inputs-of-the-first-block"),
        slow(1, ALONE_FIRST, "inputs", 1, ADAPTERS, ADAPTER_LAYERS, 168, id="most-are-frozen"),
        pytest.param(2, APART, "parameters", 1, ADAPTERS, ADAPTER_LAYERS, 168, id="most-are-frozen-on-two-ranks"),
        pytest.param(1, ALONE, "parameters", 1, TIED, TIED_LAYERS, PARAMETERS - 144, id="layers-share-a-weight"),
    ],
)
def test_gradients_are_those_of_a_plain_loop_and_the_planned_bytes_cross(
    tmp_path: Path,
    ranks: int,
    works: list[Work],
    what: str,
    cell: int,
    more: str,
    layers: Sequence[tuple[str, int]],
    trained: int,
) -> None:
    folder = executable(tmp_path, works, ranks, what, cell, more=more, layers=layers, trained=trained)
    report = train_on(ranks, folder, save_gradients=tmp_path / "g.safetensors")
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(report["steps"][0]["loss"] - loss) <= 1e-9 * abs(loss)
    if more is ADAPTERS:
        gradients = {n: g for n, g in gradients.items() if n.startswith("blocks.1.out") or n == "blocks.0.norm.weight"}
    assert_same_gradients(tmp_path / "g.safetensors", gradients, 1e-9)
    crossed = report["steps"][0]["from_host"], report["steps"][0]["to_host"]
    for bytes_crossed, bytes_planned in zip(crossed, planned_bytes(folder), strict=True):
        assert abs(bytes_crossed - bytes_planned) <= 0.01 * bytes_planned


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16"], "bf16"))
def test_steps_clip_and_average_as_a_model_on_its_devices(tmp_path: Path, dtype: str) -> None:
    training = Training(lr=1e-2, ema=0.9, dtype=dtype, clip_norm=0.5)  # type: ignore[arg-type]
    curves = []
    for what in (None, "optimizer", "parameters"):
        folder = executable(tmp_path / str(what), ONE_CELL, 2, what, more="", training=training)
        report = train_on(2, folder, steps=3, report=tmp_path / f"{what}.json")
        curves.append([(step["loss"], step["gradient_norm"]) for step in report["steps"]])
    for curve in curves[1:]:
        for (a, norm_a), (b, norm_b) in zip(curves[0], curve, strict=True):
            assert abs(a - b) <= (1e-5 if dtype == "fp32" else 2e-3) * abs(a)
            assert abs(norm_a - norm_b) <= (1e-4 if dtype == "fp32" else 2e-2) * norm_a


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, BOTH, "parameters", 2), (1, ALONE, "optimizer", 1)),
        slow((1, ALONE, "parameters", 1), (2, ONE_CELL, None, 1)),
    ],
)
def test_a_checkpoint_resumes_with_other_things_in_the_host(
    tmp_path: Path, before: tuple[int, list[Work], str, int], after: tuple[int, list[Work], str | None, int]
) -> None:
    training = Training(lr=1e-2, ema=0.9, clip_norm=0.5)
    folders = [
        executable(tmp_path / str(at), works, ranks, what, cell, more="", training=training)
        for at, (ranks, works, what, cell) in enumerate((before, after))
    ]
    straight = train_on(before[0], folders[0], steps=3, report=tmp_path / "straight.json")
    train_on(before[0], folders[0], steps=1, checkpoint=tmp_path / "kept")
    train_on(after[0], folders[1], more=2, checkpoint=tmp_path / "kept", resume=True, report=tmp_path / "rest.json")
    whole = [step["loss"] for step in straight["steps"]]
    for resumed, expected in zip(losses(tmp_path / "rest.json"), whole[1:], strict=True):
        assert abs(resumed - expected) <= 1e-6 * abs(expected)
