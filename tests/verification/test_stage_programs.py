"""Programs of stages in cells, of degrees of their own and with dealt-out optimizers: what breaks one is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.stage_handoffs import between_stages, ranges_from, ranges_to, shards_of
from arachnec.ir.diagnostic import render
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Program, integers
from arachnec.ir.values import Attributes
from arachnec.passes.check import find_problems
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import pipeline_of, planned

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2), clip("e", 4))
PROGRAMS = {
    "1f1b": ("p=2", "schedule=1f1b", "none"),
    "zb-h1": ("p=2", "schedule=zb-h1", "none"),
    "zb-v": ("p=4", "schedule=zb-v", "none"),
    "replicas": ("p=1", "schedule=gpipe", "none"),
    "host-zb-h1": ("p=2", "schedule=zb-h1", "parameters"),
    "host-inputs": ("p=2", "schedule=1f1b,recompute=true", "inputs"),
}
Place = tuple[int, int]  # of an instruction: its rank, its number


@cache
def program(name: str) -> Module:
    stages, schedule, host = PROGRAMS[name]
    return planned(4, CLIPS, pipeline_of(stages, schedule, cell=2, host=host))


def problem_kinds(module: Module) -> set[str]:
    problems = find_problems(module)
    assert all(map(render, problems))
    return {problem.kind for problem in problems}


@pytest.mark.parametrize("degrees", ["degree=2", "degrees=[2,2]", "degrees=[1,3]", "degrees=[3,1]"])
def test_a_rank_gets_its_own_tokens_and_no_more(degrees: str) -> None:
    """Stages hand on tokens alone here: in pairs of ranks, or in parts from all that have some of a rank's."""
    module = planned(4, CLIPS, pipeline_of("p=2", f"schedule=1f1b,{degrees}"))
    named = {cascade.name: cascade for cascade in module.cascades}
    readers = {name: c for c in module.cascades for name in c.inputs if between_stages(named[name], c)}
    received: Counter[tuple[str, int]] = Counter()
    for program in module.programs:
        for step in program.instructions:
            if step.op == "receive":
                received[step.target, program.rank] += int(str(step.attrs["bytes"]))
    assert received
    for (name, rank), size in received.items():
        reader = readers[name]
        assert size <= 1e-6 * 2**30 * -(-reader.tokens // reader.degree) + reader.degree, rank


@settings(max_examples=200)
@given(data=st.data(), tokens=st.integers(1, 12), degrees=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_the_parts_of_a_rank_are_its_tokens_and_one_brings_all_else(
    data: st.DataObject, tokens: int, degrees: tuple[int, int]
) -> None:
    """Against every token by itself: it comes once, from the rank that has it."""

    def stage(name: str, degree: int, first: int) -> Cascade:
        ends = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=degree - 1, max_size=degree - 1)))
        shards = tuple(b - a for a, b in pairwise([0, *ends, tokens]))
        attrs = Attributes.of(degree=degree, ranks=tuple(range(first, first + degree)), shards=shards)
        return Cascade(name, Phase.FORWARD, name, (0,), 1, tokens, 0, () if first == 0 else ("a",), attrs)

    one, other = stage("a", degrees[0], 0), stage("b", degrees[1], degrees[0])
    named = {"a": one, "b": other}
    owner, wanted = (
        [rank for rank, size in zip(c.ranks, shards_of(c, named), strict=True) for _ in range(size)]
        for c in (one, other)
    )
    for target in other.ranks:
        parts = ranges_to(one, other, target, named)
        coming = [(token, part.source) for part in parts for token in range(part.first, part.end)]
        assert coming == [(token, owner[token]) for token in range(tokens) if wanted[token] == target]
        assert sum(part.rest for part in parts) == 1
    every = sorted(
        (p for t in other.ranks for p in ranges_to(one, other, t, named)), key=lambda p: (p.source, p.target)
    )
    assert every == [part for source in one.ranks for part in ranges_from(one, other, source, named)]


