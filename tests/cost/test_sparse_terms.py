"""The terms that sparse layers add to a pass, and those that they leave: held against formulas written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.cost.compute import Compute, Load
from arachnec.cost.sparse_attention import SparseLoads, faster_sparse, head_weights
from arachnec.cost.strategy import Attention
from arachnec.ir.head_density import LayerDensity, layer_densities
from arachnec.ir.nodes import Cascade, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value
from tests.cost.test_sparse_attention import PAIRS, TOKENS, clip, formula, model, stage

ONE = Attention(1, 1)
SQUARE = TOKENS**2
# of one layer and clip, ms: a TFLOP takes 1 ms in these stages
CHOICE, CHOSEN, LEARNING, LEARNED = 1e-8 * SQUARE, 0.5, 3e-8 * SQUARE, 2.0
TERMS: dict[str, Value | None] = {
    "choice": formula("TFLOP", 1e-8), "choice_overhead": Quantity(CHOSEN, "ms"),
    "learning": formula("TFLOP", 3e-8), "learning_overhead": Quantity(LEARNED, "ms"),
}  # fmt: skip
FORWARD, BACKWARD = 1e-3 * TOKENS, 2e-3 * TOKENS  # what tokens take
SPARSE = 0.1 * SQUARE  # both layers at a tenth, in units of a formula's pairs


def compute(of: Stage) -> Compute:
    return Compute({"dit": of}, frozenset(), SparseLoads({"dit": of}))


def chosen(phase: Phase = Phase.TRAIN, **more: Value) -> Cascade:
    return replace(clip(sparse=(0, 1), **more), phase=phase)


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("recompute", [0, 1])
def test_lists_are_chosen_in_the_first_forward_alone_and_a_slower_device_takes_longer_for_all_but_launching(
    slowdown: float, trained: bool, recompute: int
) -> None:
    """Of a stage that does not train no predictor learns; of one that does each layer in every eighth step."""
    of = replace(stage(**TERMS), trained=trained)
    ahead, back = 1e-6 * SPARSE + FORWARD, 2e-6 * SPARSE + BACKWARD
    once = 2 * (CHOICE + CHOSEN) + (2 * (LEARNING + LEARNED) / 8 if trained else 0.0)
    again = recompute / 2 * (2.0 + slowdown * ahead)
    backward = again + 4.0 + slowdown * back
    first = 2.0 + slowdown * (ahead + once)
    expected = {
        Phase.TRAIN: (first, backward), Phase.FORWARD: (first, 0.0), Phase.BACKWARD: (0.0, backward),
    }  # fmt: skip
    for phase, halves in expected.items():
        took = compute(of).halves(chosen(phase), 1, ONE, recompute, (Load(slowdown),))
        assert took == pytest.approx(halves), phase
        assert compute(of).time(chosen(phase), 1, ONE, recompute, slowdown) == pytest.approx(sum(halves))


def test_of_a_split_backward_the_half_for_weights_takes_half_of_the_products_and_no_pairs() -> None:
    """Nothing is chosen for it, nor learned."""
    took = compute(stage(**TERMS)).halves(chosen(Phase.WEIGHT), 1, ONE, 0, (Load(3.0),))
    assert took == pytest.approx((0.0, (4.0 + 3.0 * BACKWARD) / 2))


@pytest.mark.parametrize("branches", [1, 2])
def test_every_step_of_sampling_chooses_keys_of_its_own(branches: int) -> None:
    """Four steps, of a clip for each prediction; launches once for all of them."""
    of = replace(stage(**TERMS), trained=False)
    cascade = chosen(Phase.DENOISE, steps=(3, 6), branches=branches)
    step = 2.0 + 3.0 * (branches * (1e-6 * SPARSE + FORWARD) + 2 * (branches * CHOICE + CHOSEN))
    assert sum(compute(of).halves(cascade, 1, ONE, 0, (Load(3.0),))) == pytest.approx(4 * step)


def test_captions_are_attended_to_in_full() -> None:
    """Pairs with the caption take what they take in a dense model; those of video tokens their tenth."""
    with_captions = Formula(
        (Term(1e-6, PAIRS), Term(1e-4, (("B", 1), ("S", 1), ("T", 1))), Term(1e-1, (("B", 1), ("T", 1)))), "ms"
    )
    of = compute(stage(forward=with_captions))
    dense, sparse = (replace(cascade, phase=Phase.FORWARD, text=50) for cascade in (clip(), clip(sparse=(0, 1))))
    captions = 1e-4 * TOKENS * 50 + 1e-1 * 50
    assert of.time(dense, 1, ONE, 0, 1.0) == pytest.approx(1e-6 * SQUARE + captions)
    assert of.time(sparse, 1, ONE, 0, 1.0) == pytest.approx(1e-6 * SPARSE + captions)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_layers_learn_on_the_ranks_that_have_their_heads_a_dense_one_evenly(degree: int) -> None:
    """One of two has turned sparse: it learns in every eighth step, the other in every sixteenth."""
    of = stage(measured=(((0,), 0.5, (0.1,) * 4),))
    load = SparseLoads({"dit": of}).of(chosen(), degree)
    assert load.learners == pytest.approx(1 / 8 + 1 / 16)
    assert load.learning == pytest.approx((1 / 8 + 1 / 16) / degree)
    assert (load.layers, load.choice, load.pairs) == (1, pytest.approx(1 / degree), pytest.approx(0.5))
    none = SparseLoads({"dit": of}).of(clip(), degree)
    assert (none.learning, none.learners, none.layers) == (0.0, 0.0, 0)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("part_of", [None, "model"])
def test_between_machines_only_a_whole_model_that_trains_sends_chosen_keys(trained: bool, part_of: str | None) -> None:
    """Four ranks, two on a machine, each with one head of two groups at a density of a hundredth."""
    of = replace(stage(((0.01,) * 4,) * 2, part_of=part_of), trained=trained)
    chosen_keys = 1.5 * (1 - 0.99 * 0.99)
    between = 1 / 8 + 7 / 8 * chosen_keys
    keys = 1 / 3 + 2 / 3 * between if trained and part_of is None else 1.0
    load = SparseLoads({"dit": of}, node=2).of(clip(600, sparse=(0, 1)), 4)
    assert load.received == pytest.approx(2 * (1 + keys) / (2 * 4))
    alone = SparseLoads({"dit": of}).of(clip(600, sparse=(0, 1)), 4)
    assert alone.received == pytest.approx(2 * (1 + 1) / (2 * 4)), "of one machine"


def test_without_formulas_of_flops_a_head_weighs_what_its_keys_do() -> None:
    """The choice is then no known part of it."""
    of = stage(flops=None, choice=formula("TFLOP", 1e-8), sparse_speed=(0.5, 0.25, 0.125))
    assert head_weights(of, LayerDensity(0.5, (0.1, 0.3))) == pytest.approx((0.1 * 10, 0.3 * 10))
    assert head_weights(Stage("dit", False, Attributes()), LayerDensity(0.5, (0.1, 0.3))) == pytest.approx((0.1, 0.3))


@pytest.mark.parametrize("dearer", range(4))
@pytest.mark.parametrize("known", [False, True])
def test_a_layer_is_sparse_where_choosing_and_its_share_of_learning_cost_less_than_pairs_that_go(
    dearer: int, known: bool
) -> None:
    """A layer's dense pairs take 2400 ms, a tenth of them stay, a fiftieth more must be saved. What has been measured
    does not count what is learned."""
    budget = 0.98 * 2400 - 240
    terms = [100.0, 100.0, 0.0 if known else 100.0, 0.0 if known else 100.0]  # each as it counts in one step
    for more, chosen_layers in ((-1.0, (0, 1)), (1.0, ())):
        shown = [*terms]
        shown[dearer] += budget - sum(terms) + more
        choice, launches, learning, learned = shown
        of = stage(
            choice=formula("TFLOP", choice / SQUARE), choice_overhead=Quantity(launches, "ms"),
            learning=formula("TFLOP", 8 * learning / SQUARE), learning_overhead=Quantity(8 * learned, "ms"),
        )  # fmt: skip
        measured = layer_densities(of) if known else None
        uncounted = known and dearer >= 2
        assert faster_sparse(of, TOKENS, 0, measured) == ((0, 1) if uncounted else chosen_layers)


@pytest.mark.parametrize("grid", [(4, 1), (2, 2), (1, 4)])
def test_heads_of_sparse_layers_are_dealt_out_to_all_ranks_whatever_the_grid(grid: tuple[int, int]) -> None:
    """Each of four ranks gets one head of four: a quarter of all queries, keys and values, and makes as much output.
    There and back in the forward, and in the backward."""
    sent = model(stage()).volumes(chosen(), Attention(*grid))
    assert sent.dealt == pytest.approx(2 * 1e-4 * TOKENS * 2**30 / 4)
    assert (sent.deals, sent.traded, sent.passed) == (2 * 2 * 2, 0.0, 0.0)


def test_a_layer_without_pairs_to_save_stays_dense() -> None:
    """Where choosing takes no time either: equal is not faster."""
    of = stage(forward=formula("ms", 0.0, 1e-3), backward=formula("ms", 0.0, 1e-3), choice=None)
    assert faster_sparse(of, TOKENS, 0) == ()
    assert faster_sparse(stage(choice=None), TOKENS, 0) == (0, 1)
