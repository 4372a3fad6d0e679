"""When receives start: as early as their order and the planned memory allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.receive_prefetch import planned_memory, prefetch_receives
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Cascade, Instruction, Level, Module, Phase, Program, Stage
from arachnec.ir.values import Attributes, Quantity


def gib(**values: float) -> Attributes:
    return Attributes.of(**{name: Quantity(value, "GiB") for name, value in values.items()})


PROGRAM = Program(
    0,
    (
        Instruction("forward", "a", (0,), gib(memory=4.0, workspace=1.0)),
        Instruction("backward", "a", (0,), gib(workspace=2.0)),
        Instruction("receive", "x", (1,), gib(memory=2.0)),
        Instruction("receive", "y", (1,), gib(memory=1.0)),
        Instruction("forward", "b", (0,), gib(memory=3.0)),
        Instruction("backward", "b", (0,)),
        Instruction("free", "x"),
        Instruction("free", "y"),
    ),
    gib(state=1.0),
)


SPLIT = Program(
    0,
    (
        Instruction("forward", "f", (0,), gib(memory=4.0)),
        Instruction("backward", "b", (0,), gib(memory=3.0)),
        Instruction("weight", "w", (0,)),
        Instruction("receive", "x", (1,), gib(memory=2.0)),
        Instruction("step", "dit"),
    ),
    gib(state=1.0),
)


def test_what_a_weight_still_reads_takes_room() -> None:
    phases = {"f": (Phase.FORWARD, ()), "b": (Phase.BACKWARD, ("f",)), "w": (Phase.WEIGHT, ("b",))}
    cascades = tuple(Cascade(name, phase, "dit", (0,), 1, 4, 0, inputs) for name, (phase, inputs) in phases.items())
    values = Values(Module("m", Level.LOWERED, stages=(Stage("dit", True),), cascades=cascades, programs=(SPLIT,)))
    assert planned_memory(values, SPLIT) == (5.0, 8.0, 4.0, 3.0, 3.0)
    assert [len(receives) for receives in prefetch_receives(values, SPLIT, 6.0)] == [0, 0, 1, 0, 0]
    assert [len(receives) for receives in prefetch_receives(values, SPLIT, 5.5)] == [0, 0, 0, 1, 0]


def values_of(program: Program) -> Values:
    """Of a module whose cascades all train."""
    names = dict.fromkeys(step.target for step in program.instructions)
    cascades = tuple(Cascade(name, Phase.TRAIN, "dit", (0,), 1, 4, 0) for name in names)
    return Values(Module("m", Level.LOWERED, stages=(Stage("dit", True),), cascades=cascades, programs=(program,)))


def places(limit: float) -> dict[str, int]:
    prefetched = prefetch_receives(values_of(PROGRAM), PROGRAM, limit)
    return {step.target: index for index, receives in enumerate(prefetched) for step in receives}


def test_the_planned_memory_is_what_the_instructions_state() -> None:
    assert planned_memory(values_of(PROGRAM), PROGRAM) == (6.0, 7.0, 3.0, 4.0, 7.0, 7.0, 4.0, 2.0)


def test_with_memory_to_spare_every_receive_starts_first() -> None:
    assert places(100.0) == {"x": 0, "y": 0}


def test_a_receive_waits_where_its_buffer_would_not_fit() -> None:
    assert places(7.0) == {"x": 2, "y": 2}


def test_a_receive_never_passes_an_earlier_one() -> None:
    # y alone would fit from the start, x does not fit before its place.
    assert places(8.0) == {"x": 2, "y": 2}


def test_a_receive_starts_as_far_ahead_as_it_fits() -> None:
    assert places(9.0) == {"x": 0, "y": 2}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=12),
    st.integers(4, 40),
)
def test_receives_start_as_early_as_each_finds_room_behind_the_one_before(
    parts: list[tuple[int, int]], limit: int
) -> None:
    """Whole GiB, so that sums are exact: by trying every place, from the receive's own backwards."""
    ops = ("receive", "forward", "backward", "free")
    steps = tuple(
        Instruction(ops[kind], f"v{number}", (0,), gib(memory=float(size))) for number, (kind, size) in enumerate(parts)
    )
    program = Program(0, (*steps, Instruction("step", "s")), gib(state=1.0))
    values = values_of(program)
    held, earliest = list(planned_memory(values, program)), 0
    for index, step in enumerate(program.instructions):
        if step.op != "receive":
            continue
        size = parts[index][1]
        place = next(place for place in range(earliest, index + 1) if all(h + size <= limit for h in held[place:index]))
        held[place:index] = [h + size for h in held[place:index]]
        earliest = place
        assert step in prefetch_receives(values, program, float(limit))[place]
