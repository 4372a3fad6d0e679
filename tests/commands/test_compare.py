"""``arachnec compare``: one table, one report and one drawing of several pipelines on the same clips."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from arachnec.backends.simulator import model_flops_utilization
from arachnec.cli import run
from arachnec.cluster.device_specs import DEVICE_SPECS
from arachnec.commands.compare import told_of_sparse
from arachnec.commands.tables import comparison_bars, comparison_table
from arachnec.driver import compare
from arachnec.ir.limits import MOST_DRAWN_RANKS
from arachnec.ir.nodes import Phase
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.views.timeline import Interval, Timeline
from arachnec.views.timeline_svg import Plan, draw_comparison
from tests.commands.small_model import MODEL

PIPELINES = ("data-parallel", "default", "same-bucket")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("compare")
    model, clips = folder / "model.py", folder / "clips.jsonl"
    model.write_text(MODEL)
    rows = [{"frames": f, "height": 32, "width": 48, "text_tokens": 8} for f in (65, 33, 33, 9, 5, 1)]
    clips.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, clips


def test_the_report_has_every_figure_and_the_drawing_every_pipeline(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "c.svg"
    command = ["compare", str(files[0]), "--data", str(files[1]), "--pipelines", ",".join(PIPELINES)]
    assert run([*command, "--cluster", "2:h100", "--json", "--svg", str(svg)]) == 0
    rows = json.loads(capsys.readouterr().out)["pipelines"]
    assert sorted(row["pipeline"] for row in rows) == list(PIPELINES)
    for row in rows:
        assert (row["clips_dropped"], row["clips_repeated"]) == (0, 0)
        assert row["iteration_ms"] >= row["makespan_ms"] >= row["bound_ms"] * (1 - 1e-6)
        assert 0 < row["mfu"] < 1
        assert 0 < row["peak_memory_gib"] <= row["memory_limit_gib"] == DEVICE_SPECS["h100-80g"].memory
    assert {row["pipeline"] for row in rows if row["original_clips"]} == {"data-parallel", "same-bucket"}
    words = [node.text for node in ET.parse(svg).iter() if node.text]
    assert all(sum(word == name for word in words) == 2 for name in PIPELINES)  # a bar and a chart each


def test_the_table_leaves_out_what_is_unknown_and_says_what_originals_do(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", str(files[0]), "--data", str(files[1]), "--pipelines", ",".join(PIPELINES)]
    assert run([*command, "--cluster", "2:cpu"]) == 0
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith(" default ") and "of" in line)
    assert "-" in row  # a CPU has no peak that anybody states
    assert "data-parallel drops what does not fill a batch" in said


def test_memory_is_held_against_the_fullest_device_where_devices_differ(files: tuple[Path, Path]) -> None:
    (only,), _ = compare(files[0], files[1], "1x1:h100+1x1:h20", {"default": Pipeline.parse("default")})
    held = only.simulation.peak_memory_gib
    fullest = max(range(2), key=held.__getitem__)
    limits = [DEVICE_SPECS[device].memory for device in ("h100-80g", "h20-96g")]
    assert only.report["memory_limit_gib"] == limits[fullest]
    swapped = dataclasses.replace(only.simulation, peak_memory_gib=held[::-1])
    assert dataclasses.replace(only, simulation=swapped).report["memory_limit_gib"] == limits[1 - fullest]


def test_mfu_counts_three_forwards_a_clip_and_no_recomputation(files: tuple[Path, Path]) -> None:
    pipeline = Pipeline.parse("data-parallel")
    (only,), _ = compare(files[0], files[1], "2:h100", {"data-parallel": pipeline})
    module, row = only.module, only.report
    flops = next(stage for stage in module.stages if stage.trained).attrs["flops"]
    needed = 3 * sum(flops(B=c.batch, S=c.tokens, T=c.text) for c in module.cascades if c.phase is Phase.TRAIN)
    peak = DEVICE_SPECS["h100-80g"].peak
    assert row["mfu"] == pytest.approx(needed / (row["iteration_ms"] / 1e3 * 2 * peak))
    assert model_flops_utilization(module, 2 * row["iteration_ms"]) == pytest.approx(row["mfu"] / 2)


def test_bars_are_as_long_as_the_times_and_mark_the_bound() -> None:
    times = {"a": (50.0, 60.0, 30.0), "b": (100.0, 120.0, 90.0)}
    rows = [
        {"pipeline": name, "makespan_ms": work, "iteration_ms": whole, "bound_ms": bound}
        for name, (work, whole, bound) in times.items()
    ]
    first, second, _ = comparison_bars(rows, 14 + 120)
    assert first == "a " + "█" * 30 + "│" + "█" * 19 + "░" * 10 + " 60 ms"
    assert second == "b " + "█" * 90 + "│" + "█" * 9 + "░" * 20 + " 120 ms"


def test_requests_are_compared_by_their_makespan_and_latency_and_a_bound_of_latency_is_no_mark_on_it() -> None:
    row = {"pipeline": "a", "makespan_ms": 50.0, "iteration_ms": 50.0, "bound_ms": 30.0, "objective": "mean-latency"}
    bar, legend = comparison_bars([row], 14 + 50, samples=True)
    assert bar == "a " + "█" * 50 + " 50 ms" and "all-reduce" not in legend
    figures = {"imbalance": 0.0, "mfu": None, "peak_memory_gib": 1.0, "memory_limit_gib": 2.0, "planning_ms": 1.0}
    table = comparison_table([{**row, **figures, "gap": 0.0, "mean_latency_ms": 33.0, "p95_latency_ms": 44.0}], True)
    headings = [str(column.header) for column in table.columns]
    assert headings[1] == "makespan" and headings[-2:] == ["latency", "95th"] and "iteration" not in str(table.title)
    assert [next(iter(column.cells)) for column in table.columns][-2:] == ["33 ms", "44 ms"]


def test_a_thousand_ranks_draw_as_few_rows_as_can_be_seen(files: tuple[Path, Path]) -> None:
    (only,), _ = compare(files[0], files[1], "2:h100", {"default": Pipeline.parse("default")})
    name = only.module.cascades[0].name
    lanes = tuple(Interval(rank, "forward", name, float(rank % 7), 10.0 + rank % 7) for rank in range(1000))
    text = draw_comparison("many", [Plan("many", only.module, Timeline("", lanes), 17.0, 17.0, 9.0)])
    assert text.count("<title>forward") <= MOST_DRAWN_RANKS
    with pytest.raises(ValueError, match="no plan"):
        draw_comparison("none", [])


def test_what_changes_the_result_says_so(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide.py"
    wide.write_text(MODEL.replace("Block(8)", "Block(32)").replace("16), 8,", "16), 32,"))
    command = ["compare", str(wide), "--data", str(files[1]), "--pipelines", "data-parallel,sparse"]
    assert run([*command, "--cluster", "2:cpu"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "keys of" in line]
    assert [line.split(":")[0] for line in told] == ["sparse attends to all keys of dit"]
    of_long = {"stage": "dit", "predicted_density": 0.1, "cascades": 1, "dense_cascades": 2}
    assert "10% of the keys of dit in 1 of 3 cascades" in told_of_sparse(of_long)
    assert "its gradients are others" in told_of_sparse(of_long | {"dense_cascades": 0})
