"""Profiles of a machine whose speeds are known: a fit gives back what the times were made of."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cost.profile import (
    GATHER,
    LEAST_LATENCY,
    MOST_GBS,
    OVERLAPPED,
    SCATTER,
    Collective,
    LinkProfile,
    Measurement,
    Profile,
    StageNotProfiled,
    Synchronisation,
    exponent_of,
    find_clip_time,
    find_undivided,
    fit,
    fit_all_reduce,
    fit_collective,
    fit_links,
    fit_profile,
    formula_of,
    only_length,
    predict,
    sent,
)
from arachnec.cost.sparse_profile import AttentionTime, fit_sparse
from arachnec.ir.diagnostic import UserError

SIZES = [(batch, tokens, text) for batch in (1, 3) for tokens in (500, 2000, 9000) for text in (16, 200)]
NAMES = ("B*S^2", "B*S*T", "B*S", "B*T", "B", "1")


def took(made_of: dict[str, float], batch: int, tokens: int, text: int, degree: int = 1) -> float:
    """ms, written out: what has S in it is divided over the ranks."""
    a, b, c, e, f, g = (made_of.get(name, 0.0) for name in NAMES)
    divided = a * batch * tokens**2 + b * batch * tokens * text + c * batch * tokens
    return divided / degree + e * batch * text + f * batch + g


def runs(made_of: dict[str, float]) -> list[Measurement]:
    return [Measurement(*sizes, 1, took(made_of, *sizes)) for sizes in SIZES]


@given(st.lists(st.floats(0.1, 2.0), min_size=6, max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_fit_gives_back_what_the_times_were_made_of(shares: list[float]) -> None:
    scales = (1e-6, 1e-5, 1e-2, 1e-2, 1.0, 3.0)
    made_of = dict(zip(NAMES, (share * scale for share, scale in zip(shares, scales, strict=True)), strict=True))
    result = fit(runs(made_of))
    assert result.coefficients == pytest.approx(made_of, rel=1e-5)
    assert result.residuals == pytest.approx([0.0] * len(SIZES), abs=1e-8)
    assert result.held_out == pytest.approx(0.0, abs=1e-6)
    formula = formula_of(result.coefficients)
    for batch, tokens, text in SIZES:
        assert formula(B=batch, S=tokens, T=text) == pytest.approx(took(made_of, batch, tokens, text), rel=1e-6)
        shared = Measurement(batch, tokens, text, 4, 1.0)
        assert predict(result.coefficients, shared) == pytest.approx(took(made_of, batch, tokens, text, 4), rel=1e-5)


@pytest.mark.parametrize(("made_of", "exponent"), [({"B*S^2": 1e-6}, 2.0), ({"B*S": 1e-2, "B": 5.0, "1": 3.0}, 1.0)])
def test_the_exponent_is_of_what_length_has_a_part_in(made_of: dict[str, float], exponent: float) -> None:
    alone = runs(made_of)
    assert fit(alone).exponent == pytest.approx(exponent, rel=1e-3)
    one_length = [Measurement(batch, 500, 16, 1, took(made_of, batch, 500, 16)) for batch in (1, 2, 3)]
    assert fit(one_length).exponent is None
    profile = fit_profile([("dit", "forward", alone), ("dit", "backward", one_length)], machine="m", device="cpu")
    assert exponent_of(profile, "dit") == pytest.approx(exponent, rel=1e-3), "the mean of those that are known"
    assert exponent_of(fit_profile([("dit", "forward", one_length)], machine="m", device="cpu"), "dit") is None
    assert [only_length(entry) for entry in profile.stages] == [None, 500]


def test_an_error_on_points_held_out_is_the_mean_of_each_predicted_from_the_others() -> None:
    three = [Measurement(1, tokens, 0, 1, ms) for tokens, ms in ((1000, 10.0), (2000, 20.0), (3000, 36.0))]
    errors = [
        abs(predict(fit([*three[:at], *three[at + 1 :]]).coefficients, run) - run.ms) / run.ms
        for at, run in enumerate(three)
    ]
    assert fit(three).held_out == pytest.approx(sum(errors) / 3)
    assert sum(errors) > 0.01
    assert fit(three[:2]).held_out is None


@given(st.floats(1.0, 500.0), st.floats(1.0, 200.0))
@settings(max_examples=25, deadline=None)
def test_latency_and_speed_of_links_are_what_shared_cascades_took_beyond_computing(us: float, gbs: float) -> None:
    made_of = {"B*S^2": 1e-6, "1": 3.0}
    shared = []
    for degree, messages, moved in ((2, 60, 3e8), (4, 120, 2e8), (4, 400, 5e7), (8, 30, 9e8)):
        ms = took(made_of, 1, 9000, 16, degree) + messages * us * 1e-3 + moved / (gbs * 1e6)
        shared.append(Measurement(1, 9000, 16, degree, ms, messages, moved))
    links = fit_links([(shared, made_of)])
    assert links is not None
    assert (links.latency, links.intra) == (pytest.approx(us, rel=1e-3), pytest.approx(gbs, rel=1e-3))
    assert sent(shared[0], links) == pytest.approx(60 * us * 1e-3 + 3e8 / (gbs * 1e6), rel=1e-3)
    assert fit_links([(shared, made_of)], LinkProfile(7.0, 9.0)) == links, "sizes differ: nothing plain is needed"
    assert sent(shared[0], None) == 0.0
    assert sent(Measurement(1, 9, 9, 1, 1.0), links) == 0.0
    free = [msgspec.structs.replace(run, ms=took(made_of, 1, 9000, 16, run.degree)) for run in shared]
    assert fit_links([(free, made_of)]) == LinkProfile(LEAST_LATENCY, MOST_GBS)
    coded = [msgspec.structs.replace(run, sizes={"frames": 9}) for run in shared]
    plain = LinkProfile(7.0, 9.0)
    assert fit_links([(coded, made_of)], plain) is plain, "what an encoder is slower by is its own"


def test_gradients_go_round_at_the_least_speed_that_was_measured() -> None:
    """2 (n-1)/n of the bytes in what is left of the time after 2 log2 n latencies, or half of it if that is less."""
    links = LinkProfile(latency=100.0, intra=50.0)
    ends = [Synchronisation("dit", 4, 10**9, 20.0, 1.0), Synchronisation("dit", 8, 10**9, 30.0, 1.0)]
    speeds = [2 * 3 / 4 * 1e9 / (20.0 - 0.4) / 1e6, 2 * 7 / 8 * 1e9 / (30.0 - 0.6) / 1e6]
    assert fit_all_reduce(links, ends) == pytest.approx(min(speeds))
    assert fit_all_reduce(links, ends[1:]) == pytest.approx(speeds[1])
    short = [Synchronisation("dit", 4, 10**6, 0.2, 1.0)]
    assert fit_all_reduce(links, short) == pytest.approx(2 * 3 / 4 * 1e6 / 0.1 / 1e6)
    assert fit_all_reduce(links, []) is None


def test_a_collective_is_a_latency_a_doubling_and_a_speed() -> None:
    """8 ranks: three steps of 20 us, 7/8 of the bytes at 40 GB/s; beside compute a quarter of that and no latency."""

    def run(op: str, size: int, beside: bool = True) -> Collective:
        moving = size * 7 / 8 / 40e6
        return Collective(op, 8, size, 0.06 + moving, moving / 4 + 0.06 if beside else None)

    rows = [run(GATHER, 10**9), run(GATHER, 8), run(GATHER, 10**6), run(SCATTER, 10**6, beside=False)]
    profile = Profile("m", "cpu", [], None, [], rows, [])
    latency, speed = fit_collective(profile, GATHER) or (0.0, 0.0)
    assert (latency, speed) == (pytest.approx(20.0, rel=1e-4), pytest.approx(40.0, rel=1e-4))
    overlapped = fit_collective(profile, OVERLAPPED[GATHER]) or (0.0, 0.0)
    assert overlapped == (pytest.approx(20.0, rel=1e-4), pytest.approx(160.0, rel=1e-3))
    assert fit_collective(profile, SCATTER) is None, "of one size"
    assert fit_collective(profile, OVERLAPPED[SCATTER]) is None


def test_of_an_encoder_what_is_not_divided_is_what_ranks_take_beyond_their_part() -> None:
    """100 ms alone, of which a fifth is not divided; two clips that were measured both ways, and one that was not."""
    links = LinkProfile(latency=1000.0, intra=1.0)
    sizes = [{"frames": 9}, {"frames": 17}]
    alone = [Measurement(1, 100, 0, 1, 100.0, sizes=sizes[0]), Measurement(1, 200, 0, 1, 140.0, sizes=sizes[0])]
    alone += [Measurement(1, 300, 0, 1, 200.0, sizes=sizes[1]), Measurement(2, 300, 0, 1, 999.0, sizes=sizes[1])]
    shared = [Measurement(1, 100, 0, 4, 120.0 * (0.2 + 0.8 / 4) + 3.0 + 2.0, 3.0, 2e6, sizes[0])]
    shared += [Measurement(1, 300, 0, 2, 200.0 * (0.4 + 0.6 / 2) + 1.0, 1.0, 0.0, sizes[1])]
    unknown = [Measurement(1, 300, 0, 2, 1.0, 1.0, 0.0, {"frames": 5})]
    profile = fit_profile([("vae", "forward", [*alone, *shared, *unknown])], machine="m", device="cpu", links=links)
    assert profile.links == links, "plain messages: an encoder says nothing of them"
    assert find_clip_time(profile, "vae", {"frames": 9, "height": 4}) == pytest.approx(120.0)
    assert find_clip_time(profile, "vae", {"frames": 17}) == pytest.approx(200.0)
    assert find_clip_time(profile, "vae", {"frames": 33}) is None
    assert find_undivided(profile, "vae") == pytest.approx((0.2 + 0.4) / 2)
    assert find_undivided(profile, "text") is None


@given(st.lists(st.floats(0.1, 3.0), min_size=10, max_size=10))
@settings(max_examples=20, deadline=None)
def test_attention_over_chosen_keys_is_fitted_part_by_part(shares: list[float]) -> None:
    """Dense a S^2 + b S, chosen c d S^2 + e S, prediction and choice f S^2 + g S + h."""
    a, b, a2, b2, c, e, c2, e2, f, g = shares
    times = []
    for tokens in (512, 1024, 4096, 16384):
        for density in (0.05, 0.2, 0.5):
            s, p = float(tokens), tokens**2 * 1e-3
            dense, chosen = (a * p + b * s, a2 * p + b2 * s), (c * density * p + e * s, c2 * density * p + e2 * s)
            times.append(AttentionTime(tokens, density, *dense, *chosen, f * p + g * s + 100.0))
    fitted = fit_sparse(64, times)
    expected = {
        "dense_forward": [a * 1e-3, b, 0.0], "dense_backward": [a2 * 1e-3, b2, 0.0], "forward": [c * 1e-3, e, 0.0],
        "backward": [c2 * 1e-3, e2, 0.0], "choice": [f * 1e-3, g, 100.0],
    }  # fmt: skip
    for part, right in expected.items():
        assert fitted.coefficients[part] == pytest.approx(right, rel=1e-4, abs=1e-9), part
        assert fitted.residuals[part] == pytest.approx([0.0] * len(times), abs=1e-3)
    for bad in ([], [msgspec.structs.replace(times[0], choice=0.0)]):
        with pytest.raises(ValueError, match="positive times"):
            fit_sparse(64, bad)


def test_bytes_that_took_no_time_travel_as_plain_messages_do() -> None:
    """The more bytes, the less it took: the rate comes to nothing, and is taken from messages that did nothing else."""
    made_of = {"1": 3.0}
    shared = [
        Measurement(1, 9000, 16, 2, 3.0 + messages * 0.01, messages, moved)
        for messages, moved in ((10, 9e8), (100, 8e8), (1000, 1e6))
    ]
    alone = fit_links([(shared, made_of)])
    beside = fit_links([(shared, made_of)], LinkProfile(7.0, 9.0))
    assert alone is not None and beside is not None
    assert alone.intra == MOST_GBS
    assert beside.intra == pytest.approx(9.0)


@pytest.mark.parametrize("times", [(0.0, 5.0), (5.0, 0.0), (-1.0, 5.0), ()])
def test_a_fit_wants_times_that_are_all_positive(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive times"):
        fit([Measurement(1, 100 * at + 100, 16, 1, ms) for at, ms in enumerate(times)])


def test_messages_without_bytes_have_a_latency_and_travel_as_plain_ones_or_as_fast_as_any() -> None:
    """20 us each, whatever else is computed."""
    shared = [
        ([Measurement(1, 9, 0, 2, ms + count * 0.02, count, 0.0)], {"1": ms}) for ms, count in ((3.0, 10), (9.0, 40))
    ]
    alone, beside = fit_links(shared), fit_links(shared, LinkProfile(7.0, 9.0))
    assert alone is not None and beside is not None
    assert (alone.latency, beside.latency) == (pytest.approx(20.0), pytest.approx(20.0))
    assert (alone.intra, beside.intra) == (MOST_GBS, pytest.approx(9.0))


def test_residuals_are_what_a_run_is_off_by_of_its_own_time_and_of_shared_ones_with_their_messages() -> None:
    """4 ms a run, however long it took."""
    took, text = (2.0, 4.0, 10.0), 7
    alone = [Measurement(1, 100, text, 1, ms) for ms in took]
    links = LinkProfile(latency=100.0, intra=2.0)
    clip = Measurement(1, 100, text, 2, 8.0, messages=5.0, moved=4e6, sizes={"frames": 1})
    (entry,) = fit_profile([("vae", "forward", [*alone, clip])], machine="m", device="cpu", links=links).stages
    computing, sending = predict(entry.fit.coefficients, clip), 5 * 0.1 + 4e6 / 2e6
    right = [(predict(entry.fit.coefficients, run) - run.ms) / run.ms for run in alone]
    assert entry.fit.residuals == pytest.approx([*right, (computing + sending - 8.0) / 8.0])
    assert sorted(abs(value) for value in right)[-1] > 0.1
    assert fit(alone).residuals == pytest.approx(right)


def test_a_fit_has_no_coefficient_that_is_nothing() -> None:
    coefficients = fit(runs({"B*S^2": 1e-6, "1": 3.0})).coefficients
    assert all(value > 0 for value in coefficients.values())
    assert {"B*S^2", "1"} <= {*coefficients} < {*NAMES}


def test_one_clip_whose_time_depends_on_its_text_gives_an_encoder_terms_of_it() -> None:
    rows = [(20.0, 10, {"text": 10}), (60.0, 30, {"text": 30}), (100.0, 50, {"frames": 9})]
    tokens = (900, 20, 300)
    mixed = fit(
        [Measurement(1, count, text, 1, ms, sizes=of) for count, (ms, text, of) in zip(tokens, rows, strict=True)]
    )
    assert mixed.coefficients["B*T"] == pytest.approx(2.0)


def test_a_stage_that_was_not_profiled_has_no_exponent_and_those_that_were_are_named() -> None:
    rows = [(name, "forward", [Measurement(1, 10, 0, 1, 1.0)]) for name in ("vae", "dit")]
    for known, names in ((rows, "`dit`, `vae`"), ([], "none")):
        with pytest.raises(UserError) as refused:
            exponent_of(fit_profile(known, machine="m", device="cpu"), "text")
        assert refused.value.diagnostics == (StageNotProfiled(None, "text", names),)


def test_a_fit_finds_small_parts_beside_large_ones_however_far_apart_clips_are() -> None:
    made_of = {"B*S^2": 3e-9, "B*S": 4e-5, "B*T": 2e-4, "B": 1e-3, "1": 5e-3}
    sizes = [(batch, tokens, text) for batch in (1, 2) for tokens in (1, 100, 10**4, 10**6) for text in (0, 1, 512)]
    rows = [Measurement(*size, 1, took(made_of, *size)) for size in sizes]
    coefficients = fit(rows).coefficients
    for name in NAMES:
        assert coefficients.get(name, 0.0) == pytest.approx(made_of.get(name, 0.0), rel=1e-6, abs=1e-12), name
