"""Programs whose rest is planned again: they begin as before, are proved, and end no later than without."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from arachnec.backends.simulator import simulate
from arachnec.ir.nodes import Module, Phase, integer, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.sampling import objective_of, outcomes_of, segment_of
from arachnec.lowering.continuation import begins_as
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.rounds import LEAST, PLANNING
from arachnec.planning.sampling.replan import replanned
from arachnec.planning.sampling.requests import SwitchForecast
from benchmarks.sampling.replanning import at_outcomes
from tests.planning.test_sampling_plan import SHAPES, request, requests, traced

PIPELINE = "segment{{length=2}},annotate,schedule-sampling{{policy={},steps=20}},place,rounds{{most=5,least=1us}},lower"
LATE = random.Random(0)  # its first choice of two is the second
TWICE = (  # a late segment is cut in two rounds, and by then an earlier one has a higher number
    [
        request(number, SHAPES[shape], steps=steps)
        for number, (shape, steps) in enumerate(((2, 1), (1, 1), (2, 1), (1, 7), (2, 9)))
    ],
    [*[SwitchForecast(0, 0, 0)] * 3, SwitchForecast(0, 5, 0), SwitchForecast(2, 2, 2)],
)


def rounds_of(module: Module) -> int:
    return max(cascade.round for cascade in module.cascades)


def known(module: Module, round: int, outcomes: dict[int, int]) -> dict[int, tuple[int, int]]:
    """What the segments before a round tell of the requests' switches."""
    windows = {}
    for clip in module.clips:
        least, most = outcomes_of(clip)[0], outcomes_of(clip)[-1]
        own = [c for c in module.cascades if c.round < round and clip.id in c.clips and c.phase is Phase.DENOISE]
        taken = max((segment_of(c)[1] + 1 for c in own if c.stage == "large"), default=0)
        k = outcomes[clip.id]
        windows[clip.id] = (k, k) if k <= taken else (min(most, max(least, taken + 1)), most)
    return windows


@given(requests(5), st.sampled_from(["search", "replica", "one-degree"]), st.integers(2, 4), st.randoms())
@example(drawn=([request(0, SHAPES[0], steps=1)], [SwitchForecast(0, 1, 0)]), policy="replica", gpus=2, rng=LATE)
@example(drawn=TWICE, policy="search", gpus=2, rng=LATE)
@settings(max_examples=5, deadline=None)
def test_a_program_planned_again_begins_as_before_and_is_proved(
    drawn: tuple[list[object], list[SwitchForecast]], policy: str, gpus: int, rng: random.Random
) -> None:
    module = Pipeline.parse(PIPELINE.format(policy)).run(traced(*drawn, gpus=gpus))  # type: ignore[arg-type]
    outcomes = {clip.id: rng.choice(outcomes_of(clip)) for clip in module.clips}
    round = 1
    while round <= rounds_of(module):
        again = checked(replanned(module, round, known(module, round, outcomes), length=2))
        assert parse_module(print_module(again)) == again
        for before, after in zip(module.programs, again.programs, strict=True):
            assert begins_as(after.instructions, before.instructions, round)
        simulate(at_outcomes(again, outcomes))
        module, round = again, round + 1
        assert round < 20


def test_every_round_fixes_something_and_late_switches_make_rounds_longer() -> None:
    """Planned for the least K, all switch as late as they can: a makespan of 6.6 times as long, on one of two ranks."""
    rows = [request(n, SHAPES[0], steps=9) for n in range(3)]
    module = Pipeline.parse(PIPELINE.format("one-degree")).run(traced(rows, [SwitchForecast(0, 9, 0)] * 3, gpus=2))
    early, lengths, round = quantity(module.attrs["makespan"]), [quantity(module.attrs["round"])], 1
    while round <= rounds_of(module):
        module = replanned(module, round, known(module, round, dict.fromkeys(range(3), 9)), length=2)
        assert any(cascade.round == round for cascade in module.cascades)
        lengths.append(quantity(module.attrs["round"]))
        assert lengths[-1] > 0.99 * quantity(module.attrs["makespan"]) / 5  # cuts add handoffs
        round += 1
    assert quantity(module.attrs["makespan"]) > 5 * early
    assert lengths == sorted(lengths) and lengths[-1] > 5 * lengths[0]
    assert round <= 15


def test_ranks_that_early_switches_leave_idle_are_used() -> None:
    """Of four long requests on two ranks two switch at once, planned for the middle: one rank would wait."""
    rows = [request(n, SHAPES[2], steps=20) for n in range(4)]
    forecasts = [SwitchForecast(0, 20, 10)] * 4
    module = Pipeline.parse(PIPELINE.format("replica")).run(traced(rows, forecasts, gpus=2))
    alone = {n: {c.ranks for c in module.cascades if n in c.clips} for n in range(4)}
    early = [n for n in range(4) if alone[n] == {(0,)}]
    outcomes = {n: 2 if n in early else 20 for n in range(4)}
    fixed = simulate(at_outcomes(module, outcomes)).makespan_ms
    round = 1
    while round <= rounds_of(module):
        module, round = replanned(module, round, known(module, round, outcomes), length=2), round + 1
    assert integer(module.clips[0].attrs["steps"]) == 20
    assert simulate(at_outcomes(checked(module), outcomes)).makespan_ms < 0.75 * fixed


def test_open_switches_are_planned_again_by_default_in_rounds_that_hide_it() -> None:
    rows = [request(n, SHAPES[2], steps=40) for n in range(4)]
    certain, uncertain = SwitchForecast.fixed(20), SwitchForecast(0, 40, 20)
    module = Pipeline.parse("generate").run(traced(rows, [certain] + [uncertain] * 3, gpus=2))
    assert quantity(module.attrs["round"]) >= max(LEAST, PLANNING * 3 * 40)
    assert rounds_of(module) == 1
    for named in ("replica", "one-degree", "two-pools", "large-only"):
        assert "round" not in Pipeline.parse(named).run(traced(rows, [uncertain] * 4, gpus=2)).attrs
    assert "round" not in Pipeline.parse("generate").run(traced(rows, [certain] * 4, gpus=2)).attrs


def test_plans_of_a_latency_have_no_rounds() -> None:
    """Planned again they would be judged by their makespan."""
    rows = [request(n, SHAPES[2], steps=40) for n in range(4)]
    passes = "segment,annotate,schedule-sampling{steps=20,objective=mean-latency},place,rounds{least=1us},lower,check"
    module = Pipeline.parse(passes).run(traced(rows, [SwitchForecast(0, 40, 20)] * 4, gpus=2))
    assert objective_of(module) == "mean-latency" and rounds_of(module) == 0


def test_what_is_planned_again_comes_no_later_for_requests_that_arrive_later() -> None:
    """Two long requests and two that arrive when these have switched at once: moments are counted from the round."""
    rows = [replace(request(n, SHAPES[2], steps=20), arrival=1.0 * (n > 1)) for n in range(4)]
    module = Pipeline.parse(PIPELINE.format("replica")).run(traced(rows, [SwitchForecast(0, 20, 10)] * 4, gpus=2))
    outcomes = {0: 2, 1: 20, 2: 2, 3: 20}
    fixed = simulate(at_outcomes(module, outcomes)).makespan_ms
    round = 1
    while round <= rounds_of(module):
        module, round = checked(replanned(module, round, known(module, round, outcomes), length=2)), round + 1
    assert all(cascade.start >= 1000.0 - 1e-3 for cascade in module.cascades if cascade.clips[0] > 1)
    assert simulate(at_outcomes(module, outcomes)).makespan_ms <= 1.01 * fixed
