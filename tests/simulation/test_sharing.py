"""What runs at one time shares links, and on CPUs cores, against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arachnec.backends.simulator import Simulation, simulate
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Cluster, Module, Phase, Program
from arachnec.ir.values import Formula, Quantity, Term
from arachnec.lowering.programs import lower
from arachnec.simulation.network import Activity, Network, Work
from tests.passes.plans import DIT, cluster, linear, module_of, timed

GIB = 2**30
TRAFFIC = 4e-3  # GiB of q, k, v and output a token: communication is most of a cascade's time between nodes
TOKENS = 1000


def with_attention(module: Module) -> Module:
    attrs = DIT.attrs.updated(heads=8, attentions=2, traffic=linear(TRAFFIC, "GiB"), params=0)
    return replace(module, stages=(module.stages[0], replace(DIT, attrs=attrs)))


def trained(name: str, clip: int, ranks: tuple[int, ...], start: float = 0.0) -> Cascade:
    return timed(name, Phase.TRAIN, clip, TOKENS, (), (start, start + 1.0), ranks)


def planned(pod: Cluster, cascades: list[Cascade], nics: str | None = None) -> Module:
    """Every cascade with the time that the cost model gives it on its ranks, lowered."""
    pod = replace(pod, attrs=pod.attrs.updated(nics=nics))
    clips = [Clip(number, 17, 480, 832, 0, TOKENS) for number in range(len(cascades))]
    module = with_attention(module_of(pod, clips, cascades))
    cost = CostModel(module)
    timed_cascades = tuple(
        cascade.with_attrs(
            end=Quantity(
                cascade.start + cost.time(cascade, cascade.degree, ranks=cascade.ranks, ulysses=cascade.degree), "ms"
            ),
            ulysses=cascade.degree,
            ring=1,
        )
        for cascade in cascades
    )
    return lower(replace(module, cascades=timed_cascades))


def took(simulation: Simulation, name: str) -> float:
    own = [i for i in simulation.timeline.intervals if i.target == name]
    return max(i.end for i in own) - min(i.start for i in own)


def sent_between_nodes(degree: int, away: int) -> float:
    """ms on a NIC that one rank uses alone, ``away`` of the cascade's other ranks being on other nodes."""
    trades = 2 * TRAFFIC * TOKENS / degree  # forward and backward
    gathers = 2 * TRAFFIC * TOKENS / (4 * 2)
    return (trades + gathers) * GIB * away / degree / 50e6


def test_a_cascade_alone_in_a_node_takes_what_the_plan_says() -> None:
    module = planned(cluster(), [trained("a", 0, (0, 1))])
    assert took(simulate(module), "a") == pytest.approx(module.cascades[0].end)


def test_cascades_share_the_host_of_a_node_whose_devices_have_no_links_of_their_own() -> None:
    pod = cluster()
    pod = replace(pod, attrs=pod.attrs.updated(host=Quantity(60.0, "GB/s")))
    both = planned(pod, [trained("a", 0, (0, 1)), trained("b", 1, (2, 3))])
    alone = planned(pod, [trained("a", 0, (0, 1))])
    assert took(simulate(alone), "a") == pytest.approx(alone.cascades[0].end)
    assert took(simulate(both), "a") > alone.cascades[0].end + 10.0


def test_cascades_within_a_node_do_not_slow_each_other() -> None:
    module = planned(cluster(), [trained("a", 0, (0, 1)), trained("b", 1, (2, 3))])
    assert took(simulate(module), "a") == pytest.approx(module.cascades[0].end)


def test_ranks_of_one_nic_share_it_within_their_own_cascade() -> None:
    ranks = (0, 1, 4, 5)
    shared = simulate(planned(cluster(nodes=2), [trained("a", 0, ranks)], nics="AABB"))
    apart = simulate(planned(cluster(nodes=2), [trained("a", 0, ranks)], nics="ABCD"))
    sending = sent_between_nodes(4, 2)
    # apart, the plan counts contention beside what links carry
    assert 0.9 * sending < took(shared, "a") - took(apart, "a") < sending


def test_a_cascade_alone_between_nodes_takes_no_less_than_the_plan_says() -> None:
    module = planned(cluster(nodes=2), [trained("a", 0, (0, 1, 4, 5))], nics="ABCD")
    assert took(simulate(module), "a") == pytest.approx(module.cascades[0].end)


