"""How a program that goes on begins: as the one before it, up to where it was planned again."""

from __future__ import annotations

from arachnec.ir.nodes import Instruction
from arachnec.ir.values import Attributes
from arachnec.lowering.continuation import beginning, begins_as


def test_a_list_begins_up_to_the_replan_of_its_round() -> None:
    steps = [Instruction("replan", "m", (), Attributes.of(round=number)) for number in (1, 2, 3)]
    denoise = Instruction("denoise", "a", (), Attributes.of(round=2))
    whole = [steps[0], denoise, steps[1], denoise, steps[2]]
    assert beginning(whole, 1) == (steps[0],)
    assert beginning(whole, 2) == (steps[0], denoise, steps[1])
    assert begins_as(whole, [steps[0], denoise, steps[1]], 2)
    assert not begins_as(whole, [steps[0], steps[1]], 2)
