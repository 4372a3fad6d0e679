"""Bytes that come from host memory and go there, held against counting layers, inputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.cost.host_memory import inputs_kept, reduce_copies, step_copies, with_host_copies
from arachnec.cost.profile import Measurement, exponent_of, find_undivided, fit_profile
from arachnec.cost.sparse_attention import coarse_groups, faster_sparse, head_weights, most_received, speeds
from arachnec.ir.head_density import LayerDensity
from arachnec.ir.nodes import Cascade, Instruction, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Term, Value
from arachnec.sparsity.head_shares import Share

PLACED = ("optimizer", "parameters", "inputs")
LAYERS, TOKENS = 4, 1001
PARAMETERS, TRAINED = [3 * 10**8] * LAYERS + [15 * 10**7], [2 * 10**8] * LAYERS + [10**8]
EVERY = (LAYERS, *range(LAYERS))


def stage(host: tuple[str, ...], **more: Value | None) -> Stage:
    attrs: dict[str, Value | None] = {
        "params": sum(PARAMETERS), "trained": sum(TRAINED), "dtype": "bf16", "gradients": "f32",
        "layers": tuple((f"blocks.{n}", TRAINED[n]) for n in range(LAYERS)), "layer_params": tuple(PARAMETERS[:LAYERS]),
        "host": host or None, "host_inputs": Formula((Term(3e-4, (("B", 1), ("S", 1))),), "GiB"),
    }  # fmt: skip
    return Stage("dit", True, Attributes.of(**{**attrs, **more}))


def pass_over(name: str, op: str, **lists: tuple[int, ...] | None) -> Instruction:
    return Instruction(op, name, (0,), Attributes.of(**lists))


def of(step: Instruction, word: str) -> int:
    value = step.attrs.get(word, 0)
    assert isinstance(value, int)
    return value


@pytest.mark.parametrize(
    "host", [(), ("optimizer",), ("optimizer", "parameters"), ("optimizer", "parameters", "inputs")]
)
@pytest.mark.parametrize("cell", [None, 2])
@pytest.mark.parametrize("side", [1, 2])
def test_a_rank_copies_layers_inputs_and_gradients(host: tuple[str, ...], cell: int | None, side: int) -> None:
    """Two cascades after each other; of the first one two blocks run again."""
    own, shards = stage(host, cell=cell), cell or 1
    saved = Attributes.of(recompute=2, degree=2, side=None if side == 1 else side)
    first = Cascade("a", Phase.TRAIN, "dit", (0, 1), 2, TOKENS, 0, (), saved)
    second = Cascade("b", Phase.TRAIN, "dit", (2,), 1, TOKENS, 0, (), Attributes.of(degree=1))
    cascades, blocks = {"a": first, "b": second}, tuple(range(LAYERS))
    steps = [
        pass_over("a", "forward", gather=EVERY), pass_over("a", "backward", gather=blocks, scatter=EVERY),
        pass_over("b", "forward", gather=EVERY), pass_over("b", "backward", gather=blocks, scatter=EVERY),
        Instruction("free", "a"),
    ]  # fmt: skip
    copied = with_host_copies(steps, cascades, {"dit": own})
    layers, inputs = "parameters" in host, "inputs" in host
    whole = round(sum(PARAMETERS) * 2 / shards) if layers else 0
    inner = round(sum(PARAMETERS[:LAYERS]) * 2 / shards) if layers else 0
    gradients = round(sum(TRAINED) * 4 / shards) if layers else 0
    clips, share = 2 // side, -(-TOKENS // 2) / TOKENS
    gib = 3e-4 * clips * TOKENS * share * 2 / LAYERS if inputs else 0.0
    kept = round(gib * 2**30)
    assert inputs_kept(first, own) == pytest.approx(gib)
    assert inputs_kept(second, own) == 0
    assert [of(step, "from_host") for step in copied] == [whole, inner + kept, whole, inner + gradients, 0]
    assert [of(step, "to_host") for step in copied] == [kept, gradients, 0, gradients, 0]
    assert [step.attrs.get("offload") for step in copied] == [(0, 1) if inputs else None, None, None, None, None]
    assert [step.attrs.get("reload") for step in copied] == [None, (0, 1) if inputs else None, None, None, None]
    assert ("host" in copied[0].attrs) == inputs
    assert copied[-1] is steps[-1]


def test_half_a_backward_takes_the_gradients_that_it_scatters() -> None:
    own = stage(("optimizer", "parameters", "inputs"))
    saved = Attributes.of(recompute=2, degree=1)
    cascades = {
        name: Cascade(name, phase, "dit", (0,), 1, TOKENS, 0, (), saved)
        for name, phase in (("f", Phase.FORWARD), ("b", Phase.BACKWARD), ("w", Phase.WEIGHT))
    }
    steps = [pass_over("b", "backward", gather=EVERY), pass_over("w", "weight", scatter=EVERY)]
    kept = round(3e-4 * TOKENS * 2 / LAYERS * 2**30)
    first, second = with_host_copies(steps, cascades, {"dit": own})
    assert (of(first, "from_host"), of(first, "to_host")) == (sum(PARAMETERS) * 2 + kept, 0)
    assert (of(second, "from_host"), of(second, "to_host")) == (0, sum(TRAINED) * 4)
    again = with_host_copies([*steps, *steps], cascades, {"dit": own})
    assert of(again[3], "from_host") == sum(TRAINED) * 4, "what is there already comes, to be added to"


def test_an_optimizer_in_the_host_gets_gradients_and_gives_parameters() -> None:
    beside = stage(("optimizer",), sharded=2, cell=4)
    own = sum(TRAINED) / 8
    assert step_copies(beside) == Attributes.of(from_host=round(own * 2), to_host=round(own * 4))
    assert step_copies(stage(("optimizer", "parameters"))) == step_copies(stage(())) == Attributes()
    both = Attributes.of(from_host=70, to_host=70)
    assert reduce_copies(stage(("optimizer", "parameters")), (0, 1), 70) == both
    assert reduce_copies(stage(("optimizer", "parameters")), (0,), 70) == Attributes()
    assert reduce_copies(beside, (0, 1), 70) == Attributes()


# -- sparse layers -----------------------------------------------------------------------------------------------------


def squares(unit: str, value: float) -> Formula:
    return Formula((Term(value, (("B", 1), ("S", 2))),), unit)


def sparse(**changed: Value | None) -> Stage:
    attrs: dict[str, Value | None] = {
        "heads": 2, "attentions": 1, "layers": (("blocks.0", 1),), "query_group": 256, "key_block": 64,
        "flops": squares("TFLOP", 2e-6), "forward": squares("ms", 1e-6), "backward": squares("ms", 3e-6),
        "sparse_speed": (0.5, 0.25, 0.125), "density": (((0,), 0.5, (0.1, 0.3)),),
    }  # fmt: skip
    return Stage("dit", True, Attributes.of(**{**attrs, **changed}))


def test_a_heads_work_is_its_forward_its_backward_and_the_choice() -> None:
    """In units of its dense forward: a backward is two; the choice is a part of the layer's share of all FLOPs."""
    density = LayerDensity(0.5, (0.1, 0.3))
    assert speeds(sparse()) == (0.5, 0.25, 0.125)
    assert speeds(sparse(sparse_speed=None)) == (1.0, 1.0, 1.0)
    assert head_weights(sparse(), density) == pytest.approx((0.1 * 10, 0.3 * 10))
    assert head_weights(replace(sparse(), trained=False), density) == pytest.approx((0.1 * 2, 0.3 * 2))
    choosing = sparse(choice=squares("TFLOP", 4e-9))
    extra = 4e-9 / (2e-6 * 0.5) / 0.125
    assert head_weights(choosing, density) == pytest.approx((0.1 * 10 + extra, 0.3 * 10 + extra))


