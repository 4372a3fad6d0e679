"""Instruction lists say what the plan says, in an order that every back end can follow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Instruction, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Quantity
from arachnec.ir.verify import verify
from arachnec.lowering.gathers import updated_parameters
from arachnec.lowering.programs import instructions_of, lower
from arachnec.passes.check import find_problems
from arachnec.passes.lower import Lower
from tests.passes.plans import DIT, cluster, equal_clips, linear, module_of, placed_modules, timed


def words(module: Module, rank: int) -> list[str]:
    return [f"{i.op} {i.target}" for i in module.programs[rank].instructions]


def instructions(module: Module, op: str) -> list[tuple[int, Instruction]]:
    return [(p.rank, i) for p in module.programs for i in p.instructions if i.op == op]


def one_encode_one_train(ranks: tuple[int, ...]) -> Module:
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 2.0), (0,)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (2.0, 32.0), ranks),
    ]
    return module_of(cluster(), equal_clips(), cascades)


@given(placed_modules())
def test_every_lowered_plan_verifies_and_passes_check(module: Module) -> None:
    lowered = lower(module)
    assert lowered.level is Level.LOWERED
    assert not verify(lowered)
    assert not find_problems(lowered)


@given(placed_modules())
def test_lowering_keeps_all_that_the_placed_module_holds(module: Module) -> None:
    assert replace(lower(module), level=Level.PLACED, programs=()) == module


@given(placed_modules())
def test_every_rank_of_a_cascade_runs_it_once_and_the_times_add_up(module: Module) -> None:
    lowered = lower(module)
    runs: dict[str, list[tuple[int, Instruction]]] = defaultdict(list)
    for rank, instruction in instructions(lowered, "forward") + instructions(lowered, "backward"):
        runs[instruction.target].append((rank, instruction))
    for cascade in module.cascades:
        if cascade.phase is not Phase.TRAIN:
            continue
        assert sorted(rank for rank, _ in runs[cascade.name]) == sorted(cascade.ranks * 2)
        spent = sum(quantity(i.attrs["time"]) for _, i in runs[cascade.name]) / len(cascade.ranks)
        assert spent == pytest.approx(cascade.end - cascade.start)


@given(placed_modules())
def test_weights_of_all_clips_sum_to_one(module: Module) -> None:
    weights = {i.target: i.attrs["weight"] for _, i in instructions(lower(module), "forward")}
    assert sum(float(str(weight)) for weight in weights.values()) == pytest.approx(1)


@given(placed_modules())
def test_sends_of_a_pair_of_ranks_stand_in_the_order_of_its_receives(module: Module) -> None:
    lowered = lower(module)
    sent: dict[tuple[int, int], list[str]] = defaultdict(list)
    received: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, instruction in instructions(lowered, "send"):
        sent[rank, instruction.peers[0]].append(instruction.target)
    for rank, instruction in instructions(lowered, "receive"):
        received[instruction.peers[0], rank].append(instruction.target)
    assert sent == received


@given(placed_modules())
def test_a_value_is_sent_only_to_ranks_that_lack_it_and_freed_on_all(module: Module) -> None:
    lowered = lower(module)
    readers = {name: set(c.ranks) for c in module.cascades for name in c.inputs}
    makers = {c.name: set(c.ranks) for c in module.cascades if c.phase is Phase.ENCODE}
    for name, ranks in readers.items():
        targets = [rank for rank, i in instructions(lowered, "receive") if i.target == name]
        assert sorted(targets) == sorted(ranks - makers[name])
        freed = [rank for rank, i in instructions(lowered, "free") if i.target == name]
        assert sorted(freed) == sorted(ranks | makers[name])


def test_the_sends_stand_right_after_their_producer() -> None:
    assert words(lower(one_encode_one_train((0, 1, 2))), 0)[:4] == ["encode e", "send e", "send e", "forward t"]


def test_an_input_is_freed_after_the_backward_that_reads_it_again() -> None:
    assert words(lower(one_encode_one_train((1,))), 1) == [
        "receive e", "forward t", "backward t", "free e", "reduce dit", "step dit",
    ]  # fmt: skip


def test_a_stage_trained_as_a_whole_is_reduced_and_stepped_by_idle_ranks_too() -> None:
    lowered = lower(one_encode_one_train((1,)))
    assert words(lowered, 3) == ["reduce dit", "step dit"]
    assert lowered.programs[3].instructions[0].peers == (0, 1, 2, 3)


def test_an_encoder_on_several_ranks_names_its_group_and_one_rank_none() -> None:
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 2.0), (0, 1)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (2.0, 32.0), (1, 2)),
    ]
    lowered = lower(module_of(cluster(), equal_clips(), cascades))
    assert lowered.programs[0].instructions[0].peers == (0, 1)
    assert words(lowered, 1)[:2] == ["encode e", "forward t"]
    assert words(lowered, 2)[:2] == ["receive e", "forward t"]
    assert not find_problems(lowered)
    assert lower(one_encode_one_train((1,))).programs[0].instructions[0].peers == ()


def test_the_nearest_holder_sends() -> None:
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 2.0), (0, 4)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (2.0, 32.0), (1, 5)),
    ]
    lowered = lower(module_of(cluster(nodes=2), equal_clips(), cascades))
    assert {(rank, i.peers[0]) for rank, i in instructions(lowered, "send")} == {(0, 1), (4, 5)}


def test_a_forward_takes_its_formulas_part_of_the_time_and_recomputation_counts_as_backward() -> None:
    plain = one_encode_one_train((1,))
    again = replace(plain, cascades=(plain.cascades[0], plain.cascades[1].with_attrs(recompute=True)))
    for module, share in ((plain, 1 / 3), (again, 1 / 4)):
        ((_, forward),) = instructions(lower(module), "forward")
        assert quantity(forward.attrs["time"]) == pytest.approx(30 * share)


def test_planned_memory_is_split_into_what_is_received_and_what_the_forward_holds() -> None:
    lowered = lower(one_encode_one_train((1,)))
    ((_, receive),) = instructions(lowered, "receive")
    ((_, forward),) = instructions(lowered, "forward")
    assert quantity(receive.attrs["memory"]) + quantity(forward.attrs["memory"]) == pytest.approx(20)


@given(placed_modules(), st.data())
def test_rounding_of_starts_does_not_put_a_consumer_before_its_producer(module: Module, data: st.DataObject) -> None:
    def shifted(cascade: Cascade) -> Cascade:
        shift = data.draw(st.sampled_from((-1e-9, 0.0, 1e-9)))
        start, end = max(0.0, cascade.start + shift), cascade.end + shift
        return cascade.with_attrs(start=Quantity(start, "ms"), end=Quantity(end, "ms"))

    assert not find_problems(lower(replace(module, cascades=tuple(map(shifted, module.cascades)))))


def test_a_consumer_before_its_input_is_refused() -> None:
    module = one_encode_one_train((1,))
    early = replace(module.cascades[0].with_attrs(start=Quantity(40.0, "ms"), end=Quantity(42.0, "ms")))
    with pytest.raises(UserError, match="before its input %"):
        lower(replace(module, cascades=(early, module.cascades[1])))


def test_cascades_that_wait_for_each_other_are_refused() -> None:
    module = one_encode_one_train((1,))
    circle = replace(module.cascades[0], inputs=("t",))
    with pytest.raises(UserError, match="waits for itself"):
        lower(replace(module, cascades=(circle, module.cascades[1])))


def test_a_backward_away_from_its_forward_is_refused() -> None:
    module = one_encode_one_train((1,))
    forward = replace(module.cascades[1], name="f", phase=Phase.FORWARD)
    backward = replace(forward, name="b", phase=Phase.BACKWARD, inputs=("f",))
    moved = backward.with_attrs(start=Quantity(40.0, "ms"), end=Quantity(60.0, "ms"), ranks=(2,))
    with pytest.raises(UserError, match="saved for it lies on ranks"):
        lower(replace(module, cascades=(module.cascades[0], forward, moved)))


def test_lowering_is_a_pass_from_placed_to_lowered() -> None:
    assert (Lower.name, Lower.needs, Lower.gives) == ("lower", Level.PLACED, Level.LOWERED)


def test_updates_are_gathered_where_the_optimizer_is_dealt_out_over_several_ranks() -> None:
    layers = (("blocks.0", 1000), ("blocks.1", 1000))
    for ranks, sharded, gathering in (((0,), 1, 0), ((0, 1), None, 0), ((0, 1), 2, 2)):
        stage = replace(DIT, attrs=DIT.attrs.updated(layers=layers, sharded=sharded))
        module = replace(one_encode_one_train((0,)), stages=(stage,))
        assert len(updated_parameters(module, {"dit": frozenset(ranks)})) == gathering


# -- what a list says --------------------------------------------------------------------------------------------------


def test_a_value_that_takes_no_time_to_make_is_sent_behind_its_maker() -> None:
    """And by its plan everything may start at once."""
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 0.0), (0,)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (0.0, 30.0), (1,)),
    ]
    lowered = lower(module_of(cluster(gpus=2), equal_clips(), cascades))
    assert words(lowered, 0)[:2] == ["encode e", "send e"]
    assert words(lowered, 1)[:2] == ["receive e", "forward t"]
    assert not find_problems(lowered)


def test_a_value_is_freed_when_by_the_plan_it_is_sent() -> None:
    """To a rank that has nothing before: as soon as it is made and has gone over; later, where that is busy."""
    others = [
        timed(f"u{n}", Phase.TRAIN, 1 + n, 1000, (), (start, start + 0.2), (0,)) for n, start in enumerate((0.3, 0.6))
    ]
    busy = timed("w", Phase.TRAIN, 3, 1000, (), (0.0, 0.5), (1,))

    def freed(*cascades: Cascade, start: float) -> list[str]:
        encoder = timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 0.1), (0,))
        reader = timed("t", Phase.TRAIN, 0, 1000, ("e",), (start, 30.0), (1,))
        module = module_of(cluster(gpus=2), equal_clips(4), [encoder, *others, *cascades, reader])
        return [word for word in words(lower(module), 0) if word.split()[0] in ("send", "free", "forward")]

    assert freed(start=0.1) == ["send e", "free e", "forward u0", "forward u1"]
    assert freed(busy, start=0.5) == ["send e", "forward u0", "free e", "forward u1"]


@pytest.mark.parametrize(("clips", "weight"), [(4, 0.25), (0, 0.5)])
def test_a_clip_weighs_one_of_its_batch_or_of_all_that_a_table_names(clips: int, weight: float) -> None:
    """Also where no cascade has some of them."""
    cascades = [timed(f"t{n}", Phase.TRAIN, n, 1000, (), (30.0 * n, 30.0 * n + 30.0), (0,)) for n in range(2)]
    lowered = lower(module_of(cluster(), equal_clips(clips), cascades))
    assert [step.attrs["weight"] for _, step in instructions(lowered, "forward")] == [weight, weight]
    (none,) = lower(module_of(cluster(gpus=1), [], [replace(cascades[0], clips=())])).programs
    assert none.instructions[0].attrs["weight"] == 0.0


def test_a_forward_of_a_pipeline_saves_what_it_does_not_only_work_in() -> None:
    stage = replace(DIT, attrs=DIT.attrs.updated(workspace=linear(5e-3, "GiB")))
    forward = replace(timed("f", Phase.FORWARD, 0, 1000, (), (0.0, 30.0), (0,)), phase=Phase.FORWARD)
    for memory, saved, working in ((20.0, 15.0, 5.0), (4.0, 0.0, 4.0)):
        cascade = forward.with_attrs(memory=Quantity(memory, "GiB"))
        step = instructions_of(cascade, stage, 1, 0.0)[0]
        assert (quantity(step.attrs["memory"]), quantity(step.attrs["workspace"])) == pytest.approx((saved, working))
        received = instructions_of(cascade, stage, 1, 1.0)[0]
        assert quantity(received.attrs["memory"]) + quantity(received.attrs["workspace"]) == pytest.approx(memory - 1.0)


def test_a_new_round_is_called_by_the_first_model_of_its_requests() -> None:
    attrs = Attributes.of(degree=1, ranks=(0,), memory=Quantity(1.0, "GiB"))
    cascades = tuple(
        Cascade(f"a{n}", Phase.DENOISE, "large", (n,), 1, 4, 0, (), attrs.updated(round=n or None)).with_attrs(
            start=Quantity(10.0 * n, "ms"), end=Quantity(10.0 * n + 10.0, "ms")
        )
        for n in range(3)
    )
    stages = (Stage("small", False), Stage("large", False))
    said = Attributes.of(models=("large", "small"))
    module = Module("requests", Level.PLACED, cluster(gpus=2), (), stages, cascades=cascades, attrs=said)
    assert words(lower(module), 0) == [
        "denoise a0", "free a0", "replan large", "denoise a1", "free a1", "replan large", "denoise a2", "free a2",
    ]  # fmt: skip
    for _, rounds in (
        (p.rank, [s.attrs["round"] for s in p.instructions if s.op == "replan"]) for p in lower(module).programs
    ):
        assert rounds == [1, 2]