def test_cascades_that_share_a_nic_take_longer_together_and_those_that_do_not_as_long_as_alone() -> None:
    two = [trained("a", 0, (0, 4)), trained("b", 1, (1, 5))]
    alone = took(simulate(planned(cluster(nodes=2), two[:1], nics="AABB")), "a")
    together = took(simulate(planned(cluster(nodes=2), two, nics="AABB")), "a")
    apart = took(simulate(planned(cluster(nodes=2), two, nics="ABCD")), "a")
    sending = sent_between_nodes(2, 1)
    assert apart == pytest.approx(alone)
    assert alone < together <= alone + sending + 1e-6  # at most every byte waits for one of the other's
    assert together >= 2 * sending  # the NIC has the bytes of both to move


def test_a_handoff_and_the_communication_of_a_cascade_slow_each_other() -> None:
    encoded = timed("e", Phase.ENCODE, 1, TOKENS, (), (0.0, 1.0), (1,))
    reader = timed("t", Phase.TRAIN, 1, TOKENS, ("e",), (1.0, 2.0), (5,))
    pod = cluster(nodes=2)
    clips = [Clip(number, 17, 480, 832, 0, TOKENS) for number in range(2)]

    def run(*cascades: Cascade) -> Simulation:
        module = with_attention(module_of(pod, clips[-len({c.clips for c in cascades}) :], list(cascades)))
        vae = replace(module.stages[0], attrs=module.stages[0].attrs.updated(output=linear(1e-3, "GiB")))
        return simulate(lower(replace(module, stages=(vae, module.stages[1]))))

    wide = replace(trained("a", 0, (0, 4)), attrs=trained("a", 0, (0, 4)).attrs.updated(ulysses=2, ring=1))
    wide = wide.with_attrs(end=Quantity(300.0, "ms"))
    both, handoff, cascade = run(wide, encoded, reader), run(encoded, reader), run(wide)
    (slow,), (fast,) = both.timeline.transfers, handoff.timeline.transfers
    assert slow.end - slow.start > 1.2 * (fast.end - fast.start)
    assert took(both, "a") > took(cascade, "a") + 1.0


def cpus(ranks: int, cores: int | None) -> Cluster:
    pod = cluster(gpus=ranks)
    return replace(pod, attrs=pod.attrs.updated(device="cpu", cores=cores))


@pytest.mark.parametrize(("busy", "part"), [(1, 0.5), (2, 0.5), (3, 0.75), (4, 1.0)])
def test_ranks_share_cores_only_while_more_of_them_compute_than_there_are(busy: int, part: float) -> None:
    """Plans are made for nodes whose ranks all compute: four on two cores."""
    cascades = [timed(f"c{n}", Phase.TRAIN, n, TOKENS, (), (0.0, 80.0), (n,)) for n in range(busy)]
    clips = [Clip(number, 17, 480, 832, 0, TOKENS) for number in range(busy)]
    simulation = simulate(lower(module_of(cpus(4, 2), clips, cascades)))
    assert simulation.makespan_ms == pytest.approx(80.0 * part)


def test_a_rank_speeds_up_when_another_one_has_nothing_left_to_do() -> None:
    spans = ((0.0, 80.0), (0.0, 80.0), (0.0, 40.0), (0.0, 40.0))
    cascades = [timed(f"c{n}", Phase.TRAIN, n, TOKENS, (), span, (n,)) for n, span in enumerate(spans)]
    clips = [Clip(number, 17, 480, 832, 0, TOKENS) for number in range(4)]
    assert simulate(lower(module_of(cpus(4, 2), clips, cascades))).makespan_ms == pytest.approx(40 + 20)
    assert simulate(lower(module_of(cpus(4, 4), clips, cascades))).makespan_ms == pytest.approx(80)


def test_a_gradient_all_reduce_takes_the_cores_of_the_cpu_ranks_whose_backward_it_overlaps() -> None:
    def iteration(device: str, **early: Quantity) -> float:
        pod = cluster(gpus=2)
        pod = replace(pod, attrs=pod.attrs.updated(device=device))
        clips = [Clip(number, 17, 480, 832, 0, TOKENS) for number in range(2)]
        cascades = [timed(f"c{n}", Phase.TRAIN, n, TOKENS, (), (0.0, 90.0), (n,)) for n in range(2)]
        module = lower(module_of(pod, clips, cascades))
        return simulate(
            replace(module, programs=tuple(with_early(program, early) for program in module.programs))
        ).iteration_ms

    assert iteration("h100-80g") == pytest.approx(110)
    assert iteration("h100-80g", early=Quantity(30.0, "ms")) == pytest.approx(90)
    assert iteration("cpu") == pytest.approx(110)
    assert iteration("cpu", early=Quantity(30.0, "ms")) == pytest.approx(110)


