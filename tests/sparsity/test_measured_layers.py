"""What a step measured moves the class of every clip and the values over all lengths, in any order of cascades."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arachnec.checkpoint.class_states import ClassState
from arachnec.kernels.sparse.predictor import Projections
from arachnec.model_state.measured_layers import add_to, classes_after, for_length, means, no_totals, weights_of
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import LayerState, Measured, after

HEADS = 2
EMPTY = torch.empty(0), torch.empty(0)
STATE = LayerState(
    Site(0, HEADS, 4, None), Projections(torch.ones(HEADS, 4, 2), torch.ones(HEADS, 4, 2)), (0.5, 0.2), (0.6, 0.8)
)
clips = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(0.01, 1.0), st.sampled_from([0.25, 0.5])), min_size=1, max_size=6
)


def measured(share: float, heads: tuple[int, ...] = (0, 1)) -> Measured:
    """Of these heads, a density of ``share``; the second head's is half."""
    rows = torch.tensor([share, share / 2])[list(heads)]
    ones = torch.ones(len(heads))
    return Measured(ones, ones * 0.001, 1 - rows, rows, ones, ones, rows, ones, EMPTY, heads)


@given(clips, st.randoms())
def test_a_class_moves_by_its_own_clips_and_all_lengths_by_all(
    told: list[tuple[int, float, float]], rng: object
) -> None:
    totals, turned = no_totals(STATE).double(), no_totals(STATE).double()
    for tokens, share, weight in told:
        add_to(totals, as_double(measured(share)), tokens, weight)
    shuffled = sorted(told, key=lambda _: rng.random())  # type: ignore[attr-defined]
    for tokens, share, weight in shuffled:
        for head in (1, 0):  # as two ranks, each with a head
            add_to(turned, as_double(measured(share, (head,))), tokens, weight)
    torch.testing.assert_close(totals, turned)
    every = after(STATE, means(totals, EMPTY))
    weights = [weight for _, _, weight in told]
    of_all = sum(share * weight for _, share, weight in told) / sum(weights)
    assert every.densities == pytest.approx((0.9 * 0.6 + 0.1 * of_all, 0.9 * 0.8 + 0.05 * of_all))
    for length, state in classes_after(STATE, {}, totals).items():
        own = [(share, weight) for tokens, share, weight in told if length <= tokens < 2 * length]
        mean = sum(share * weight for share, weight in own) / sum(weight for _, weight in own)
        assert state.densities == pytest.approx((0.9 * 0.6 + 0.1 * mean, 0.9 * 0.8 + 0.05 * mean))
        assert state.spread == pytest.approx((mean, mean / 2))


def as_double(of: Measured) -> Measured:
    return Measured(*(x.double() if isinstance(x, torch.Tensor) else x for x in vars(of).values()))


@given(st.lists(st.tuples(st.integers(1024, 2047), st.floats(0.01, 1.0)), min_size=1, max_size=4))
def test_where_all_clips_are_of_one_class_it_has_the_values_of_all_lengths(told: list[tuple[int, float]]) -> None:
    state, classes = STATE, dict[int, ClassState]()
    for tokens, share in told:
        totals = no_totals(state)
        add_to(totals, measured(share), tokens, 0.5)
        classes, state = classes_after(state, classes, totals), after(state, means(totals, EMPTY))
    own = for_length(state, classes, 1500)
    assert (own.densities, own.sparsities) == (state.densities, state.sparsities)


def test_a_class_without_a_measurement_has_the_values_of_all_lengths_and_moves_from_them() -> None:
    known = {1024: ClassState((0.1, 0.1), (0.3, 0.3), (1.0, 1.0))}
    assert for_length(STATE, known, 4096) is STATE
    assert for_length(STATE, known, 2047).densities == (0.3, 0.3)
    totals = no_totals(STATE)
    add_to(totals, measured(0.2), 4096, 1.0)
    later = classes_after(STATE, known, totals)
    assert list(later) == [1024, 4096] and later[1024] == known[1024]
    assert later[4096].densities == pytest.approx((0.9 * 0.6 + 0.1 * 0.2, 0.9 * 0.8 + 0.1 * 0.1))


def test_a_class_of_which_a_head_was_not_measured_stays_as_it_is() -> None:
    totals = no_totals(STATE)
    add_to(totals, measured(0.2, (0,)), 4096, 1.0)
    add_to(totals, measured(0.2), 1024, 1.0)
    assert list(classes_after(STATE, {}, totals)) == [1024]
    assert weights_of(totals).tolist() == [2.0, 1.0]
