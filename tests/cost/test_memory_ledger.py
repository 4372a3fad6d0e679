"""What a cascade holds, phase by phase, held against a list of what is on its ranks while it runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.memory import RESERVE, inputs_gone, stages_apart
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage
from arachnec.ir.parameter_cells import gathered_gib, scattered_gib, whole_gib
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value

BLOCKS = 4
PER_TOKEN = {  # GiB for each token of each clip, all different, so that nothing passes for another
    "saved": 1.01e-3, "saved_recompute": 3.1e-4, "recomputing": 1.7e-4, "workspace": 5.3e-5, "shell": 7.1e-5,
    "batch": 1.3e-5, "output": 2.3e-5, "host_inputs": 4.1e-5,
}  # fmt: skip
ALWAYS = {"workspace": 0.31, "shell": 0.17, "batch": 0.07}  # GiB that no size of the clip changes


def formula(name: str) -> Formula:
    terms = (Term(PER_TOKEN[name], (("B", 1), ("S", 1))),)
    return Formula(terms + ((Term(ALWAYS[name]),) if name in ALWAYS else ()), "GiB")


def stage(name: str = "dit", trained: bool = True, **more: Value | None) -> Stage:
    attrs: dict[str, Value | None] = {formula_name: formula(formula_name) for formula_name in PER_TOKEN}
    attrs |= {
        "layers": tuple((f"blocks.{number}", 10**7) for number in range(BLOCKS)), "params": 5 * 10**7, "dtype": "bf16",
        "heads": 12, "attentions": BLOCKS, "state": Quantity(10.0, "GiB"),
    }  # fmt: skip
    return Stage(name, trained, Attributes.of(**{**attrs, **more}))


VAE = Stage("vae", False, Attributes.of(state=Quantity(1.0, "GiB"), output=formula("output")))


def model(cascade: Cascade, of: Stage, *others: Cascade, cluster: str = "2x8:h100-80g") -> CostModel:
    stages, cascades = (VAE, of), (*others, cascade)
    clips = tuple(Clip(number, 17, 480, 832, 0, 1000) for number in cascade.clips)
    return CostModel(Module("m", Level.COSTED, parse_cluster(cluster), clips, stages, (), cascades))


def at(name: str, clips: int, tokens: float, share: float) -> float:
    """GiB of one formula on a rank that has this share of the tokens."""
    return PER_TOKEN[name] * clips * tokens * share + ALWAYS.get(name, 0.0)


def freed(clips: int, tokens: int, share: float, blocks: int, inputs_in_host: bool) -> float:
    """GiB that recomputing so many blocks takes off what is kept: blocks save alike."""
    kept_by_all = at("saved_recompute", clips, tokens, share)
    if inputs_in_host:  # all but two blocks' inputs are in the host
        kept_by_all -= at("host_inputs", clips, tokens, share) * (BLOCKS - 2) / BLOCKS
    return (at("saved", clips, tokens, share) - kept_by_all) * blocks / BLOCKS


@given(
    st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT, Phase.TRAIN]), st.integers(1, 8),
    st.sampled_from([1, 2, 3, 8]), st.sampled_from([1000, 1001, 5000]), st.integers(0, BLOCKS), st.booleans(),
    st.sampled_from([None, 2]), st.sampled_from([1, 2, 4]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_cascade_holds_what_its_phase_needs(
    phase: Phase, clips: int, degree: int, tokens: int, blocks: int, inputs_in_host: bool, cell: int | None, side: int
) -> None:
    """Without ``head`` and ``recomputing`` of a train cascade: what is there at the end of its forward."""
    clips *= side
    host = ("optimizer", "parameters", "inputs") if inputs_in_host else None
    of = stage(cell=cell, host=host, **({"recomputing": None} if phase is Phase.TRAIN else {}))
    encoder = Cascade("e", Phase.ENCODE, "vae", tuple(range(clips)), clips, tokens, 0)
    cascade = Cascade("c", phase, "dit", encoder.clips, clips, tokens, 0, ("e",))
    cost = model(cascade, of, encoder)
    own, share = clips // side, math.ceil(tokens / degree) / tokens
    handed = 0.0 if phase in (Phase.BACKWARD, Phase.WEIGHT) else at("output", clips, tokens, 1.0)
    if phase in (Phase.BACKWARD, Phase.WEIGHT):  # a stage's gradient is as large as what the stage puts out
        handed = at("output", clips, tokens, 1.0) / side
    ledger = [handed]
    if phase is Phase.WEIGHT:
        ledger += [scattered_gib(of)]
    else:
        ledger += [gathered_gib(of), at("workspace", own, tokens, share)]
    if phase in (Phase.FORWARD, Phase.TRAIN):
        ledger += [at("saved", own, tokens, share), -freed(own, tokens, share, blocks, inputs_in_host)]
        ledger += [at("shell", own, tokens, 1.0) - at("shell", own, tokens, share), at("batch", own, tokens, 1.0)]
    if phase is Phase.FORWARD:
        ledger += [at("output", clips, tokens, 1.0) / side]
    if blocks and phase is Phase.FORWARD:  # the block that runs again is whole in the backward only
        ledger += [-at("recomputing", own, tokens, share) * blocks / BLOCKS]
    if blocks and phase is Phase.BACKWARD:
        ledger += [at("recomputing", own, tokens, share)]
    ranks = degree * side
    held = cost.memory(cascade, ranks, blocks, side)
    assert held == pytest.approx(sum(ledger))
    kept = held - at("workspace", own, tokens, share) - gathered_gib(of)
    assert cost.kept(cascade, ranks, blocks, side) == pytest.approx(kept)
    in_host = at("host_inputs", own, tokens, share) * blocks / BLOCKS
    wanted = in_host if inputs_in_host and phase is not Phase.WEIGHT else 0.0
    assert cost.host_inputs(cascade, ranks, blocks, side) == pytest.approx(wanted)


@given(
    st.integers(1, 4), st.sampled_from([1, 2, 3]), st.sampled_from([1000, 1001]), st.integers(0, BLOCKS),
    st.sampled_from([None, 1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 4, 20]), st.sampled_from([0.5, 3]),
    st.sampled_from([0.1, 5]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_cascade_that_trains_holds_the_fuller_of_the_end_of_its_forward_and_a_block_run_again(
    own: int, degree: int, tokens: int, blocks: int, cell: int | None, side: int, again: float, head: float, loss: float
) -> None:
    """Behind the last block whole sequences are alive. They are gone when a block runs again, where what later blocks
    kept gives it room: a walk through both moments."""
    names = "optimizer", "parameters", "inputs"
    times = {"recomputing": again, "head": head, "alive": head + loss}
    values = {name: PER_TOKEN.get(name, 1e-4) * factor for name, factor in times.items()}
    formulas = {name: Formula((Term(value, (("B", 1), ("S", 1))),), "GiB") for name, value in values.items()}
    of = stage(
        cell=cell,
        host=names if cell else None,
        recomputing=formulas["recomputing"],
        head=(formulas["head"], formulas["alive"]),
    )
    encoder = Cascade("e", Phase.ENCODE, "vae", tuple(range(own * side)), own * side, tokens, 0)
    cascade = Cascade("c", Phase.TRAIN, "dit", encoder.clips, own * side, tokens, 0, ("e",))
    whole, local = own * tokens, own * math.ceil(tokens / degree)
    gone = PER_TOKEN["host_inputs"] * local * (BLOCKS - 2) / BLOCKS if cell else 0.0
    rerun = values["recomputing"] * local
    block = (PER_TOKEN["saved"] - PER_TOKEN["saved_recompute"]) * local + rerun + gone
    kept = PER_TOKEN["saved"] * local + PER_TOKEN["shell"] * (whole - local)
    for _ in range(blocks):
        kept -= block / BLOCKS
    work = PER_TOKEN["workspace"] * local + ALWAYS["workspace"]
    forward = kept + max(work, (values["alive"] - values["head"]) * whole) + whole_gib(of)
    backward = kept - values["head"] * whole + work + gathered_gib(of)
    if blocks:
        backward += max(0.0, rerun - sum(block / BLOCKS for _ in range(BLOCKS - blocks)))
    batch, handed = at("batch", own, tokens, 1.0), at("output", own * side, tokens, 1.0)
    held = model(cascade, of, encoder).memory(cascade, degree * side, blocks, side)
    assert held == pytest.approx(handed + batch + max(forward, backward))


@pytest.mark.parametrize("known", ["head", "recomputing"])
def test_where_the_two_moments_are_not_both_known_the_end_of_the_forward_counts(known: str) -> None:
    more: dict[str, Value | None] = {"recomputing": None, "head": None}
    more |= {known: formula("recomputing") if known == "recomputing" else (formula("output"), formula("saved"))}
    cascade = Cascade("c", Phase.TRAIN, "dit", (0,), 1, 1000, 0)
    parts = [at(name, 1, 1000, 0.5) for name in ("saved", "workspace")]
    parts += [at("shell", 1, 1000, 1.0) - at("shell", 1, 1000, 0.5), at("batch", 1, 1000, 1.0)]
    assert model(cascade, stage(**more)).memory(cascade, 2) == pytest.approx(sum(parts))


@pytest.mark.parametrize(("phase", "head"), [(Phase.FORWARD, None), (Phase.TRAIN, None), (Phase.TRAIN, "head")])
def test_where_a_stage_does_not_say_what_stays_of_recomputed_blocks_all_stays(phase: Phase, head: str | None) -> None:
    more = {"head": (formula("output"), formula("saved"))} if head else {"recomputing": None}
    cascade = Cascade("c", phase, "dit", (0,), 1, 1000, 0)
    cost = model(cascade, stage(saved_recompute=None, **more))
    assert cost.memory(cascade, 2, 2) == pytest.approx(cost.memory(cascade, 2))


@given(st.integers(1, 6), st.integers(1, 9), st.booleans(), st.sampled_from([Phase.ENCODE, Phase.DECODE]))
@settings(max_examples=60, deadline=None)
def test_an_encoders_ranks_need_room_for_the_busiest_ones_clips(
    clips: int, ranks: int, divides: bool, phase: Phase
) -> None:
    tokens = 1000
    held = Formula((Term(2e-5, (("B", 1), ("S", 1))),), "GiB")
    coder = stage("coder", False, divides=8 if divides else None, held=held if divides else None)
    encoder = Cascade("e", Phase.ENCODE, "vae", tuple(range(clips)), clips, tokens, 0)
    cascade = Cascade("c", phase, "coder", encoder.clips, clips, tokens, 0, ("e",))
    cost = model(cascade, coder, encoder)
    own = math.ceil(clips / ranks)
    room = at("workspace", own, tokens, 1.0)
    if divides and ranks > clips:  # all of them on one clip after the other
        whole = min(room, 2e-5 * own * tokens)
        room = whole + (room - whole) / ranks
    handed = at("output", clips, tokens, 1.0)
    received = handed if phase is Phase.DECODE else 0.0
    assert cost.memory(cascade, ranks) == pytest.approx(received + room + handed)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
@settings(max_examples=40, deadline=None)
def test_a_step_of_sampling_holds_all_branches_of_its_side(branches: int, side: int, degree: int) -> None:
    """Every prediction is a clip of its own to the model; the latents that come in are shared."""
    if branches % side:
        return
    tokens, own = 1000, branches // side
    encoder = Cascade("e", Phase.ENCODE, "vae", (0,), 1, tokens, 0)
    sampled = Attributes.of(branches=branches, steps=(0, 4))
    cascade = Cascade("c", Phase.DENOISE, "dit", (0,), 1, tokens, 0, ("e",), sampled)
    cost = model(cascade, stage(trained=False), encoder)
    share = math.ceil(tokens / degree) / tokens
    ledger = [at("output", 1, tokens, 1.0), at("output", 1, tokens, 1.0), at("workspace", own, tokens, share)]
    ledger += [at("shell", own, tokens, 1.0), at("batch", own, tokens, 1.0)]
    assert cost.memory(cascade, degree * side, 0, side) == pytest.approx(sum(ledger))


def test_a_rank_has_room_for_what_state_the_next_batch_and_the_reserve_leave() -> None:
    cascade = Cascade("c", Phase.TRAIN, "dit", (0, 1), 2, 1000, 0)
    cost = model(cascade, stage())
    prepared = at("batch", 2, 1000, 1.0)
    memory = cost.cluster.memory
    assert cost.resident == pytest.approx(11.0)
    assert cost.prepared == pytest.approx(prepared)
    assert cost._memory.reserve(memory) == pytest.approx(max(RESERVE * memory, cost._memory.communicators))
    assert cost.room == pytest.approx(memory - 11.0 - prepared - cost._memory.reserve(memory))
    assert cost.room_on(None, 4) == pytest.approx(cost.room)
    assert cost.spare(memory) == pytest.approx(cost._memory.reserve(memory) - cost._memory.communicators)


def test_a_module_without_stages_holds_nothing() -> None:
    empty = CostModel(Module("m", Level.COSTED, parse_cluster("2x8:h100-80g")))
    assert (empty.resident, empty.prepared) == (0.0, 0.0)


def test_small_devices_keep_the_communicators_free_where_they_are_more_than_the_share() -> None:
    cascade = Cascade("c", Phase.TRAIN, "dit", (0,), 1, 1000, 0)
    memory = model(cascade, stage())._memory
    assert memory.reserve(1e-3) == memory.communicators > 0
    assert memory.spare(1e-3) == 0
    assert memory.reserve(1e6) == RESERVE * 1e6


def test_where_devices_differ_room_is_that_of_the_ranks_or_of_those_with_most() -> None:
    cascade = Cascade("c", Phase.TRAIN, "dit", (0,), 1, 1000, 0)
    cost = model(cascade, stage(), cluster="1x2:h100-80g+1x2:l20")
    large, small = (cost.cluster.attrs["mixed"][row][2].value for row in (0, 1))  # type: ignore[index, union-attr]
    taken = 11.0 + at("batch", 1, 1000, 1.0)

    def room(memory: float) -> float:
        return memory - taken - cost._memory.reserve(memory)

    assert cost.room_on((0, 1), 2) == pytest.approx(room(large))
    assert cost.room_on((1, 2), 2) == pytest.approx(room(small))
    assert cost.room_on(None, 2) == pytest.approx(room(large))
    assert cost.room_on(None, 3) == pytest.approx(room(small))
    assert cost.room_on((0,), 1, "vae") == cost.room_on((0,), 1)


def test_parts_of_a_pipeline_and_sampling_models_lie_where_their_cascades_run() -> None:
    parts = tuple(stage(f"dit_{number}", part_of="dit", state=Quantity(4.0 + number, "GiB")) for number in range(2))
    cascades = tuple(Cascade(f"c{n}", Phase.FORWARD, f"dit_{n}", (0,), 1, 1000, 0) for n in range(2))
    piped = Module("m", Level.COSTED, parse_cluster("1x8:h100-80g"), (), (VAE, *parts), (), cascades)
    assert stages_apart(piped) == {"dit_0", "dit_1"}
    cost = CostModel(piped)
    assert cost.resident == pytest.approx(1.0 + 5.0), "of the parts the larger one"
    assert cost.room_on(None, 1, "dit_0") - cost.room_on(None, 1, "dit_1") == pytest.approx(1.0)
    denoise = Cascade("d", Phase.DENOISE, "dit", (0,), 1, 1000, 0, (), Attributes.of(steps=(0, 1)))
    sampling = replace(piped, stages=(VAE, stage()), cascades=(denoise,))
    assert stages_apart(sampling) == {"vae", "dit"}
    whole = Cascade("t", Phase.TRAIN, "dit", (0,), 1, 1000, 0)
    assert stages_apart(replace(piped, stages=(VAE, stage()), cascades=(whole,))) == frozenset()
    forward = replace(whole, phase=Phase.FORWARD)
    assert stages_apart(replace(piped, stages=(VAE, stage()), cascades=(forward,))) == {"dit"}
    assert stages_apart(replace(piped, stages=(VAE, stage()), cascades=())) == frozenset()


@given(st.lists(st.sampled_from([Phase.ENCODE, Phase.FORWARD, Phase.DENOISE]), max_size=4), st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_every_side_receives_its_own_of_earlier_stages_and_all_of_encoders_and_of_what_branches_share(
    phases: list[Phase], side: int
) -> None:
    """Clip by clip; an input that is not in the module is on no rank."""
    clips, tokens = 4, 1000
    inputs = [
        Cascade(f"i{n}", phase, "vae" if phase is Phase.ENCODE else "dit", (n,), clips, tokens, 0)
        for n, phase in enumerate(phases)
    ]
    names = (*(one.name for one in inputs), "elsewhere")
    for phase in (Phase.FORWARD, Phase.TRAIN, Phase.DENOISE):
        cascade = Cascade("c", phase, "dit", (0,), clips, tokens, 0, names)
        own = clips if phase is Phase.DENOISE else clips // side
        held = sum(at("output", clips if one is Phase.ENCODE else own, tokens, 1.0) for one in phases)
        assert model(cascade, stage(), *inputs).received(cascade, side) == pytest.approx(held)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_inputs_in_the_host_spare_the_device_all_but_those_of_two_blocks(blocks: int) -> None:
    """Of a backward that begins: one block runs, the inputs of another are on their way."""
    names, layers = ("optimizer", "parameters", "inputs"), tuple((f"blocks.{n}", 10**7) for n in range(blocks))
    cascade = Cascade("c", Phase.FORWARD, "dit", (0,), 1, 1000, 0)
    gone = sum(at("host_inputs", 1, 1000, 1.0) / blocks for _ in range(2, blocks))
    assert inputs_gone(stage(host=names, cell=1, layers=layers), cascade, 1.0) == pytest.approx(gone)
    assert inputs_gone(stage(cell=1, layers=layers), cascade, 1.0) == 0.0
    weight = replace(cascade, phase=Phase.WEIGHT)
    assert inputs_gone(stage(host=names, cell=1, layers=layers), weight, 1.0) == 0.0