@pytest.mark.parametrize(
    ("device", "message", "ends"),
    [("cpu", None, (100, 50)), ("cpu", 20.0, (110, 60)), ("h100-80g", 20.0, (100, 50))],
)
def test_a_handoff_takes_of_the_cores_of_cpu_ranks_what_was_measured_of_it(
    device: str, message: float | None, ends: tuple[float, float]
) -> None:
    """From 10 ms on a message of 20 ms is beside two ranks that compute: all at two thirds of their pace until 40."""
    row = None if message is None else (("overlapped-handoff", Quantity(message * 1e3, "us"), Quantity(1e6, "GB/s")),)
    pod = cluster(gpus=2)
    pod = replace(pod, attrs=pod.attrs.updated(device=device, collectives=row))
    cascades = [
        timed("handed", Phase.ENCODE, 0, TOKENS, (), (0.0, 10.0), (0,)),
        timed("beside", Phase.TRAIN, 1, TOKENS, (), (10.0, 100.0), (0,)),
        timed("before", Phase.TRAIN, 2, TOKENS, (), (0.0, 50.0), (1,)),
        timed("reading", Phase.TRAIN, 0, TOKENS, ("handed",), (50.0, 140.0), (1,)),
    ]
    clips = [Clip(number, 17, 480, 832, 0, TOKENS) for number in range(3)]
    intervals = simulate(lower(module_of(pod, clips, cascades))).timeline.intervals
    for name, end in zip(("beside", "before"), ends, strict=True):
        assert max(i.end for i in intervals if i.target == name) == pytest.approx(end)


def with_early(program: Program, early: dict[str, Quantity]) -> Program:
    """With an all-reduce of 20 ms, at the end or inside the backward, and a step that takes nothing."""
    steps = [
        replace(step, attrs=step.attrs.updated(time=Quantity(20.0 if step.op == "reduce" else 0.0, "ms")))
        if step.op in ("reduce", "step")
        else step
        for step in program.instructions
    ]
    steps = [replace(s, attrs=s.attrs.updated(**early)) if s.op == "reduce" else s for s in steps]
    return replace(program, instructions=tuple(steps))


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=6))
def test_a_link_is_never_idle_and_never_faster_than_it_is(sizes: list[float]) -> None:
    """Transfers that start together on one link end when the bytes of all have passed, and in the order of size."""
    network = Network()
    flows = [Activity(Work(loads=(((ms, ("link",)),),)), n, 0.0) for n, ms in enumerate(sizes)]
    for flow in flows:
        network.start(flow)
    network.settle(0.0)
    left, ends = list(flows), {}
    while left:
        first = min(left, key=lambda flow: flow.end)
        ends[first.subject] = now = first.end
        left.remove(first)
        network.finish(first)
        network.settle(now)
    assert max(ends.values()) == pytest.approx(sum(sizes))
    assert [ends[n] for n in sorted(ends, key=lambda n: sizes[n])] == sorted(ends.values())


LINKS = ("a", "b", "c")


def fair_rates(capacities: dict[str, float], flows: list[frozenset[str]]) -> list[float]:
    """Max-min fair rates by water filling: the scarcest link's users get equal parts of it, then the rest as well."""
    rates, left, todo = [0.0] * len(flows), dict(capacities), set(range(len(flows)))
    while todo:
        parts = {link: left[link] / n for link in left if (n := sum(link in flows[i] for i in todo))}
        scarcest = min(parts, key=lambda link: parts[link])
        for number in [number for number in todo if scarcest in flows[number]]:
            rates[number] = parts[scarcest]
            todo.remove(number)
            for link in flows[number]:
                left[link] -= parts[scarcest]
    return rates


@given(
    st.fixed_dictionaries({link: st.floats(1.0, 8.0) for link in LINKS}),
    st.lists(st.sets(st.sampled_from(LINKS), min_size=1).map(frozenset), min_size=1, max_size=6),
    st.booleans(),
)
def test_what_another_link_holds_back_leaves_its_part_to_the_others(
    capacities: dict[str, float], flows: list[frozenset[str]], together: bool
) -> None:
    network = Network()
    activities = []
    for number, flow in enumerate(flows):
        load = tuple((100.0 / capacities[link], (link,)) for link in sorted(flow))
        activities.append(Activity(Work(loads=(load,)), number, 0.0))
        network.start(activities[-1])
        if not together:
            network.settle(0.0)
    network.settle(0.0)
    assert [100.0 / activity.takes for activity in activities] == pytest.approx(fair_rates(capacities, flows), rel=0.01)
    for activity in activities[1:]:
        network.finish(activity)
    network.settle(0.0)
    assert activities[0].takes == pytest.approx(activities[0].work.alone)


