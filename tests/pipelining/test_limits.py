"""What is exactly as large as a limit, or just beyond: files, bytes held, messages that take no time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining import csv_format, profile_file
from arachnec.pipelining.evaluate import StageTimes
from arachnec.pipelining.order_problem import OrderProblem, lower_bound
from arachnec.pipelining.pipeline_model import (
    LayerCosts,
    PipelineInstance,
    PipelinePlan,
    bottleneck_of,
    order_problem,
    performance,
)
from arachnec.pipelining.schedules import one_f_one_b

NODE = "node1 -- Conv -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=4.0\n"


@pytest.mark.parametrize(
    ("module", "limit", "text"),
    [
        (csv_format, "LARGEST_DATA", csv_format.to_csv(one_f_one_b(2, 4))),
        (profile_file, "LARGEST_PROFILE", NODE),
    ],
)
def test_a_file_may_be_as_large_as_the_limit_and_no_larger(
    module: ModuleType, limit: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    read = module.read_csv if module is csv_format else module.read_profile_file
    monkeypatch.setattr(module, limit, len(text))
    read(file)
    monkeypatch.setattr(module, limit, len(text) - 1)
    with pytest.raises(UserError, match="more than"):
        read(file)


@pytest.mark.parametrize("limit", ["MOST_CELLS", "MOST_SCHEDULE_RANKS"])
def test_a_schedule_may_have_as_many_rows_and_cells_as_the_limits_and_no_more(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = csv_format.to_csv(one_f_one_b(2, 4))
    rows = text.splitlines()
    size = len(rows) if limit == "MOST_SCHEDULE_RANKS" else sum(len(row.split(",")) for row in rows)
    monkeypatch.setattr(csv_format, limit, size)
    assert csv_format.from_csv(text, "x.csv").micro_batches == 4
    monkeypatch.setattr(csv_format, limit, size - 1)
    with pytest.raises(UserError, match=f"more than {size - 1}"):
        csv_format.from_csv(text, "x.csv")


# -- messages ----------------------------------------------------------------------------------------------------------


def pipeline_of(outputs: tuple[float, ...], latency: float = 0) -> PipelineInstance:
    """A layer a rank, each of forward 2, gradients of 3 and 1; bytes of 4 kept and 10 of state."""
    layers = tuple(LayerCosts(2, 3, 1, 4, 10, output) for output in outputs)
    ranks = len(layers)
    return PipelineInstance(layers, 2, (1.0,) * ranks, (40.0,) * ranks, bandwidth=2, latency=latency)


def test_messages_take_time_where_one_of_them_does() -> None:
    """The first cut hands on nothing, the second 8 bytes: 4 ms."""
    instance = pipeline_of((0, 8, 5))
    times = order_problem(instance, (1, 1, 1), (0, 1, 2)).times
    assert times.send_forward == times.send_backward == [[0, 0], [4, 4]]
    assert times.forward == [[2, 2]] * 3
    costs = performance(instance, PipelinePlan((1, 1, 1), (0, 1, 2), one_f_one_b(3, 2)))
    assert costs.communication == (0, 8, 8), "of two micro-batches, the way there and the way back"
    assert costs.memory == (18, 18, 14)
    assert order_problem(pipeline_of((0, 0, 5)), (1, 1, 1), (0, 1, 2)).times.send_forward == ()
    late = order_problem(pipeline_of((0, 8, 5), latency=3), (1, 1, 1), (0, 1, 2)).times
    assert late.send_forward == [[3, 3], [7, 7]]


def test_the_bottleneck_is_what_costs_most() -> None:
    """A step of 20 on two ranks that work 12 and 6: 3 for an uneven spread, what is exposed, and the bubble."""

    def named(exposed: float, busy: tuple[float, float] = (12, 6), *, overfull: bool = False) -> str:
        return bottleneck_of(20, busy, (1, 1), exposed, overfull=overfull)

    assert named(0) == "bubble"
    assert named(3.9) == "bubble"
    assert named(4.1) == "communication"
    assert named(4.1, (18, 2)) == "compute"
    assert named(4.1, overfull=True) == "memory"


def test_a_memory_that_is_just_full_is_no_bottleneck() -> None:
    """The first rank holds the state of its layer and two micro-batches."""
    instance = pipeline_of((0, 0))
    plan = PipelinePlan((1, 1), (0, 1), one_f_one_b(2, 2))
    full = replace(instance, memory=(18.0, 40.0))
    assert performance(full, plan).memory == (18, 14)
    assert performance(full, plan).bottleneck != "memory"
    assert performance(replace(instance, memory=(17.9, 40.0)), plan).bottleneck == "memory"


# -- bytes held --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "bound"), [(6.0, 3 * 8), (5.0, 12), (4.0, 9.6)])
def test_micro_batches_of_which_one_fits_run_one_after_another(saved: float, bound: float) -> None:
    """Three micro-batches of 2 + 2 + 2 + 2 over two stages, the first of which holds 10 bytes."""
    rows = [[2.0] * 3] * 2
    problem = OrderProblem(StageTimes(rows, rows, [[0.0] * 3] * 2), [[saved] * 3, [0.0] * 3], [10.0, 99.0], (0, 1))
    assert lower_bound(problem, split=False) >= bound


@pytest.mark.parametrize(("limit", "saved", "bound"), [(0.0, 0.0, 0.05), (1.0, 0.6, 3 * 0.04), (10.0, 6.0, 3 * 0.04)])
def test_a_limit_of_nothing_bounds_nothing_and_any_other_what_it_holds(
    limit: float, saved: float, bound: float
) -> None:
    """Three micro-batches of 0.01 + 0.01 + 0.01 + 0.01 over two stages."""
    rows = [[0.01] * 3] * 2
    problem = OrderProblem(StageTimes(rows, rows, [[0.0] * 3] * 2), [[saved] * 3, [0.0] * 3], [limit, 99.0], (0, 1))
    assert bound <= lower_bound(problem, split=False) <= 3 * 0.04 + 1e-9
    if not limit:
        assert lower_bound(problem, split=False) < 3 * 0.04