@settings(max_examples=12)
@given(degrees=st.sampled_from(["[1,3]", "[3,1]"]), data=st.data())
def test_a_part_of_the_tokens_that_never_goes_is_found(degrees: str, data: st.DataObject) -> None:
    """Neither sent nor received: every send has its receive, and a rank would read what was in the buffer before."""
    module = uneven_degrees(degrees)
    parts = Counter((p.rank, s.target) for p in module.programs for s in p.instructions if s.op == "receive")
    rank, name = data.draw(st.sampled_from(sorted(key for key, count in parts.items() if count > 1)))
    sources = [s.peers[0] for s in module.programs[rank].instructions if (s.op, s.target) == ("receive", name)]
    source = data.draw(st.sampled_from(sources))
    for own, op, peer in ((rank, "receive", source), (source, "send", rank)):
        left = [s for s in module.programs[own].instructions if (s.op, s.target, s.peers) != (op, name, (peer,))]
        module = _with_steps(module, own, left)
    assert "part missing" in problem_kinds(module)


@cache
def uneven_degrees(degrees: str) -> Module:
    return planned(4, CLIPS, pipeline_of("p=2", f"schedule=1f1b,degrees={degrees}"))


def places(module: Module, *ops: str, attribute: str = "time") -> list[Place]:
    return [
        (p.rank, at)
        for p in module.programs
        for at, step in enumerate(p.instructions)
        if step.op in ops and (attribute in step.attrs or not attribute)
    ]


def changed(module: Module, place: Place, change: Callable[[Instruction], Instruction | None]) -> Module:
    rank, at = place
    steps = list(module.programs[rank].instructions)
    new = change(steps[at])
    steps[at : at + 1] = [] if new is None else [new]
    return _with_steps(module, rank, steps)


def _with_steps(module: Module, rank: int, steps: list[Instruction]) -> Module:
    own = replace(module.programs[rank], instructions=tuple(steps))
    return replace(module, programs=tuple(own if p.rank == rank else p for p in module.programs))


def without_one(name: str, data: st.DataObject) -> Callable[[Instruction], Instruction]:
    def change(step: Instruction) -> Instruction:
        layers = list(integers(step.attrs[name]))
        layers.remove(data.draw(st.sampled_from(layers)))
        return replace(step, attrs=step.attrs.updated(**{name: tuple(layers)}))

    return change


def reordered(name: str, data: st.DataObject) -> Callable[[Instruction], Instruction]:
    def change(step: Instruction) -> Instruction:
        layers = integers(step.attrs[name])
        other = tuple(data.draw(st.permutations(layers)))
        assume(other != layers)
        return replace(step, attrs=step.attrs.updated(**{name: other}))

    return change


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_lower_makes_is_right(name: str) -> None:
    assert not problem_kinds(program(name))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_clips_side_by_side_keep_what_lies_outside_the_blocks_of_their_own_alone(schedule: str) -> None:
    """A rank has one of the clips, whole: not the whole sequences of both."""
    passes = pipeline_of("p=2", f"schedule={schedule}", policy="dual", cell=2)
    module = planned(4, [clip(name, 12) for name in "abcdefghijklmnop"], passes)
    shell = module.stages[0].attrs["shell"]
    wide = [c for c in module.cascades if c.phase is Phase.FORWARD and c.side == 2]
    assert wide
    assert all(shell(B=c.batch, S=c.tokens) > 1e-5 for c in wide)  # what was counted twice is no rounding
    assert not problem_kinds(module)


@settings(max_examples=12)
@given(name=st.sampled_from(sorted(PROGRAMS)), data=st.data())
def test_a_layer_left_out_of_a_list_is_found(name: str, data: st.DataObject) -> None:
    module = program(name)
    expected = {
        "gather": "not gathered",
        "scatter": "not scattered",
        "release": "unequal gathers",
    }
    word = data.draw(st.sampled_from(sorted(expected)))
    place = data.draw(st.sampled_from(places(module, "forward", "backward", "weight", attribute=word)))
    assert expected[word] in problem_kinds(changed(module, place, without_one(word, data)))


@settings(max_examples=12)
@given(name=st.sampled_from(sorted(PROGRAMS)), data=st.data())
def test_members_of_a_cell_in_two_orders_are_found(name: str, data: st.DataObject) -> None:
    module = program(name)
    word = data.draw(st.sampled_from(["gather", "scatter"]))
    place = data.draw(st.sampled_from(places(module, "forward", "backward", "weight", attribute=word)))
    assert "unequal gathers" in problem_kinds(changed(module, place, reordered(word, data)))


