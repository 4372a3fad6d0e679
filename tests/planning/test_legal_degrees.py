"""One set of legal degrees: no schedule that is accepted ends before the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, render_all
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.formulate import problem_of, with_times

TICK = 1e-3  # ms, by which the planner rounds every time up


def formula(unit: str, *terms: tuple[float, int]) -> Formula:
    return Formula(tuple(Term(value, (("S", power),) if power else ()) for value, power in terms), unit)


def costed(
    cluster: str, tokens: list[int], *, fixed: float = 0.0, traffic: float = 0.0, saved: float = 0.0, text: bool = False
) -> Module:
    """A train cascade for every count of tokens, and where asked for an encoder's before it."""
    dit = Stage(
        "dit",
        True,
        Attributes.of(
            heads=40,
            attentions=10,
            state=Quantity(4.0, "GiB"),
            forward=formula("ms", (1e-6, 2), (1e-2, 1), (fixed, 0)),
            backward=formula("ms", (2e-6, 2), (2e-2, 1), (2 * fixed, 0)),
            saved=formula("GiB", (saved, 1)),
            saved_recompute=formula("GiB", (saved / 10, 1)),
            traffic=formula("GiB", (traffic, 1)),
            costs="table",
        ),
    )
    vae = Stage("vae", False, Attributes.of(forward=formula("ms", (1e-3, 1)), costs="table"))
    clips = tuple(Clip(i, 17, 480, 832, 0, count) for i, count in enumerate(tokens))
    cascades: list[Cascade] = []
    for clip in clips:
        name = str(clip.id)
        if text:
            cascades.append(Cascade(f"e{name}", Phase.ENCODE, "vae", (clip.id,), 1, clip.tokens, 0))
        inputs = (f"e{name}",) if text else ()
        cascades.append(Cascade(name, Phase.TRAIN, "dit", (clip.id,), 1, clip.tokens, 0, inputs))
    stages = (vae, dit) if text else (dit,)
    return Module("m", Level.COSTED, parse_cluster(cluster), clips, stages, cascades=tuple(cascades))


def one_after_another(module: Module, degrees: dict[str, int]) -> Module:
    """A schedule of these degrees, every cascade as early as enough ranks are free."""
    cost = CostModel(module)
    free = [0.0] * cost.cluster.world
    times: dict[str, tuple[float, float]] = {}
    for cascade in module.cascades:
        degree = degrees[cascade.name]
        ms = cost.time(cascade, degree, recompute=cost.recompute_at(cascade, degree) or 0)
        free.sort()
        start = max(free[degree - 1], *(times[name][1] for name in cascade.inputs), 0.0)
        times[cascade.name] = start, start + ms
        free[:degree] = [start + ms] * degree
    return with_times(module, degrees, times)


def test_two_halves_of_130_gpus_are_planned_as_somebody_would_by_hand() -> None:
    """A node of 65 is legal, so the scheduler tries it and the bound knows it."""
    module = costed("2x65:h100-80g", [60_000, 60_000])
    by_hand = one_after_another(module, {"0": 65, "1": 65})
    planned = Pipeline.parse("schedule-z3{steps=1}").run(module)
    makespan = quantity(by_hand.attrs["makespan"])
    assert quantity(planned.attrs["makespan"]) <= makespan + 2 * TICK
    assert quantity(planned.attrs["bound"]) <= makespan + 2 * TICK


def test_a_degree_that_no_bound_knows_is_refused_with_its_neighbours() -> None:
    module = costed("2x65:h100-80g", [60_000, 60_000])
    with pytest.raises(UserError, match="degree 67 is not legal, nearest are 65 and 72"):
        one_after_another(module, {"0": 67, "1": 63})


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["2x65:h100-80g", "10x8:l20-48g", "100:cpu", "9x16:h20-96g"]),
    st.lists(st.sampled_from([70, 3000, 16_001, 90_000, 400_000]), min_size=1, max_size=4),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([0.0, 1e-4]),
    st.sampled_from([0.0, 1e-2]),
    st.booleans(),
    st.data(),
)
def test_no_schedule_that_is_accepted_ends_before_the_bound(
    cluster: str, tokens: list[int], fixed: float, traffic: float, saved: float, text: bool, data: st.DataObject
) -> None:
    """Of the planner as of a schedule by hand, at any degrees that are legal and fit."""
    module = costed(
        cluster, tokens, fixed=fixed, traffic=traffic, saved=saved if cluster != "100:cpu" else 0.0, text=text
    )
    cost = CostModel(module)
    fits = {
        cascade.name: [d for d in cost.legal_degrees(cascade) if cost.recompute_at(cascade, d) is not None]
        for cascade in module.cascades
    }
    if not all(fits.values()):
        return
    degrees = {name: data.draw(st.sampled_from(able)) for name, able in fits.items()}
    by_hand = one_after_another(module, degrees)
    makespan, bound = quantity(by_hand.attrs["makespan"]), quantity(by_hand.attrs["bound"])
    assert bound <= makespan * (1 + 1e-9)
    planned = Pipeline.parse("schedule-static{policy=one-degree}").run(module)
    assert quantity(planned.attrs["bound"]) <= makespan * (1 + 1e-9) + len(module.cascades) * TICK


def test_a_clip_of_a_stage_that_lists_smaller_degrees_is_not_called_too_large_for_its_cell() -> None:
    module = costed("2x4:h100-80g", [60_000])
    attrs = module.stages[0].attrs.updated(cell=4, degrees=(1, 2))
    module = replace(module, stages=(replace(module.stages[0], attrs=attrs),))
    with pytest.raises(UserError) as told:
        problem_of(module, CostModel(module))
    assert render_all(told.value.diagnostics) == (
        "error: clip 0 (60000 tokens, stage `@dit`) cannot be divided over the 4 ranks of a cell\n"
        "  help: a clip of this stage runs at degrees 1, 2 alone: give `shard-parameters` a smaller `cell`, "
        "let more such clips share a micro-batch, or leave `shard-parameters` out"
    )
