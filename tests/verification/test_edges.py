"""Where a rule begins: a claim that is short by more than rounding is refused, one that is not is taken. And what rules
find, held against counting and walking."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arachnec.analysis.communicators import HARDWARE_QUEUES, HOST_HANDOFFS, STREAMS
from arachnec.analysis.uses import Values
from arachnec.cluster.device_specs import usable_host_memory
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.head_density import CUT, parts_by_layer
from arachnec.ir.names import index_of
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Program, Span, integer, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.sparse_rules import head_rows_fit_the_degree
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.lowering.programs import lower
from arachnec.passes.check import find_problems
from arachnec.verification import memory
from arachnec.verification.deadlock import Event, check_device_limits, find_cycle
from arachnec.verification.host_memory import TOLERANCE_GIB, check_host_memory, host_peak
from arachnec.verification.sparse import check_heads
from benchmarks.trust.random_programs import random_program
from tests.passes.plans import DIT, cluster, equal_clips, linear, module_of, timed

GOLDEN = Path(__file__).parents[1] / "golden" / "check"
HELD = ("state", "memory", "workspace")
IN_HOST = ("host_state", "host", "from_host", "to_host")


def golden(name: str) -> Module:
    return parse_module((GOLDEN / f"{name}.cascade").read_text(encoding="utf-8"), name)


def with_attribute(module: Module, rank: int, at: int, name: str, value: Value) -> Module:
    """One instruction of a rank says something else; at -1 its program does."""

    def changed(program: Program) -> Program:
        if at < 0:
            return replace(program, attrs=program.attrs.updated(**{name: value}))
        steps = list(program.instructions)
        steps[at] = replace(steps[at], attrs=steps[at].attrs.updated(**{name: value}))
        return replace(program, instructions=tuple(steps))

    return replace(module, programs=tuple(changed(p) if p.rank == rank else p for p in module.programs))


def size_of(value: Value) -> float:
    return quantity(value) if isinstance(value, Quantity) else integer(value)


def scaled(value: Value, share: float) -> Value:
    return Quantity(quantity(value) * share, "GiB") if isinstance(value, Quantity) else round(integer(value) * share)


def short_claims(module: Module, names: tuple[str, ...]) -> Counter[str]:
    """These claims of a program that claims exactly what it needs, by a hundredth and by a rounding less."""
    assert not find_problems(module)
    refused: Counter[str] = Counter()
    seen: set[tuple[str, str, str]] = set()
    for program in module.programs:
        own = [(-1, "program", "", program.attrs)]
        own += [(at, step.op, step.target, step.attrs) for at, step in enumerate(program.instructions)]
        for at, op, target, attrs in own:
            for name in names:
                if name not in attrs or (op, target, name) in seen or size_of(attrs[name]) == 0:
                    continue
                seen.add((op, target, name))
                less = with_attribute(module, program.rank, at, name, scaled(attrs[name], 0.99))
                assert find_problems(less), (program.rank, at, op, name)
                rounded = with_attribute(module, program.rank, at, name, scaled(attrs[name], 1 - 1e-9))
                assert not find_problems(rounded), (program.rank, at, op, name)
                refused[name] += 1
    return refused


def test_a_claim_that_is_short_by_a_hundredth_is_refused_and_by_a_rounding_is_not() -> None:
    drawn = sum((short_claims(random_program(random.Random(seed), most=3), HELD) for seed in range(4)), Counter())
    assert drawn["memory"] > 10
    assert drawn["state"] == 4
    assert {*short_claims(golden("host_valid"), IN_HOST)} == {*IN_HOST}


def test_what_a_cascade_claims_is_held_to_its_stage_too() -> None:
    module = random_program(random.Random(5), most=3)
    for at, cascade in enumerate(module.cascades):
        for share, kinds in ((0.99, {"cascade memory too low"}), (1 - 1e-9, set()), (2.0, set())):
            claim = Quantity(quantity(cascade.attrs["memory"]) * share, "GiB")
            others = (*module.cascades[:at], cascade.with_attrs(memory=claim), *module.cascades[at + 1 :])
            assert {one.kind for one in find_problems(replace(module, cascades=others))} == kinds


def test_a_large_claim_may_be_short_by_a_millionth_and_by_what_printing_takes_and_no_more() -> None:
    """Of a cascade and of its forward, which holds 20 GiB."""
    forward = timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0,))
    module = module_of(cluster(), equal_clips(), [forward])
    saved = replace(DIT, attrs=DIT.attrs.updated(saved=linear(0.02, "GiB")))
    module = replace(module, stages=(saved,))
    right = CostModel(module).memory(forward, 1)
    assert right == 20.0
    least = right * (1 - memory.RELATIVE) - memory.ROUNDING_GIB
    for claimed, short in ((right, False), (least, False), (math.nextafter(least, 0.0), True)):
        claim = Quantity(claimed, "GiB")
        one = lower(replace(module, cascades=(forward.with_attrs(memory=claim),)))
        assert [p.kind for p in told(one)] == ["cascade memory too low", "memory too low"] * short
        assert [p.kind for p in told(with_attribute(one, 0, 0, "memory", Quantity(right, "GiB")))] == [
            "cascade memory too low"
        ] * short


def told(module: Module) -> list[Diagnostic]:
    values, cost = Values(module), CostModel(module)
    return list(memory.check_memory_claims(values, cost, memory.handed_sizes(values, cost)))


def test_only_stages_that_run_and_have_no_formula_of_their_memory_are_believed() -> None:
    module = module_of(cluster(), equal_clips(), [timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0,))])
    (dit,) = module.stages
    other = replace(dit, name="other")
    assert memory.only_claimed(replace(module, stages=(dit, other))) == ("dit",)
    for name in ("saved", "workspace"):
        known = replace(dit, attrs=dit.attrs.updated(**{name: linear(0.02, "GiB")}))
        assert memory.only_claimed(replace(module, stages=(known, other))) == ()


def test_a_host_may_be_full_to_what_is_usable() -> None:
    module = golden("host_valid")
    assert module.cluster is not None
    peaks = [sum(host_peak(program, Values(module).cascades)) for program in module.programs]
    need = sum(peaks)
    for gib, full in ((need / 0.9 + 1e-9, False), (need / 0.9 - 1e-7, True)):
        attrs = module.cluster.attrs.updated(host_memory=Quantity(gib, "GiB"))
        smaller = replace(module, cluster=replace(module.cluster, attrs=attrs))
        assert usable_host_memory(smaller.cluster) == pytest.approx(0.9 * gib)  # type: ignore[arg-type]
        problems = find_problems(smaller)
        assert [problem.kind for problem in problems] == ["host out of memory"] * full
        for problem in problems:
            assert problem.kind == "host out of memory"
            assert problem.label == f"{max(peaks):.2f} GiB of them on this rank"
            assert f"keeps {need:.2f} GiB" in problem.message


def test_the_host_that_keeps_too_much_is_told_with_the_rank_that_keeps_most() -> None:
    """Of two ranks one keeps more throughout and one more inputs: their sums count. Full to the last digit is taken."""
    module = module_of(cluster(gpus=2), equal_clips(), [timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 1.0), (0, 1))])
    assert module.cluster is not None
    attrs = module.cluster.attrs.updated(host_memory=Quantity(10.0, "GiB"))
    module = replace(module, cluster=replace(module.cluster, attrs=attrs))
    assert module.cluster is not None
    usable = usable_host_memory(module.cluster)

    def keeping(*ranks: tuple[float, float]) -> list[Diagnostic]:
        """GiB of each rank throughout, and of inputs between its forward and its backward."""
        programs = tuple(
            Program(
                rank,
                (
                    Instruction("forward", "t", (0, 1), Attributes.of(host=Quantity(inputs, "GiB"))),
                    Instruction("backward", "t", (0, 1)),
                ),
                Attributes.of(host_state=Quantity(state, "GiB")),
                Span("here", rank + 1, 1, rank + 1, 2),
            )
            for rank, (state, inputs) in enumerate(ranks)
        )
        return list(check_host_memory(Values(replace(module, programs=programs))))

    limit = usable + TOLERANCE_GIB
    assert keeping((limit, 0.0), (0.0, 0.0)) == []
    assert [one.kind for one in keeping((math.nextafter(limit, 99.0), 0.0), (0.0, 0.0))] == ["host out of memory"]
    for ranks, most in (
        (((6.0, 1.0), (1.0, 5.0)), 0),
        (((1.0, 5.0), (6.0, 1.0)), 1),
        (((1.0, 6.0), (5.0, 1.0)), 0),
        (((5.0, 1.0), (1.0, 6.0)), 1),
    ):
        (told,) = keeping(*ranks)
        assert told.kind == "host out of memory"
        state, inputs = (sum(sizes) for sizes in zip(*ranks, strict=True))
        assert told.label == "7.00 GiB of them on this rank"
        assert told.message == f"node 0 keeps 13.00 GiB in its host's memory, there are {usable:.2f}"
        assert told.help.startswith(
            f"{state:.2f} GiB are parameters, gradients and optimizer of its ranks, {inputs:.2f} "
        )
        assert told.span is not None and told.span.line == most + 1
        assert "`host_memory = 15 GiB`" in told.help, "of which nine tenths are enough"


# -- streams and queues ------------------------------------------------------------------------------------------------


def reducing(groups: list[tuple[int, ...]]) -> Values:
    """Rank 0 with an all-reduce over each of these groups before its step."""
    pod = cluster(nodes=8, gpus=8)
    module = module_of(pod, [], [timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 1.0), (0,))])
    steps = [Instruction("reduce", DIT.name, group, Attributes.of(bytes=1)) for group in groups]
    program = Program(0, (*steps, Instruction("step", DIT.name)), Attributes())
    return Values(replace(module, programs=(program,)))


def test_a_rank_has_as_many_communicators_as_streams_and_leaves_one_queue_free() -> None:
    for count, pending in ((HARDWARE_QUEUES - 1, False), (HARDWARE_QUEUES, True)):
        problems = list(check_device_limits(reducing([(0, other) for other in range(1, count + 1)]), HOST_HANDOFFS, {}))
        assert [problem.kind for problem in problems] == ["too many pending"] * pending
    crowded = reducing([(0, 1, other) for other in range(2, STREAMS + 8)])
    own = [(0, 1, other) for other in range(2, STREAMS + 8)]
    counts = {
        count: [p.kind for p in check_device_limits(reducing(own[:count]), HOST_HANDOFFS, {})]
        for count in range(STREAMS - 4, STREAMS + 4)
    }
    assert {kind for kinds in counts.values() for kind in kinds} == {"too many pending", "too many streams"}
    first = min(count for count, kinds in counts.items() if "too many streams" in kinds)
    told = next(
        p for p in check_device_limits(reducing(own[:first]), HOST_HANDOFFS, {}) if p.kind == "too many streams"
    )
    assert told.message == f"rank 0 needs {STREAMS + 1} communicators, and there are {STREAMS} streams for them"
    assert crowded.module.cluster is not None
    cpus = replace(crowded.module.cluster, attrs=crowded.module.cluster.attrs.updated(device="cpu"))
    assert not list(check_device_limits(Values(replace(crowded.module, cluster=cpus)), HOST_HANDOFFS, {}))


# -- cycles ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 4), st.integers(2, 7), st.integers(0, 10**9).map(random.Random))
@settings(max_examples=60)
def test_a_cycle_is_found_where_there_is_one_and_is_one(ranks: int, count: int, rng: random.Random) -> None:
    """Events on random ranks; each rank comes to its own in a random order."""
    members = [sorted(rng.sample(range(ranks), rng.randint(1, ranks))) for _ in range(count)]
    order = {rank: [number for number, own in enumerate(members) if rank in own] for rank in range(ranks)}
    for own in order.values():
        rng.shuffle(own)
    place = {(rank, number): (at, 0, 0) for rank, own in order.items() for at, number in enumerate(own)}
    events = [Event(tuple((rank, place[rank, number]) for rank in own)) for number, own in enumerate(members)]
    graph = nx.DiGraph([pair for own in order.values() for pair in pairwise(own)])
    cycle = find_cycle(events)
    assert bool(cycle) != nx.is_directed_acyclic_graph(graph)
    for (a, b, rank), (following, _, _) in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert b == following
        assert place[rank, a] < place[rank, b]
        assert events[a].at(rank) == place[rank, a]
    assert len({rank for _, _, rank in cycle}) <= len(cycle) <= max(2, count)
    if len(cycle) > 1:
        assert all(a[2] != b[2] for a, b in pairwise(cycle)), "a rank's steps in a row are one"
    if len(cycle) > 2:
        assert cycle[0][2] != cycle[-1][2], "also where it closes"


def test_of_cycles_through_one_event_the_shortest_is_told() -> None:
    """Events 0 and 1 wait for each other, and 0, 2 and 3; each of five ranks comes to two of them."""
    for order in permutations(((0, 1), (1, 0), (0, 2), (2, 3), (3, 0))):
        if order[0] in ((2, 3), (3, 0)):
            continue  # a search that begins there may end in the longer one
        events = (
            Event(tuple((rank, (pair.index(number), 0, 0)) for rank, pair in enumerate(order) if number in pair))
            for number in range(4)
        )
        cycle = find_cycle(list(events))
        assert sorted(step[:2] for step in cycle) == [(0, 1), (1, 0)]


# -- heads -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 1), st.integers(-1, 5), st.integers(0, 6)), max_size=6),
    st.integers(1, 5),
)
@example([(1, 0, 0, 3), (1, 1, 1, 3), (1, 0, 2, 3)], 3)
@settings(max_examples=100)
def test_query_groups_are_those_that_painting_them_finds(parts: list[tuple[int, ...]], groups: int) -> None:
    """Layer 0 has three heads, which lie on places 0, 1 and 0; parts of them are given elsewhere."""
    heads = 3
    cut = {part[0] for part in parts}
    places = tuple(CUT if head in cut else (0, 1, 0)[head] for head in range(heads))
    division = (((0,), places, tuple(value for part in parts for value in part)),)
    attrs = Attributes.of(degree=2, sparse=(0,), groups=groups, heads=division)
    cascade = Cascade("c", Phase.TRAIN, "dit", (0,), 1, 1000, 0, (), attrs)
    module = module_of(cluster(), [], [timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 1.0), (0,))])
    grouped = replace(module.stages[0], attrs=module.stages[0].attrs.updated(query_group=-(-1000 // groups)))
    module = replace(module, stages=(grouped, *module.stages[1:]), clips=(), cascades=(cascade,))
    every = [(head, 0, groups) for head in range(heads) if head not in cut]
    every += [(head, start, stop) for head, _, start, stop in parts]
    outside = any(not (0 <= head < heads and 0 <= start < stop <= groups) for head, start, stop in every)
    if outside:
        assert ["gives groups" in one.message for one in head_rows_fit_the_degree(index_of(module))] == [True]
        return
    problems = list(check_heads(Values(module)))
    painted = Counter((head, group) for head, start, stop in every for group in range(start, stop))
    missing = {(head, group) for head in range(heads) for group in range(groups) if not painted[head, group]}
    told: Counter[tuple[int, int]] = Counter()
    for problem in problems:
        first, last, head, layer = map(int, re.findall(r"\d+", problem.message.split("groups")[1]))
        span = {(head, group) for group in range(first, last + 1)}
        assert layer == 0
        if problem.kind == "groups not computed":
            told.update(span)
            assert span <= missing
        else:
            assert all(painted[one] > 1 for one in span)
            own = sorted(part for part in parts_by_layer(cascade)[0] if part.head == head)
            own.sort(key=lambda part: part.start)
            assert (problem.label, first) in [
                (f"at places {max(own[:n], key=lambda part: part.stop).place} and {own[n].place}", own[n].start)
                for n in range(1, len(own))
            ], "the first of those that reach farthest has them, too"
    assert {*told} == missing
    twice = any(count > 1 for count in painted.values())
    assert twice == any(problem.kind == "groups computed twice" for problem in problems)
