"""`check` accepts a chain of segments exactly where, at every outcome of its switch, every step is taken once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Cascade, Clip, Instruction, Level, Module, Phase, Program, Span
from arachnec.ir.values import Attributes
from arachnec.planning.sampling.requests import chain, segments_of
from arachnec.verification.sampling import _rounds, _runs, check_sampling

MODELS = ("large", "small")


@st.composite
def clips(draw: st.DrawFn) -> Clip:
    steps = draw(st.integers(1, 12))
    least = draw(st.integers(0, steps))
    most = draw(st.integers(least, steps))
    return Clip(0, 1, 16, 16, 0, 4, Attributes.of(steps=steps, window=(least, most), forecast=most))


def module_of(clip: Clip, cascades: tuple[Cascade, ...]) -> Module:
    attrs = Attributes.of(models=MODELS, switch="adaptive=1")
    return Module("requests", Level.PARTITIONED, None, (clip,), (), cascades=cascades, attrs=attrs)


def steps_at(segments: list[tuple[str, tuple[int, int]]], outcome: int) -> list[tuple[int, str]]:
    """By hand: step by step, who may take it. A segment takes a step of its range that is its model's."""
    taken = []
    for stage, (first, last) in segments:
        for step in range(first, last + 1):
            if (step < outcome) == (stage == MODELS[0]):
                taken.append((step, stage))
    return taken


def right(clip: Clip, segments: list[tuple[str, tuple[int, int]]]) -> bool:
    steps, (least, most) = clip.attrs["steps"], clip.attrs["window"]  # type: ignore[misc]
    assert isinstance(steps, int) and isinstance(least, int) and isinstance(most, int)
    return all(
        [step for step, _ in steps_at(segments, outcome)] == list(range(steps)) for outcome in range(least, most + 1)
    )


@given(clips(), st.integers(1, 5), st.none() | st.integers(1, 5), st.data())
@settings(max_examples=200, deadline=None)
def test_a_chain_is_accepted_where_every_outcome_takes_every_step_once(
    clip: Clip, length: int, longest: int | None, data: st.DataObject
) -> None:
    module = module_of(clip, ())
    cascades = tuple(chain(module, [clip], list(segments_of(clip, 2, length, longest))))
    assert not list(check_sampling(Values(module_of(clip, cascades))))
    place = data.draw(st.integers(0, len(cascades) - 1))
    first, last = (data.draw(st.integers(0, 12)) for _ in range(2))
    stage = data.draw(st.sampled_from(MODELS))
    changed = replace(cascades[place], stage=stage).with_attrs(steps=(min(first, last), max(first, last)))
    mutated = (*cascades[:place], changed, *cascades[place + 1 :])
    segments = [(c.stage, tuple(c.attrs["steps"])) for c in mutated]  # type: ignore[arg-type]
    problems = list(check_sampling(Values(module_of(clip, mutated))))
    assert bool(problems) != right(clip, segments)  # type: ignore[arg-type]
    assert {problem.kind for problem in problems} <= {"wrong step", "steps left"}


@pytest.mark.parametrize(
    ("steps", "problems"),
    [
        (["r1", "r2", "a2"], []),
        (["a2", "r1", "r2"], ["its cascade is of round 2"]),
        (["r1", "a2", "r2"], ["its cascade is of round 2"]),
        (["r1", "a2"], ["its cascade is of round 2", "its list ends there, of 3 rounds"]),
        (["r2", "r1", "a2"], ["1 is next", "2 is next"]),
        (["r1", "r2", "r3"], ["its list ends there, of 3 rounds"]),
        (["r1", "r2", "r2"], ["3 is next", "its list ends there, of 3 rounds"]),
    ],
)
def test_a_rank_comes_to_every_round_in_turn_and_runs_its_cascades_in_theirs(
    steps: list[str], problems: list[str]
) -> None:
    """``r2`` is the replan before round 2, ``a2`` a denoise of that round, which is the last."""
    cascade = Cascade("a", Phase.DENOISE, "large", (0,), 1, 4, 0, (), Attributes.of(round=2))
    instructions = tuple(
        Instruction("replan", "large", (), Attributes.of(round=int(step[1])))
        if step[0] == "r"
        else Instruction("denoise", "a")
        for step in steps
    )
    clip = Clip(0, 1, 16, 16, 0, 4, Attributes.of(steps=4, window=(4, 4), forecast=4))
    before = Cascade("b", Phase.DENOISE, "large", (0,), 1, 4, 0)
    module = replace(module_of(clip, (before, cascade)), programs=(Program(0, instructions),))
    told = list(_rounds(Values(module)))
    assert [problem.message.split(", and ")[1] for problem in told] == problems
    assert {problem.message.split("`")[1].split()[0] for problem in told} <= {"replan", "denoise"}
    assert all("large" in problem.message for problem in told if "ends there" in problem.message)
    assert not list(_rounds(Values(replace(module, cascades=(), programs=(Program(0, ()),)))))


