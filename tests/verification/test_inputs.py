"""Values are there when they are read, by what came before in the list; a list names layers that there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Cascade, Instruction, Level, Module, Phase, Program, Span, Stage
from arachnec.ir.values import Attributes
from arachnec.verification.inputs import check_cascade_inputs, check_inputs
from arachnec.verification.shards import check_listed_layers

STAGES = (Stage("vae", False), Stage("dit", True))
CASCADES = (
    Cascade("e", Phase.ENCODE, "vae", (0,), 1, 4, 0),
    Cascade("t", Phase.TRAIN, "dit", (0,), 1, 4, 0, ("e",)),
    Cascade("f", Phase.FORWARD, "dit", (0,), 1, 4, 0, ("e",)),
    Cascade("b", Phase.BACKWARD, "dit", (0,), 1, 4, 0, ("f", "e")),
    Cascade("w", Phase.WEIGHT, "dit", (0,), 1, 4, 0, ("b", "f")),
)
OPS = {"e": ("encode",), "t": ("forward", "backward"), "f": ("forward",), "b": ("backward",), "w": ("weight",)}


def module_of(cascades: Sequence[Cascade], steps: Sequence[Instruction], stages: Sequence[Stage] = STAGES) -> Module:
    programs = (Program(0, tuple(steps)),)
    return Module("drawn", Level.LOWERED, None, (), tuple(stages), cascades=tuple(cascades), programs=programs)


def drawn(rng: random.Random) -> list[Instruction]:
    """Steps of one rank: runs, receives of a value from either of two ranks, sends, frees and new rounds."""
    steps = []
    for line in range(1, rng.randint(2, 14)):
        name = rng.choice("eeftbw")
        op = rng.choice((*OPS[name], *OPS[name], "receive", "receive", "send", "free", "replan"))
        op = "free" if name in "tw" and op in ("receive", "send") else op
        peers = (rng.choice((1, 2)),) if op in ("receive", "send") else ()
        target = "dit" if op == "replan" else name
        steps.append(Instruction(op, target, peers, span=Span("drawn", line, 1, line, 2)))
    return steps


def by_hand(values: Values, steps: Sequence[Instruction]) -> Iterator[tuple[Span | None, str]]:
    """Of each instruction, by all that is before it."""
    for place, step in enumerate(steps):
        before = steps[:place]

        def there(name: str, before: Sequence[Instruction] = before) -> bool:
            own = [s for s in before if values.makes(s) == name or (s.op, s.target) == ("free", name)]
            return bool(own) and own[-1].op != "free"

        rounds = [number for number, s in enumerate(before) if s.op == "replan"]
        freed = {s.target for s in before[max(rounds, default=0) :] if s.op == "free"}
        saved = {s.target for s in before if values.saves(s)}
        for name in values.reads(step):
            if not there(name):
                wrong = "has been freed" if name in freed else "is not there yet"
                yield step.span, f"rank 0 has `{written(step)}`, and %{name} {wrong}"
        for name in values.saved_reads(step):
            if name not in saved:
                yield step.span, f"rank 0 has `{written(step)}` before it has run %{name}"
        value = values.makes(step)
        if value is None:
            continue
        parts = {s.peers for s in before if (s.op, s.target) == ("receive", value) and value in "fb"}
        another = step.op == "receive" and bool(parts) and step.peers not in parts
        if (there(value) and not another) or value in freed:
            yield step.span, f"rank 0 has `{written(step)}`, and %{value} is there already"


@given(st.integers(0, 10**9).map(random.Random))
@settings(max_examples=150)
def test_what_is_read_was_made_before_and_not_freed_and_comes_once(rng: random.Random) -> None:
    """Only what one stage hands to another may come in parts, each from another rank, and never beside its maker."""
    steps = drawn(rng)
    module = module_of(CASCADES, steps)
    told = [(one.span, one.message) for one in check_inputs(Values(module))]
    assert told == list(by_hand(Values(module), steps))


@pytest.mark.parametrize(("name", "accepted"), [("e", False), ("f", True), ("b", True)])
def test_a_second_part_is_taken_from_another_rank_and_only_of_what_goes_from_stage_to_stage(
    name: str, accepted: bool
) -> None:
    first, same, other = (Instruction("receive", name, (rank,)) for rank in (1, 1, 2))
    own = Instruction(OPS[name][0], name, (0,))

    def twice(*steps: Instruction) -> bool:
        return "already there" in {one.kind for one in check_inputs(Values(module_of(CASCADES, steps)))}

    assert not twice(first)
    assert twice(first, same)
    assert twice(first, other) != accepted
    assert twice(first, own) and twice(own, first) and twice(own, own)


# -- layers ------------------------------------------------------------------------------------------------------------

LAYERS = 3
LAYERED = Stage("dit", True, Attributes.of(params=40, layers=tuple((f"blocks.{n}", 10) for n in range(LAYERS))))


def listed(op: str, word: str, value: int | tuple[int, ...]) -> list[Diagnostic]:
    target = "dit" if op == "gather" else "t"
    attrs = Attributes.of(**{word: value})
    module = module_of(CASCADES[1:2], [Instruction(op, target, (0, 1), attrs)], (LAYERED,))
    return list(check_listed_layers(Values(module)))


@given(
    st.sampled_from(
        [("gather", "layers"), *((op, word) for op in ("forward", "backward", "weight") for word in
         ("gather", "release", "scatter", "offload", "reload"))]
    ),
    st.lists(st.integers(-2, LAYERS + 2), max_size=4).map(tuple),
)  # fmt: skip
@settings(max_examples=150)
def test_a_list_names_layers_that_there_are_and_the_first_other_one_is_told(
    step: tuple[str, str], layers: tuple[int, ...]
) -> None:
    """What lies outside the blocks is one number more, but nothing goes to the host and back of that."""
    op, word = step
    known = range(LAYERS + (word not in ("offload", "reload")))
    others = [layer for layer in layers if layer not in known]
    told = listed(op, word, layers)
    assert [one.kind for one in told] == ["unknown layer"] * bool(others)
    for one in told:
        assert one.kind == "unknown layer"
        verb = "of" if op == "gather" else word
        assert one.message.endswith(f"` {verb} layer {others[0]}, and @dit has {len(known)} layers")
        assert one.help == f"write numbers of 0 to {known[-1]}"


@pytest.mark.parametrize("op", ["forward", "backward", "weight"])
@pytest.mark.parametrize("held", [-1, 0, 1, 2])
def test_at_least_the_layer_that_computes_is_whole(op: str, held: int) -> None:
    told = listed(op, "held", held)
    assert [(one.kind, one.label) for one in told] == [("none held", f"held = {held}")] * (held < 1)


# -- encodings ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9).map(random.Random))
@settings(max_examples=150)
def test_each_clip_of_a_cascade_is_in_one_of_its_inputs_of_every_encoder(rng: random.Random) -> None:
    """And each of these has some of its clips; what it reads of stages that encode nothing is not asked."""
    encoders = ("text", "vae")
    stages = (*(Stage(name, False, Attributes.of(output="none")) for name in encoders), Stage("dit", True))
    sources = [
        Cascade(f"s{n}", Phase.ENCODE if stage != "dit" else Phase.FORWARD, stage, clips, 1, 4, 0)
        for n, (stage, clips) in enumerate(
            (rng.choice((*encoders, "dit")), tuple(rng.sample(range(3), rng.randint(1, 2)))) for _ in range(5)
        )
    ]
    names = [source.name for source in sources]
    phase = rng.choice((Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD))
    inputs = tuple(rng.sample([*names, "absent"], rng.randint(0, 4)))
    clips = tuple(rng.sample(range(3), rng.randint(1, 2)))
    reader = Cascade("reader", phase, "dit", clips, 1, 4, 0, inputs)
    module = module_of((*sources, reader), (), stages)
    told = [one for one in check_cascade_inputs(Values(module)) if one.kind == "not its encoding"]
    right = []
    for encoder in encoders if phase is not Phase.BACKWARD else ():
        own = [source.clips for name in inputs for source in sources if (source.name, source.stage) == (name, encoder)]
        each_once = all(sum(number in read for read in own) == 1 for number in clips)
        if not each_once or any(not {*read} & {*clips} for read in own):
            right.append(encoder)
    assert [one.message.split("@")[1].split()[0] for one in told if one.message.startswith("%reader ")] == right
