"""Schedules go to torch and come back; every way to write a bad one has its own error, with its place."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import Diagnostic, Span, UserError
from arachnec.pipelining.action import Action, PipelineSchedule
from arachnec.pipelining.csv_format import from_csv, read_csv, require_valid, to_csv
from arachnec.pipelining.schedules import interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tests.pipelining.torch_orders import Stage, orders_of, planned, schedules


@pytest.mark.parametrize(
    ("kind", "v", "ours"),
    [
        ("Interleaved1F1B", 2, interleaved_1f1b(2, 4, 2)),
        ("ZBVZeroBubble", 2, zb_v(2, 4)),
        ("InterleavedZeroBubble", 1, zb_h1(2, 4)),
    ],
)
@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
def test_what_torch_writes_is_read(kind: str, v: int, ours: PipelineSchedule, format: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    planned(kind, 2, v, 4)._dump_csv(file, format=format)
    text = file.read_text()
    assert ("REDUCE_GRAD" in text and "SEND_F" in text) == (format == "compute_comms")
    assert from_csv(text, "schedule.csv", stages=2 * v, micro_batches=4) == ours


def test_the_printed_tables_with_their_reduce_grad_are_read() -> None:
    printed = schedules.ScheduleGPipe(Stage(0, 3, 3, 0), 4)._get_pipeline_order()
    text = "\n".join(",".join("" if cell is None else str(cell) for cell in printed[rank]) for rank in range(3))
    assert "0REDUCE_GRAD" in text
    assert from_csv(text, "gpipe.csv").micro_batches == 4


@pytest.mark.parametrize(("kind", "v"), [("Interleaved1F1B", 2), ("InterleavedZeroBubble", 1), ("DualPipeV", 2)])
def test_torch_reads_what_is_written(kind: str, v: int, tmp_path: Path) -> None:
    """As ``compute_only``, checked and lowered by torch itself."""
    theirs = planned(kind, 2, v, 4)
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    ours = from_csv((tmp_path / "theirs.csv").read_text(), "theirs.csv")
    (tmp_path / "ours.csv").write_text(to_csv(ours))
    before = {rank: [a for a in order if a is not None] for rank, order in theirs.pipeline_order.items()}
    theirs.pipeline_order = {}
    theirs._load_csv(tmp_path / "ours.csv")
    assert theirs.pipeline_order == before


def test_dual_pipe_v_keeps_its_pairs(tmp_path: Path) -> None:
    planned("DualPipeV", 2, 2, 6)._dump_csv(tmp_path / "dual.csv", format="compute_only")
    schedule = from_csv((tmp_path / "dual.csv").read_text(), "dual.csv", stages=4, micro_batches=6)
    assert schedule.overlapped
    assert from_csv(to_csv(schedule), "again.csv") == schedule
    for order in schedule.orders:
        for action, after in pairwise(order):
            assert action not in schedule.overlapped or (action.kind, after.kind) == ("F", "B")


def test_all_of_torchs_classes_are_valid() -> None:
    for kind, v in (("LoopedBFS", 3), ("InterleavedZeroBubble", 2), ("Interleaved1F1B", 4)):
        require_valid(orders_of(planned(kind, 4, v, 8)), 4 * v, 8)


GOOD = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
TOO_LARGE = ", more than "  # no place is told
BAD = {
    "": "the schedule has no action",
    "0F0,0X1\n": "is no action of a pipeline schedule",
    "0F0,(0F1;0F2)OVERLAP_F_B\n": "is no action of a pipeline schedule",
    "0F0,(0B0;0B1)OVERLAP_F_B\n": "is no action of a pipeline schedule",
    "0F0,(0F1;what)OVERLAP_F_B\n": "is no action of a pipeline schedule",
    "0F0,(what;0B0)OVERLAP_F_B\n": "is no action of a pipeline schedule",
    "0F0,(;)OVERLAP_F_B\n": "is no action of a pipeline schedule",
    "0F0,0F1,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n": "stands twice",
    "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n": "stage 0 has no backward of micro-batch 1",
    "0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n": "stage 1 has no forward of micro-batch 1",
    "0F0,0F1,0B0,0I1\n1F0,1B0,1F1,1B1\n": "stage 0 has no weight gradient of micro-batch 1",
    "0F0,0F1,0B0,0W1\n1F0,1B0,1F1,1B1\n": "stage 0 has no activation gradient of micro-batch 1",
    "0F0,0F1,0B0,0B1\n2F0,2B0,2F1,2B1\n": "no rank runs stage",
    "0F0,0B0,1F0\n1B0\n": "is on rank",
    "0F0,0B0,0I0,0W0\n": "both a whole and a split backward",
    "0B0,0F0\n": " before ",
    "0F0,0W0,0I0\n": " before ",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n": "the schedule deadlocks",
    "0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n": "has no action",
    "0F0,0B0,0F999999999,0B999999999\n": "of micro-batch 1",
    "999999999F0,999999999B0\n": "no rank runs stage",
    "0F0\n" * 5000: TOO_LARGE,
    "," * 2**21: TOO_LARGE,
}


def refusal(text: str, **expected: int) -> tuple[Diagnostic, ...]:
    with pytest.raises(UserError) as refused:
        from_csv(text, "bad.csv", **expected)
    return refused.value.diagnostics


def test_one_mistake_is_one_message() -> None:
    assert len(refusal("0F0,0F1,0B0,0B1,1F0\n1F0,1B0,1F1,1B1\n")) == 1  # a whole stage on another rank
    assert len(refusal("0F0,0B0,0I0,0W0\n")) == 1  # a whole backward and both halves


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_bytes(bytes(range(128, 256)))
    with pytest.raises(UserError, match="is no text"):
        read_csv(tmp_path / "orders.csv")


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:40]))
def test_every_mistake_has_its_own_error_and_a_remedy(text: str) -> None:
    diagnostics = refusal(text)
    assert BAD[text] in diagnostics[0].message
    assert all(diagnostic.help for diagnostic in diagnostics)
    if BAD[text] != TOO_LARGE:
        assert diagnostics[0].span is not None


def test_a_good_one_is_good() -> None:
    assert from_csv(GOOD, "good.csv", 2, 2).orders[1][0] == Action(1, "F", 0)
    assert from_csv(GOOD.replace("\n", "\r\n").replace("0F1", '"0F1" '), "quoted.csv") == from_csv(GOOD, "good.csv")


@pytest.mark.parametrize("expected", [{"stages": 3}, {"micro_batches": 4}])
def test_a_schedule_for_others_is_refused(expected: dict[str, int]) -> None:
    (diagnostic,) = refusal(GOOD, **expected)
    assert diagnostic.message.startswith("the schedule is for 2 ")


@given(st.data())
def test_any_two_actions_that_change_places_are_refused_or_run_to_the_end(data: st.DataObject) -> None:
    """Against a plain simulation that stops where nothing moves."""
    schedule = data.draw(st.sampled_from([one_f_one_b(3, 4), interleaved_1f1b(2, 4, 2)]))
    rank = data.draw(st.integers(0, len(schedule.orders) - 1))
    order = list(schedule.orders[rank])
    a, b = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    order[a], order[b] = order[b], order[a]
    orders = [*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]]
    text = to_csv(PipelineSchedule(tuple(orders)))
    try:
        from_csv(text, "swapped.csv")
        runs = True
    except UserError:
        runs = False
    assert runs == _reaches_the_end(orders)


def _reaches_the_end(orders: list[tuple[Action, ...]]) -> bool:
    """By trying every rank again and again until nothing moves."""
    stages = 1 + max(action.stage for order in orders for action in order)
    left = [list(order) for order in orders]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for order in left:
            while order:
                stage, kind, micro_batch = order[0]
                needs = [Action(stage - 1, "F", micro_batch)] if kind == "F" and stage else []
                if kind == "B":
                    needs = [Action(stage, "F", micro_batch)]
                    needs += [Action(stage + 1, "B", micro_batch)] if stage + 1 < stages else []
                if not done.issuperset(needs):
                    break
                done.add(order.pop(0))
                moved = True
    return not any(left)


def test_a_long_row_of_backwards_without_forwards_is_refused_by_looking_at_every_action_once() -> None:
    """50,000 of them: time that grew with the square of it would be hours."""
    text = ",".join(f"0B{number}" for number in range(50_000)) + "\n"
    with pytest.raises(UserError, match="stage 0 has no forward of micro-batch 0"):
        from_csv(text, "bad.csv")


def test_a_byte_order_mark_is_no_part_of_the_first_action(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert read_csv(path).micro_batches == 1


def test_a_message_points_at_the_word_that_is_no_action() -> None:
    """Row and first column from 1, and the column behind it; where there is no row the beginning of the text."""
    text = '0F0,what,0B0\n\n1F0,  "no" ,is\n'
    with pytest.raises(UserError) as refused:
        from_csv(text, "x.csv")
    rows = text.splitlines()
    spans = [problem.span for problem in refused.value.diagnostics]
    shown = []
    for span in spans:
        assert span is not None and span.line == span.end_line
        shown.append((span.line, rows[span.line - 1][span.column - 1 : span.end_column - 1]))
    assert shown == [(1, "what"), (3, "no"), (3, "is")]
    with pytest.raises(UserError) as empty:
        from_csv("", "x.csv")
    assert [problem.span for problem in empty.value.diagnostics] == [Span("x.csv", 1, 1, 1, 2, "")]


def test_a_row_without_actions_is_pointed_at_by_its_first_column() -> None:
    (empty,) = refusal("0F0,0B0\n,,\n")
    assert (empty.message, empty.span) == ("rank 1 has no action", Span("bad.csv", 2, 1, 2, 2))