@pytest.mark.parametrize(("share", "chosen"), [(0.9799, (0,)), (0.9801, ())])
def test_a_layer_is_sparse_where_that_saves_a_fiftieth(share: float, chosen: tuple[int, ...]) -> None:
    """Forward at half the speed, backward at a quarter: (1 / 0.5 + 3 / 0.25) / 4 = 3.5 times the density."""
    density = share / 3.5
    own = sparse(density=(((0,), 0.5, (density, density)),))
    assert faster_sparse(own, 4000, 0) == chosen


def test_the_rank_that_receives_most_has_queries_by_group_and_keys_by_density() -> None:
    """Two heads of 8 groups; one rank has all of a head, the others a half of the other, whose keys all come inside."""
    division = ((Share(0, 0, 8),), (Share(1, 0, 4),), (Share(1, 4, 8),))
    assert most_received(division, (0.5, 0.5), 8) == pytest.approx((1 + 1) / 4)
    assert most_received(division[1:], (0.5, 0.5), 8) == pytest.approx((0.5 + 1) / 4)
    assert [coarse_groups(count) for count in (1, 2, 3, 4, 7, 8, 9)] == [1, 2, 2, 4, 4, 8, 8]


# -- limits of what a profile says -------------------------------------------------------------------------------------


def test_an_exponent_lies_between_one_and_two_and_a_share_between_none_and_all() -> None:
    def profiled(power: float, fixed: float) -> float | None:
        runs = [Measurement(1, n, n // 8, 1, fixed + 1e-6 * n**power) for n in (1000, 2000, 4000, 8000)]
        return exponent_of(fit_profile([("dit", "forward", runs)], machine="m", device="cpu"), "dit")

    assert profiled(2.0, 0.0) == 2.0
    assert profiled(1.0, 0.0) == pytest.approx(1.0)
    assert 1.0 < (profiled(1.5, 0.0) or 0.0) < 2.0
    for shared, undivided in ((10.0, 0.0), (60.0, 0.2), (140.0, 1.0)):
        runs = [
            Measurement(1, 9, 0, 1, 100.0, sizes={"frames": 9}),
            Measurement(1, 9, 0, 2, shared, sizes={"frames": 9}),
        ]
        profile = fit_profile([("vae", "forward", runs)], machine="m", device="cpu")
        assert find_undivided(profile, "vae") == pytest.approx(undivided)