@settings(max_examples=12)
@given(name=st.sampled_from(sorted(PROGRAMS)), data=st.data())
def test_a_release_that_all_members_of_a_cell_lack_is_found(name: str, data: st.DataObject) -> None:
    """The layer stays where it is gathered again, or into the next step."""
    module = program(name)
    rank, at = data.draw(st.sampled_from(places(module, "forward", "backward", attribute="release")))
    step = module.programs[rank].instructions[at]
    layer = data.draw(st.sampled_from(integers(step.attrs["release"])))

    def kept(other: Instruction) -> Instruction:
        left = tuple(n for n in integers(other.attrs["release"]) if n != layer)
        return replace(other, attrs=other.attrs.updated(release=left))

    for member in integers(step.attrs["cell"]):
        own = module.programs[member].instructions
        index = next(n for n, other in enumerate(own) if (other.op, other.target) == (step.op, step.target))
        module = changed(module, (member, index), kept)
    later = [s for s in module.programs[rank].instructions[at + 1 :] if "gather" in s.attrs]
    again = any(layer in layers_listed(s, "gather") for s in later if _stage(module, s) == _stage(module, step))
    assert ("gathered twice" if again else "not released") in problem_kinds(module)


def _stage(module: Module, step: Instruction) -> str:
    return next(cascade.stage for cascade in module.cascades if cascade.name == step.target)


@settings(max_examples=12)
@given(name=st.sampled_from(sorted(PROGRAMS)), data=st.data())
def test_two_cascades_swapped_on_one_rank_are_found(name: str, data: st.DataObject) -> None:
    module = program(name)
    rank = data.draw(st.integers(0, 3))
    steps = list(module.programs[rank].instructions)
    compute = [at for at, step in enumerate(steps) if step.op in ("forward", "backward", "weight")]
    first, second = sorted(data.draw(st.lists(st.sampled_from(compute), min_size=2, max_size=2, unique=True)))
    steps[first], steps[second] = steps[second], steps[first]
    assert problem_kinds(_with_steps(module, rank, steps))


@settings(max_examples=12)
@given(name=st.sampled_from(["1f1b", "zb-h1", "zb-v"]), data=st.data())
def test_a_part_of_a_gradient_from_another_rank_is_found(name: str, data: st.DataObject) -> None:
    """The two ranks of a cell swap from whom they receive: every send has its receive, and the parts are wrong."""
    module = program(name)
    rank, at = data.draw(st.sampled_from(places(module, "receive", attribute="")))
    step = module.programs[rank].instructions[at]
    programs: list[Program] = []
    for own in module.programs:
        steps = tuple(_swapped(other, step.target) for other in own.instructions)
        programs.append(replace(own, instructions=steps))
    assert "wrong source" in problem_kinds(replace(module, programs=tuple(programs)))


def _swapped(step: Instruction, value: str) -> Instruction:
    """Sends and receives of a value to or from the other rank of the pair."""
    return (
        replace(step, peers=(step.peers[0] ^ 1,)) if step.target == value and step.op in ("send", "receive") else step
    )


@settings(max_examples=12)
@given(data=st.data())
def test_layers_from_another_place_and_copies_that_are_too_small_are_found(data: st.DataObject) -> None:
    module = program("host-zb-h1")
    place = data.draw(st.sampled_from(places(module, "forward", "backward", "weight", attribute="place")))
    moved = changed(module, place, lambda step: replace(step, attrs=step.attrs.updated(place=None)))
    assert "wrong place" in problem_kinds(moved)
    name = data.draw(st.sampled_from(["from_host", "to_host"]))
    place = data.draw(st.sampled_from(places(module, "forward", "backward", "weight", attribute=name)))
    less = changed(module, place, lambda step: replace(step, attrs=step.attrs.updated(**{name: 1})))
    assert "host copy too small" in problem_kinds(less)


@settings(max_examples=6)
@given(data=st.data())
def test_inputs_that_do_not_come_back_are_found(data: st.DataObject) -> None:
    module = program("host-inputs")
    word, op = data.draw(st.sampled_from([("offload", "forward"), ("reload", "backward")]))
    place = data.draw(st.sampled_from(places(module, op, attribute=word)))
    stays = changed(module, place, lambda step: replace(step, attrs=step.attrs.updated(**{word: None})))
    assert "wrong inputs" in problem_kinds(stays)


def test_an_optimizer_dealt_out_over_other_ranks_than_the_sums_is_found() -> None:
    module = planned(4, CLIPS, pipeline_of("p=2", "schedule=1f1b"))
    stages = tuple(replace(s, attrs=s.attrs.updated(sharded=4)) if s.trained else s for s in module.stages)
    assert "wrong share" in problem_kinds(replace(module, stages=stages))
