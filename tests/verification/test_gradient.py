"""What is told of clips, backwards and runs is what counting finds, in programs in which anything may be wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Cascade, Clip, Instruction, Level, Module, Phase, Program, Span, Stage
from arachnec.ir.values import Attributes
from arachnec.verification.gradient import WEIGHT_TOLERANCE, _clips, _pairs, _runs

TRAINED = ("one", "two")
NAMES = "abcdef"
PHASES = (Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT, Phase.ENCODE)
COUNTED = (Phase.TRAIN, Phase.FORWARD)
RUNS = {("forward", phase) for phase in COUNTED} | {("backward", phase) for phase in (Phase.TRAIN, Phase.BACKWARD)}
RUNS |= {("weight", Phase.WEIGHT)}
WORLD = 3
Told = tuple[Span | None, str]


def at(line: int) -> Span:
    return Span("drawn", line, 1, line, 2)


def module_of(cascades: tuple[Cascade, ...], clips: int = 3, programs: tuple[Program, ...] = ()) -> Module:
    """Two trained stages and a frozen one."""
    stages = tuple(Stage(name, name in TRAINED, span=at(90 + n)) for n, name in enumerate((*TRAINED, "frozen")))
    batch = tuple(Clip(number, 1, 8, 8, 0, 4) for number in range(clips))
    return Module("drawn", Level.LOWERED, None, batch, stages, cascades=cascades, programs=programs)


def drawn(rng: random.Random) -> tuple[Cascade, ...]:
    """Cascades of clips 0 to 3, of which a batch has no 3; they read any others, and one that there is not."""
    return tuple(
        Cascade(
            name,
            rng.choice(PHASES[:3] if rng.random() < 0.8 else PHASES),
            rng.choice((*TRAINED, "frozen")),
            tuple(rng.choices(range(4), k=rng.randint(1, 2))),
            1,
            4,
            0,
            tuple(rng.sample((*NAMES, "absent"), rng.randint(0, 3))),
            Attributes.of(ranks=tuple(rng.sample(range(WORLD), rng.randint(1, WORLD)))),
            at(line),
        )
        for line, name in enumerate(NAMES, 1)
    )


def same(told: Iterable[Diagnostic], right: list[Told]) -> None:
    assert Counter((problem.span, problem.message) for problem in told) == Counter(right)


@given(st.integers(0, 10**9).map(random.Random))
@settings(max_examples=60)
def test_a_clip_is_in_one_cascade_of_every_trained_stage(rng: random.Random) -> None:
    """One that is in more is told at the last of them."""
    module = module_of(drawn(rng))
    right: list[Told] = []
    for stage in TRAINED:
        rows = [(clip, c) for c in module.cascades if c.stage == stage and c.phase in COUNTED for clip in c.clips]
        right += [
            (c.span, f"%{c.name} trains clip {clip}, which is not in the global batch") for clip, c in rows if clip == 3
        ]
        missing = tuple(sorted({0, 1, 2} - {clip for clip, _ in rows}))
        right += [
            (module.stage(stage).span, f"clips {rank_list(missing)} never reach the gradient of @{stage}")
        ] * bool(missing)
        for clip in {clip for clip, _ in rows}:
            own = [c for number, c in rows if number == clip]
            names = ", ".join(f"%{name}" for name in sorted({c.name for c in own}))
            title = f"clip {clip} reaches the gradient of @{stage} {len(own)} times, in {names}"
            right += [(own[-1].span, title)] * (len(own) > 1)
    same(_clips(Values(module)), right)


@given(st.integers(0, 10**9).map(random.Random))
@settings(max_examples=60)
def test_a_forward_has_one_backward_of_its_stage_and_its_clips_that_reads_it(rng: random.Random) -> None:
    """A backward may read forwards of other stages, and other clips' in another order: these count for nothing."""
    module = module_of(drawn(rng))
    right: list[Told] = []
    for forward in module.cascades:
        if forward.phase is not Phase.FORWARD or forward.stage not in TRAINED:
            continue
        own = [c for c in module.cascades if c.phase is Phase.BACKWARD and c.stage == forward.stage]
        count = sum(forward.name in c.inputs for c in own if Counter(c.clips) == Counter(forward.clips))
        right += [(forward.span, f"{count} backward cascades read what `forward %{forward.name}` saved")] * (count != 1)
    same(_pairs(Values(module)), right)


@given(st.integers(0, 3), st.integers(0, 10**9).map(random.Random))
@settings(max_examples=60)
def test_every_rank_of_a_cascade_runs_it_once_as_that_group_with_the_weight_of_its_clips(
    batch: int, rng: random.Random
) -> None:
    """A batch without clips has no weight to give."""
    cascades = drawn(rng)
    ops = ("forward", "backward", "weight", "encode", "free")
    programs = []
    for rank in range(WORLD):
        steps = []
        for line in range(rng.randint(0, 8)):
            cascade = rng.choice(cascades)
            peers = cascade.ranks if rng.random() < 0.7 else (rank,)
            weight = rng.choice((len(cascade.clips) / max(batch, 1), 0.0, 0.5, None, "half"))
            target = cascade.name if rng.random() < 0.9 else "absent"
            attrs = Attributes.of(weight=weight)
            steps.append(Instruction(rng.choice(ops), target, peers, attrs, at(100 * (rank + 1) + line)))
        programs.append(Program(rank, tuple(steps)))
    module = module_of(cascades, batch, tuple(programs))
    named = {cascade.name: cascade for cascade in cascades if cascade.stage in TRAINED}
    right: list[Told] = []
    runs: dict[tuple[str, str, int], list[Instruction]] = {}
    for program in programs:
        for step in program.instructions:
            placed = named.get(step.target)
            if placed is None or (step.op, placed.phase) not in RUNS:
                continue
            runs.setdefault((step.op, step.target, program.rank), []).append(step)
            if step.peers != placed.ranks:
                group = rank_list(placed.ranks)
                title = f"rank {program.rank} runs `{written(step)}`, and %{step.target} is placed on {group}"
                right.append((step.span, title))
            said, share = step.attrs.get("weight"), len(placed.clips) / batch if batch else 0.0
            if step.op == "forward" and said != share:
                shown = "none" if said is None else str(said)
                count = len(placed.clips)
                title = f"rank {program.rank} runs `{written(step)}` with weight {shown}"
                right.append((step.span, f"{title}; {count} of {batch} clips weigh {share!r}"))
    for name, own in named.items():
        for op in ("forward", "backward", "weight"):
            for rank in range(WORLD):
                wanted = int(rank in own.ranks and (op, own.phase) in RUNS)
                steps = runs.get((op, name, rank), [])
                if len(steps) != wanted:
                    span = steps[-1].span if steps else own.span
                    title = f"rank {rank} runs `{op} %{name}` {len(steps)} times instead of {wanted}"
                    right.append((span, title))
    same(_runs(Values(module)), right)


def test_a_weight_may_be_off_by_what_printing_takes() -> None:
    cascade = Cascade("a", Phase.FORWARD, "one", (0,), 1, 4, 0, (), Attributes.of(ranks=(0,)))
    for share, refused in ((1 + 0.9 * WEIGHT_TOLERANCE, False), (1 + 1.1 * WEIGHT_TOLERANCE, True)):
        step = Instruction("forward", "a", (0,), Attributes.of(weight=share / 3))
        problems = list(_runs(Values(module_of((cascade,), 3, (Program(0, (step,)),)))))
        assert [problem.kind for problem in problems] == ["wrong weight"] * refused