@given(st.booleans(), st.integers(0, 10**9).map(random.Random))
def test_every_rank_of_a_segment_runs_it_once_as_its_group_and_no_other_rank_does(
    programs: bool, rng: random.Random
) -> None:
    """Also where no rank runs any of them. A module that is not lowered yet has no programs, and nothing to hold."""
    phases = {"encode": Phase.ENCODE, "denoise": Phase.DENOISE, "decode": Phase.DECODE, "train": Phase.TRAIN}
    drawn = [(op, tuple(rng.sample(range(3), rng.randint(1, 3)))) for op in rng.choices([*phases], k=3)]
    cascades = tuple(
        Cascade(f"c{n}", phases[op], "large", (0,), 1, 4, 0, (), Attributes.of(ranks=ranks), at(n))
        for n, (op, ranks) in enumerate(drawn)
    )
    lists = []
    for rank in range(3 if programs else 0):
        steps = []
        for line in range(rng.choice((0, 0, 3, 6))):
            number = rng.randrange(3)
            op = rng.choice((drawn[number][0], drawn[number][0], "free", "encode"))
            peers = rng.choice((drawn[number][1], drawn[number][1], (), (rank, 7)))
            steps.append(Instruction(op, f"c{number}", peers, span=at(100 * (rank + 1) + line)))
        lists.append(Program(rank, tuple(steps)))
    module = replace(module_of(Clip(0, 1, 16, 16, 0, 4), cascades), programs=tuple(lists))
    right: list[tuple[object, str]] = []
    for rank in range(3 if programs else 0):
        for n, (op, ranks) in enumerate(drawn):
            own = [s for s in lists[rank].instructions if (s.op, s.target) == (op, f"c{n}")] if op != "train" else []
            placed = f"`, and %c{n} is placed on {rank_list(ranks)}"
            right += [(s.span, f"rank {rank} runs `{written(s)}{placed}") for s in own if s.peers not in ((), ranks)]
            wanted = int(rank in ranks and op != "train")
            if len(own) != wanted:
                span = own[-1].span if own else cascades[n].span
                right.append((span, f"rank {rank} runs `{op} %c{n}` {len(own)} times instead of {wanted}"))
    told = [(one.span, one.message) for one in _runs(Values(module))]
    assert Counter(told) == Counter(right)


def at(line: int) -> Span:
    return Span("drawn", line + 1, 1, line + 1, 2)


def test_a_decode_reads_the_last_segment_of_its_request() -> None:
    clip = Clip(0, 1, 16, 16, 0, 4, Attributes.of(steps=8, window=(2, 4), forecast=3))
    segments = tuple(chain(module_of(clip, ()), [clip], list(segments_of(clip, 2, 2))))
    assert len(segments) > 2

    def problems(read: str) -> list[Diagnostic]:
        decode = Cascade("decode", Phase.DECODE, "vae", (0,), 1, 4, 0, (read,))
        return list(check_sampling(Values(module_of(clip, (*segments, decode)))))

    assert problems(segments[-1].name) == []
    assert [(one.span, one.message) for one in problems(segments[-2].name)] == [
        (None, f"%decode decodes request 0 before its last segment %{segments[-1].name} has run")
    ]


def test_segments_cut_a_window_and_leave_the_rest_whole() -> None:
    clip = Clip(0, 1, 16, 16, 0, 4, Attributes.of(steps=20, window=(6, 12), forecast=8))
    cut = [(segment.steps, segment.after) for segment in segments_of(clip, 2, 4)]
    before = [((0, 5), False), ((6, 8), False), ((9, 11), False)]
    assert cut == [*before, ((6, 8), True), ((9, 11), True), ((12, 19), True)]
    assert {Phase.DENOISE} == {
        cascade.phase for cascade in chain(module_of(clip, ()), [clip], list(segments_of(clip, 2, 4)))
    }
