"""What sparse attention takes, measured by length and density, as a plan's costs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from arachnec.cost.profile import Profile, fit_profile, read_profile, write_profile
from arachnec.cost.sparse_attention import choice_overhead, choice_time, speeds
from arachnec.cost.sparse_profile import (
    PARTS,
    AttentionTime,
    SparseProfile,
    fit_sparse,
    sparse_problem,
    with_measured_sparsity,
)
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Stage
from arachnec.ir.stage_sizes import formula_in
from arachnec.ir.values import Attributes, Formula, Term
from arachnec.profiling.sparse_kernels import DENSITIES, measure_sparse, sparse_grids

SQUARE, LINEAR = (("B", 1), ("S", 2)), (("B", 1), ("S", 1))


def timed(tokens: int, density: float) -> AttentionTime:
    """Sparse kernels at half and a quarter of the dense ones' speed."""
    pairs, kept = tokens**2 * 1e-6, tokens**2 * 1e-6 * density
    choice = 1e-8 * tokens**2 + 2e-5 * tokens + 0.1
    return AttentionTime(tokens, density, pairs, 2 * pairs, 2 * kept, 8 * kept + 1e-5 * tokens, choice)


RUNS = [timed(tokens, density) for tokens in (1024, 2048, 4096) for density in DENSITIES]


def stage() -> Stage:
    forward = Formula((Term(3e-6, SQUARE), Term(1e-3, LINEAR)), "ms")
    flops = Formula((Term(6e-6, SQUARE),), "TFLOP")
    density = (((0,), 1.0, (0.1, 0.2)),)
    return Stage("dit", True, Attributes.of(hidden=64, heads=2, forward=forward, flops=flops, density=density))


def test_a_fit_finds_what_the_times_were_made_of_and_a_plan_costs_what_was_measured() -> None:
    fit = fit_sparse(32, RUNS)
    assert all(abs(value) < 1e-3 for row in fit.residuals.values() for value in row)
    assert len(fit.residuals["forward"]) == len(RUNS)
    annotated = with_measured_sparsity(stage(), [fit], 1.0)
    assert speeds(annotated) == pytest.approx((0.5, 0.25, 1.0), rel=1e-3)
    for tokens in (2048, 8192):
        ms = choice_time(annotated, tokens, 0) + choice_overhead(annotated)
        assert ms == pytest.approx(2 * (1e-8 * tokens**2 + 3e-5 * tokens + 0.1), rel=1e-3)


def test_a_stage_with_other_heads_or_without_densities_stays_as_it_is() -> None:
    fit = fit_sparse(64, RUNS)
    assert with_measured_sparsity(stage(), [fit], 1.0) == stage()
    dense = Stage("dit", True, stage().attrs.updated(density=None))
    assert with_measured_sparsity(dense, [fit_sparse(32, RUNS)], 1.0) == dense


@pytest.mark.parametrize(("name", "per_pair"), [("forward", 0.0), ("flops", 0.0), ("forward", None)])
def test_a_stage_whose_attention_takes_no_time_says_nothing_of_what_a_flop_takes(
    name: str, per_pair: float | None
) -> None:
    """Without terms in S^2, or with none that counts; one without FLOPs takes what its time is of one."""
    terms = (Term(1e-3, LINEAR),) if per_pair is None else (Term(per_pair, SQUARE), Term(1e-3, LINEAR))
    bare = Stage("dit", True, stage().attrs.updated(**{name: Formula(terms, "ms")}))
    annotated = with_measured_sparsity(bare, [fit_sparse(32, RUNS)], 1.0)
    assert (annotated == bare) == (name == "forward")
    if name == "flops":
        choice = formula_in(annotated, "choice")
        assert choice is not None and choice.terms[0].coefficient == pytest.approx(1e-8 * 2 / 3e-6, rel=1e-3)


@pytest.mark.parametrize(("linear", "dense", "more"), [(13e-5, 8e-5, 5e-5), (8e-5, 13e-5, -2e-5), (8e-5, 9e-5, -1e-5)])
@pytest.mark.parametrize("heads", [1, 2])
def test_what_sparse_kernels_take_of_every_token_beyond_dense_ones_is_counted_with_the_choice(
    heads: int, linear: float, dense: float, more: float
) -> None:
    """Of both directions together, and never less than nothing."""
    coefficients = {
        "dense_forward": [1e-6, dense / 4, 0.0],
        "dense_backward": [2e-6, dense * 3 / 4, 0.0],
        "forward": [2e-6, linear / 3, 0.0],
        "backward": [4e-6, linear * 2 / 3, 0.0],
        "choice": [1e-8, 2e-5, 0.1],
    }
    of = Stage("dit", True, stage().attrs.updated(heads=heads, hidden=32 * heads))
    annotated = with_measured_sparsity(of, [SparseProfile(32, [], coefficients, {})], 1.5)
    for tokens in (2048, 8192):
        one = 1e-8 * tokens**2 + (2e-5 + more) * tokens
        assert choice_time(annotated, tokens, 0) == pytest.approx(heads * 1.5 * one)
    assert choice_overhead(annotated) == pytest.approx(heads * 1.5 * 0.1)
    assert speeds(annotated) == (0.5, 0.5, 1.0)


def test_a_profile_keeps_it_and_one_that_nothing_can_have_come_to_is_refused(tmp_path: Path) -> None:
    profile: Profile = fit_profile([], machine="here", device="cpu", sparsity=[fit_sparse(32, RUNS)])
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    text = (tmp_path / "profile.json").read_text().replace('"head_size": 32', '"head_size": 0')
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(UserError, match="heads of 0"):
        read_profile(tmp_path / "profile.json")
    with pytest.raises(ValueError, match="positive times"):
        fit_sparse(32, [])


def test_every_density_is_measured_on_clips_long_enough() -> None:
    cpu = torch.device("cpu")
    assert list(sparse_grids((8, 32, 32), cpu)) == [(4, 32, 32), (2, 32, 32), (1, 32, 32)]
    assert list(sparse_grids((2, 8, 8), cpu)) == []
    rows = measure_sparse((1, 32, 32), 1, 16, torch.float32, cpu)
    assert [row.tokens for row in rows] == [1024] * len(DENSITIES)
    assert all(abs(row.density - density) <= 1 / 16 for row, density in zip(rows, DENSITIES, strict=True))
    assert fit_sparse(16, rows).head_size == 16


def test_choosing_takes_as_much_of_every_clip_of_a_batch() -> None:
    annotated = with_measured_sparsity(stage(), [fit_sparse(32, RUNS)], 1.0)
    choice = formula_in(annotated, "choice")
    assert choice is not None
    for batch in (1, 2, 5):
        assert choice(B=batch, S=2048) == pytest.approx(batch * choice(B=1, S=2048))
    square, linear = choice.terms
    assert (dict(square.powers), dict(linear.powers)) == ({"B": 1, "S": 2}, {"B": 1, "S": 1})


@pytest.mark.parametrize(("value", "possible"), [
    (0.0, True), (1.7e308, True), (-5e-324, False), (math.inf, False), (-math.inf, False), (math.nan, False),
])  # fmt: skip
def test_a_coefficient_is_finite_and_not_less_than_nothing(value: float, possible: bool) -> None:
    fitted = fit_sparse(32, RUNS)
    for part in PARTS:
        for place in range(3):
            row = [value if at == place else known for at, known in enumerate(fitted.coefficients[part])]
            changed = SparseProfile(32, [], {**fitted.coefficients, part: row}, {})
            assert (sparse_problem(changed) is None) == possible
