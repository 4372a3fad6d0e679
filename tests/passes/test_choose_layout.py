"""The choice of layout: the shortest that fits, made once, and no more planned for it than must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arachnec.analysis.uses import Values
from arachnec.cluster.file import parse_cluster
from arachnec.cost.table import Rows
from arachnec.executable.folder import iteration_of
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Clip, Level, Module, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term
from arachnec.passes.choose_layout import ChooseLayout, applied, sample
from arachnec.passes.infra.pipeline import Pipeline, pass_in_layout
from arachnec.passes.schedule_stages import ScheduleStages
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.planning.layout_refusal import needed_gib
from arachnec.planning.layouts import BEHIND_ANCHORS, FAR, WORTH, Candidate, Layout, layouts, shortest
from arachnec.report import alternatives
from arachnec.simulation.events import Engine
from arachnec.views.explain import explain

BLOCKS = 8
PLANNED = "choose-layout,partition,annotate,schedule-z3{steps=20},place,bucket,lower,check"


def per_token(value: float, unit: str) -> Formula:
    return Formula((Term(value, (("B", 1), ("S", 1))),), unit)


def dit(params: int, kept: float) -> Stage:
    """Equal blocks of bf16; a clip of 1000 tokens keeps ``kept`` GiB of each, a tenth of it recomputed."""
    own, gib = params // BLOCKS, params / 2**30
    block, inputs = per_token(kept / 1000, "GiB"), per_token(kept / 10_000, "GiB")
    nothing, flops = per_token(0.0, "GiB"), per_token(2e-12 * own, "TFLOP")
    attrs = Attributes.of(
        params=params, dtype="bf16", layers=tuple((f"blocks.{i}", own) for i in range(BLOCKS)), hidden=1024,
        blocks=((Symbol("Block"), BLOCKS),), heads=8, attentions=BLOCKS, flops=per_token(2e-12 * params, "TFLOP"),
        saved=per_token(BLOCKS * kept / 1000, "GiB"), saved_recompute=per_token((BLOCKS + 10) * kept / 10_000, "GiB"),
        recomputing=block, traffic=per_token(1e-6, "GiB"), state=Quantity(20 * gib, "GiB"),
        optimizer=Quantity(16 * gib, "GiB"), classes=(0,) * BLOCKS, layer_params=(own,) * BLOCKS,
        block_flops=(flops,), block_saved=(block,), block_inputs=(inputs,), block_shared=(nothing,),
        block_workspace=(nothing,), block_traffic=(nothing,), block_attentions=(1,), block_heads=(8,),
        end_params=((0, 0), (0, 0)), end_flops=(per_token(0.0, "TFLOP"),) * 2, end_saved=(nothing, nothing),
        cuts=((BLOCKS - 1, per_token(2e-6, "GiB")),),
    )  # fmt: skip
    return Stage("dit", True, attrs)


def model(params: int, clips: int = 16, *, cluster: str = "1x8:h100-80g", kept: float = 1.0) -> Module:
    rows = tuple(Clip(n, 17, 256, 256, 64, 1000, Attributes.of(iteration=n % 2)) for n in range(clips))
    return Module("m", Level.TRACED, parse_cluster(cluster), rows, (dit(params, kept),))


def simulated(text: str, module: Module) -> float:
    lowered = Pipeline.parse(text).run(replace(module, clips=sample(module)[0]))
    assert lowered.cluster is not None
    engine = Engine(Values(lowered), lowered.cluster)
    engine.run()
    return max(interval.end for interval in engine.intervals)


def test_a_model_that_fits_with_room_to_spare_is_left_as_it_is() -> None:
    small = ChooseLayout().run(model(10**9))
    assert not {"layout", "tried"} & set(small.attrs)
    assert not {"cell", "sharded", "part_of"} & set(small.stages[0].attrs)


def test_links_too_slow_for_the_gradients_are_a_reason_to_look_at_other_layouts() -> None:
    """A billion parameters fit everywhere; over 0.2 GB/s their gradients take 75 s, activations between stages less."""
    module = model(10**9, clips=16, cluster="4x1:h100-80g")
    assert module.cluster is not None
    slow = replace(module.cluster, attrs=module.cluster.attrs.updated(inter=Quantity(0.2, "GB/s")))
    forced = simulated(
        PLANNED.replace("choose-layout", "choose-layout{layout=replicated}"), replace(module, cluster=slow)
    )
    assert simulated(PLANNED, replace(module, cluster=slow)) < 0.9 * forced


@pytest.mark.parametrize("cluster", ["1x4:h100-80g", "1x4:l20"])
def test_the_default_is_as_short_as_any_layout_that_is_forced(cluster: str) -> None:
    module = model(6 * 10**9, 8, cluster=cluster)
    default = simulated(PLANNED, module)
    forced = {}
    for layout in layouts(module):
        try:
            forced[layout.name] = simulated(PLANNED.replace("layout", f"layout{{layout={layout.name}}}", 1), module)
        except UserError:
            continue
    assert len(forced) > 2
    assert default <= min(forced.values()) * (1 + WORTH) + 1e-6


def test_a_choice_is_held_and_says_what_it_was_between() -> None:
    pipeline = Pipeline.parse(PLANNED)
    chosen = pipeline.run_model_part(model(14 * 10**9))
    names = {layout.name for layout in layouts(model(14 * 10**9))}
    told = alternatives(chosen)
    assert {row["layout"] for row in told} == names
    times = {row["layout"]: row["simulated_ms"] for row in told if row["simulated_ms"] is not None}
    assert chosen.attrs["layout"] in times
    assert times[str(chosen.attrs["layout"])] <= min(times.values()) * (1 + WORTH)
    for row in told:
        assert row["at_least_ms"] is None or row["at_least_ms"] >= min(times.values()) * (1 - WORTH)
    lowered = pipeline.run_iteration_part(iteration_of(chosen, 0))
    sentences = next(section.sentences for section in explain(lowered) if section.title == "Layout")
    assert all(any(f"`{name}`" in sentence for sentence in sentences) for name in names)
    fresh = model(14 * 10**9)
    held = pipeline.run_model_part(replace(fresh, attrs=fresh.attrs.updated(layout=chosen.attrs["layout"])))
    assert held.stages == chosen.stages


def test_a_bound_is_below_what_is_simulated() -> None:
    module = model(6 * 10**9, 4, cluster="2x2:l20")
    choose = ChooseLayout().informed(Pipeline.parse(PLANNED).passes[1:])
    compared, rows = 0, Rows()
    for layout in layouts(module):
        candidate = choose._candidate(module, layout, rows, {})
        try:
            simulated_ms = choose._planned_ms(candidate, rows)
        except UserError:
            continue
        assert candidate.costed == () or candidate.least_ms <= simulated_ms * (1 + 1e-9)
        compared += bool(candidate.costed)
    assert compared > 3, "layouts that fit"


def test_stages_are_scheduled_by_their_own_pass_and_all_else_by_the_one_that_the_pipeline_says() -> None:
    module, search = model(6 * 10**9), ScheduleZ3(steps=20)
    for layout in layouts(module):
        laid = applied(module, layout)
        assert pass_in_layout(search, laid) == (ScheduleStages(steps=20) if layout.stages > 1 else search)
        assert pass_in_layout(ScheduleStatic(), laid) == ScheduleStatic(), "nothing runs in place of another scheduler"


def test_the_sample_is_the_first_iteration_and_the_one_with_the_longest_clip() -> None:
    module = model(10**9, 6)
    assert [len(clips) for clips in sample(module)] == [3]
    longer = replace(module.clips[5], tokens=2000)
    assert sample(replace(module, clips=(*module.clips[:5], longer)))[1][-1] == longer


def test_what_fits_nowhere_is_refused_with_what_would_make_it_fit() -> None:
    module = model(2 * 10**9, 4, cluster="1x2:l20", kept=100.0)
    with pytest.raises(UserError) as raised:
        ChooseLayout().run(module)
    assert "fits in no layout" in str(raised.value)
    (refusal,) = raised.value.diagnostics
    assert "such machines, or devices of " in refusal.help
    assert module.cluster is not None
    most = int(refusal.help.split()[-2])  # "clips of at most 149 tokens"
    fitting, larger = (replace(module.clips[0], tokens=tokens) for tokens in (most, most + 1))
    assert needed_gib(module, module.cluster, fitting) <= 44.0 < needed_gib(module, module.cluster, larger)


def test_a_layout_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match="cells-3"):
        ChooseLayout(layout="cells-3").run(model(10**9))


times = st.floats(1, 100)


@dataclass(frozen=True)
class Row:
    """A layout that takes ``time``, and ``part`` of that at least."""

    time: float
    part: float
    fits: bool
    anchor: bool
    stages: int
    steps: int


def rows_above(part: float) -> st.SearchStrategy[Row]:
    parts = st.floats(part, 1)
    return st.builds(Row, times, parts, st.booleans(), st.booleans(), st.integers(1, 2), st.integers(0, 100))


rows = rows_above(0)
rows_equally_far = rows_above(1 / FAR)  # bounds about equally far from what is planned
BOUND_OF_ZERO = [Row(1, 0, False, False, 1, 0)] * 3 + [Row(1, 1, True, False, 1, 0), Row(2, 0, True, False, 1, 0)]


def equally_far(rows: list[Row]) -> bool:
    """Whether bounds of each kind that fit are about equally far from what is planned."""
    kinds = ([row.part for row in rows if row.fits and row.stages == stages] for stages in (1, 2))
    return all(max(parts) <= FAR * min(parts) for parts in kinds if parts)


def candidates_of(rows: list[Row]) -> list[Candidate]:
    return [
        Candidate(
            Layout(str(n), stages=row.stages),
            Module(str(n), Level.TRACED),
            row.time * row.part,
            steps=row.steps,
            anchor=row.anchor,
        )
        for n, row in enumerate(rows)
    ]


def planner(rows: list[Row], planned: list[int]) -> Callable[[Candidate], float]:
    def plan(candidate: Candidate) -> float:
        planned.append(int(candidate.layout.name))
        if not rows[planned[-1]].fits:
            raise user_error("fits in no layout")
        return rows[planned[-1]].time

    return plan


@given(st.lists(rows, min_size=1, max_size=8) | st.lists(rows_equally_far, min_size=1, max_size=8), st.integers(0, 800))
@example(BOUND_OF_ZERO, 0)
def test_the_shortest_is_found_and_no_anchor_is_much_shorter(rows: list[Row], steps: int) -> None:
    planned: list[int] = []
    choice = shortest(candidates_of(rows), planner(rows, planned), steps)
    fitting = [row.time for row in rows if row.fits]
    if not fitting:
        assert choice is None
        return
    assert choice is not None
    time = choice.times[choice.layout.name]
    for row in rows:
        if row.fits and row.anchor:
            assert time <= row.time * (1 + BEHIND_ANCHORS) + 1e-9
    if steps >= sum(row.steps for row in rows) and equally_far(rows):  # else what promises little may be left out
        assert time <= min(fitting) * (1 + WORTH) ** 2 + 1e-9
    assert len(planned) == len(set(planned))


@given(st.lists(rows, min_size=1, max_size=8), st.integers(0, 400))
def test_same_steps_give_the_same_choice_and_only_anchors_are_planned_beyond_them(rows: list[Row], steps: int) -> None:
    first: list[int] = []
    choice = shortest(candidates_of(rows), planner(rows, first), steps)
    second: list[int] = []
    assert shortest(candidates_of(rows), planner(rows, second), steps) == choice
    assert second == first
    fitted = [n for n, number in enumerate(first) if rows[number].fits]
    after_the_first_that_fits = first[fitted[0] + 1 :] if fitted else []
    spent = sum(rows[n].steps for n in first if not rows[n].anchor and n in after_the_first_that_fits)
    assert spent <= steps
