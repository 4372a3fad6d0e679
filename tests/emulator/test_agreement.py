"""``check`` and the emulator say the same of small programs whose receives are posted anywhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.communicators import ExecutionModel
from arachnec.analysis.receive_prefetch import Prefetched, in_place
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Cascade, Clip, Instruction, Level, Module, Phase, Program
from arachnec.ir.values import Attributes, Quantity
from arachnec.verification.deadlock import check_deadlock
from tests.emulator.machine import Machine, Standstill
from tests.emulator.translate import Backend, actions_of
from tests.passes.plans import DIT, VAE, cluster

Lists = dict[int, list[Instruction]]


@dataclass(frozen=True)
class Case:
    """A small program and where each of its ranks posts its receives."""

    values: Values
    posted: Mapping[int, Prefetched]

    def refused(self, model: ExecutionModel) -> bool:
        return bool(list(check_deadlock(self.values, model, self.posted)))

    def emulate(self, backend: Backend, pool: int, waits: float, seed: int, placed: bool = False) -> Standstill | None:
        """``placed``: with every receive where it stands."""
        posted = {p.rank: in_place(p) for p in self.values.module.programs} if placed else self.posted
        return Machine(actions_of(self.values, posted, backend), pool, waits, random.Random(seed)).run()


def small_case(rng: random.Random) -> Case:
    """Two to four ranks and a few collectives and handoffs: in one order everywhere, then partly reordered."""
    world = rng.randint(2, 4)
    lists: Lists = {rank: [] for rank in range(world)}
    cascades: list[Cascade] = []
    for number in range(rng.randint(1, 5)):
        ranks = tuple(rng.sample(range(world), rng.randint(2, world)))
        inputs = (f"e{number}",) if rng.random() < 0.6 else ()
        cascades.append(Cascade(f"t{number}", Phase.TRAIN, "dit", (0,), 1, 400, 0, inputs))
        if not inputs:
            for rank in ranks:
                lists[rank].append(Instruction("forward", f"t{number}", ranks))
            continue
        source, target = ranks[:2]
        cascades.append(Cascade(f"e{number}", Phase.ENCODE, "vae", (0,), 1, 400, 0))
        lists[source] += [Instruction("encode", f"e{number}"), Instruction("send", f"e{number}", (target,))]
        lists[target].append(Instruction("receive", f"e{number}", (source,)))
        lists[target].append(Instruction("forward", f"t{number}", (target,)))
        if rng.random() < 0.5:
            lists[source].append(Instruction("free", f"e{number}"))
    for _ in range(rng.randint(0, 4)):
        _turn_round(lists, rng.randrange(world), rng.randint(0, 12))
    state = Attributes.of(state=Quantity(1.0, "GiB"))
    programs = tuple(Program(rank, tuple(own), state) for rank, own in lists.items())
    clips = (Clip(0, 17, 480, 832, 0, 400),)
    module = Module(
        "small", Level.LOWERED, cluster(1, world), clips, (VAE, DIT), (), tuple(cascades), programs=programs
    )
    return Case(Values(module), {program.rank: _posted(program, rng) for program in programs})


def _turn_round(lists: Lists, rank: int, place: int) -> None:
    """Exchange two neighbours where the values that they read stay in front of them."""
    own = lists[rank]
    if place + 1 >= len(own):
        return
    a, b = own[place], own[place + 1]
    if a.target[1:] != b.target[1:] and not (a.op == b.op and a.op in ("send", "receive") and a.peers == b.peers):
        own[place], own[place + 1] = b, a


def _posted(program: Program, rng: random.Random) -> Prefetched:
    """Every receive somewhere between the one before it and its own place."""
    posted: list[list[Instruction]] = [[] for _ in program.instructions]
    earliest = 0
    for index, step in enumerate(program.instructions):
        if step.op == "receive":
            earliest = rng.choice((earliest, index, rng.randint(earliest, index)))
            posted[earliest].append(step)
    return tuple(map(tuple, posted))


cases = st.randoms(use_true_random=False).map(small_case)


@settings(max_examples=400)
@given(cases, st.booleans(), st.sampled_from((1, 2, 8)), st.sampled_from((0.0, 0.3, 1.0)), st.integers(0, 99))
def test_from_device_to_device_check_is_exact(case: Case, lazy: bool, pool: int, waits: float, seed: int) -> None:
    """Refused exactly where waits for the whole device, at worst after every operation, make it stand still."""
    model = ExecutionModel("device", connections="first-use" if lazy else "start")
    backend = Backend("device", lazy)
    if case.refused(model):
        assert case.emulate(backend, pool, 1.0, seed) is not None
    else:
        circle = case.emulate(backend, pool, waits, seed)
        assert circle is None, str(circle)


@settings(max_examples=400)
@given(cases, st.sampled_from((1, 2, 8)), st.sampled_from((0.0, 0.3, 1.0)), st.integers(0, 99))
def test_over_the_host_check_is_exact_for_a_back_end_that_waits(case: Case, pool: int, waits: float, seed: int) -> None:
    """Refused exactly where a back end stands still that waits in each send and receive where it stands."""
    if case.refused(ExecutionModel()):
        assert case.emulate(Backend(blocking=True), pool, 1.0, seed, placed=True) is not None
    else:
        for blocking in (True, False):
            circle = case.emulate(Backend(blocking=blocking), pool, waits, seed, placed=blocking)
            assert circle is None, str(circle)


@settings(max_examples=400)
@given(cases, st.sampled_from((1, 2, 8)), st.sampled_from((0.0, 0.3, 1.0)), st.integers(0, 99))
def test_over_the_host_connected_at_first_use_nothing_accepted_stands_still(
    case: Case, pool: int, waits: float, seed: int
) -> None:
    if not case.refused(ExecutionModel(connections="first-use")):
        circle = case.emulate(Backend(lazy=True), pool, waits, seed)
        assert circle is None, str(circle)


def test_what_is_refused_and_would_go_through_is_counted() -> None:
    """The rule for handoffs over the host lets a back end wait in each of them. Ours does not wait, so for it the rule
    refuses too much: of small programs that were reordered, not more than this. Of what ``lower`` makes, nothing
    (``test_programs.py``). From device to device the rule refuses nothing that cannot stand still.
    """
    drawn = [small_case(random.Random(seed)) for seed in range(2000)]
    for model, backend, most in (
        (ExecutionModel("device"), Backend("device"), 0.0),
        (ExecutionModel(connections="first-use"), Backend(lazy=True), 0.05),
        (ExecutionModel(), Backend(), 0.05),
    ):
        refused = [case for case in drawn if case.refused(model)]
        through = [case for case in refused if case.emulate(backend, 8, 1.0, 0) is None]
        assert len(refused) > 100
        assert len(through) <= most * len(drawn), f"{len(through)} of {len(refused)} refused and {len(drawn)} drawn"
