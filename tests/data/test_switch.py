"""Switch rules: what each means, that K follows from a trace alone, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.data.switch import Switch, parse_switch, smoothed, switched_at
from arachnec.ir.diagnostic import UserError, render

TIMES = [1000.0, 900.0, 600.0, 300.0]


def test_fixed_is_a_number_of_steps_and_boundary_a_share_of_the_noise() -> None:
    assert parse_switch("fixed=3").bounds(TIMES) == (3, 3)
    assert parse_switch("fixed=9").bounds(TIMES) == (4, 4)
    assert parse_switch("boundary=0.9").bounds(TIMES) == (2, 2)  # at the boundary it is the first model's
    assert parse_switch("boundary=0").bounds(TIMES) == (4, 4)
    assert parse_switch("boundary=1").bounds([999.0]) == (0, 0)


def test_adaptive_waits_for_the_mean_of_three_within_its_limits() -> None:
    rule = parse_switch("adaptive=0.2,least=3,most=6")
    distances = [math.nan, 0.1, 0.1, 0.6, 0.05, 0.05, 0.05, 0.05]
    assert switched_at(rule, distances, 10) == 3
    assert switched_at(parse_switch("adaptive=0.2,least=4"), distances, 10) == 7
    assert switched_at(parse_switch("adaptive=0.2,least=4,most=6"), distances, 10) == 6
    assert switched_at(parse_switch("adaptive=0"), distances, 8) == 8
    assert switched_at(parse_switch("adaptive=9,least=0"), distances, 8) == 2  # the first step has no predecessor
    assert smoothed([0.5, 0.1, 0.2, 0.3]) == pytest.approx(0.2)


rules = st.builds(
    lambda x, least, more: Switch("adaptive", x, least, least + more),
    st.floats(0, 1), st.integers(0, 6), st.integers(0, 6),
)  # fmt: skip


@given(rule=rules, distances=st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_k_lies_within_the_bounds_and_needs_no_later_step_of_the_trace(rule: Switch, distances: list[float]) -> None:
    k = switched_at(rule, distances, 8)
    least, most = rule.bounds([0.0] * 8)
    assert least <= k <= most
    assert switched_at(rule, distances[:k], 8) == k


@pytest.mark.parametrize("text", ["fixed=3", "boundary=0.875", "adaptive=0.1,least=2,most=9", "adaptive=0.1,least=1"])
def test_a_rule_reads_as_it_is_printed(text: str) -> None:
    assert str(parse_switch(text)) == text
    assert parse_switch(str(parse_switch(text))) == parse_switch(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("boundary=1.5", "a boundary lies in [0, 1]"),
        ("boundary=-1", "a number of at least 0"),
        ("fixd=3", "did you mean `fixed=...`?"),
        ("fixed=1.5", "give a whole number"),
        ("fixed", "did you mean `fixed=...`?"),
        ("adaptive=0.1,least=5,most=3", "`most` is under `least`, 5"),
        ("fixed=3,least=5", "`least` has no place in it"),
        ("adaptive=nan", "a number of at least 0"),
    ],
)
def test_another_text_is_refused(text: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_switch(text)
    assert part in render(caught.value.diagnostics[0])