def flow_over(capacities: dict[str, float], links: frozenset[str], pause: float = 0.0) -> Activity:
    """100 bytes over links of so many bytes a ms, between which nothing is sent for ``pause`` ms."""
    load = tuple((100.0 / capacities[link], (link,)) for link in sorted(links))
    return Activity(Work(fixed=pause, loads=(load,)), links, 0.0)


Comings = list[tuple[frozenset[str], float, int]]  # over which links, its pause in ms, and the number of one that ends


def without_end(*comings: tuple[str, float]) -> Comings:
    return [(frozenset(links), pause, len(comings)) for links, pause in comings]


# In both, paces went round in a circle until the sweeps were spent, and 7.5 of 7 and 5.8 of 5.3 were carried.
CIRCLES: tuple[tuple[list[float], Comings], ...] = (
    (
        [1.0, 4.0, 5.0, 1.0, 7.0, 1.0],
        without_end(
            *(("e", 0.0), ("be", 200.0), ("d", 0.0), ("bc", 200.0), ("c", 200.0)),
            *(("cd", 0.0), ("d", 0.0), ("b", 0.0), ("ce", 0.0), ("bcd", 0.0)),
        ),
    ),
    (
        [1.0, 7.542584242993263, 3.8138355532633748, 1.1136867503174008, 5.319013734094267, 3.358525005536934],
        [
            (frozenset(links), pause, leaving)
            for links, pause, leaving in (
                *(("d", 0.0, 30), ("e", 0.0, 30), ("ce", 20.0, 0), ("de", 0.0, 30), ("d", 0.0, 30), ("b", 0.0, 30)),
                *(("cf", 0.0, 30), ("bf", 200.0, 30), ("be", 0.0, 30), ("de", 200.0, 0), ("bd", 0.0, 30)),
            )
        ],
    ),
)


@given(
    st.lists(st.floats(1.0, 8.0), min_size=6, max_size=6),
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcdef"), min_size=1, max_size=4).map(frozenset),
            st.sampled_from((0.0, 0.0, 20.0, 200.0)),
            st.integers(0, 30),
        ),
        min_size=1,
        max_size=30,
    ),
)
@example(*CIRCLES[0])
@example(*CIRCLES[1])
def test_whatever_came_and_went_no_link_carries_more_than_it_can(speeds: list[float], comings: Comings) -> None:
    capacities = dict(zip("abcdef", speeds, strict=True))
    network = Network()
    running: list[Activity] = []
    for links, pause, leaving in comings:
        running.append(flow_over(capacities, links, pause))
        network.start(running[-1])
        if leaving < len(running):
            network.finish(running.pop(leaving))
        network.settle(0.0)
        for link, capacity in capacities.items():
            carried = sum(100.0 / flow.takes for flow in running if link in flow.subject)
            assert carried <= 1.025 * capacity
        assert all(flow.takes >= 0.999 * flow.work.alone for flow in running)


def test_what_ends_as_it_starts_leaves_nothing_on_its_links() -> None:
    """It was paced when it had ended: its part of a link stayed taken, and later more was free than there is."""
    capacities = {"a": 1.0, "b": 2.0}
    network = Network()
    gone = flow_over(capacities, frozenset("ab"))
    network.start(gone)
    network.finish(gone)
    assert network.settle(0.0) == []
    flow = flow_over(capacities, frozenset("b"))
    network.start(flow)
    network.settle(0.0)
    assert flow.takes == pytest.approx(flow.work.alone)


def test_a_formula_of_no_traffic_leaves_the_plan_as_it_is() -> None:
    module = module_of(cluster(nodes=2), [Clip(0, 17, 480, 832, 0, TOKENS)], [trained("a", 0, (0, 4))])
    constant = Formula((Term(0.0),), "GiB")
    silent = replace(DIT, attrs=DIT.attrs.updated(heads=8, attentions=2, traffic=constant))
    assert took(simulate(lower(replace(module, stages=(module.stages[0], silent)))), "a") == pytest.approx(1.0)
