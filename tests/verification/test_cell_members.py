"""Members of a cell gather alike, stage by stage."""

from __future__ import annotations

from dataclasses import replace

from arachnec.analysis.uses import Values
from arachnec.ir.nodes import integers
from arachnec.verification.shards import check_gathers
from tests.lowering.test_reduce_overlap import split


def test_what_a_member_of_a_cell_gathers_otherwise_is_told_once_of_its_stage() -> None:
    """Two stages on every rank, of which a forward of the second reads its layers in another order."""
    module = split("zb-v-cells", [9] * 8)
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    program = module.programs[1]
    steps = list(program.instructions)
    stages = list(dict.fromkeys(stage_of[step.target] for step in steps if step.op == "forward"))
    at = next(n for n, step in enumerate(steps) if step.op == "forward" and stage_of[step.target] == stages[1])
    listed = integers(steps[at].attrs["gather"])
    assert len(stages) == 2 and len(listed) > 1
    steps[at] = replace(steps[at], attrs=steps[at].attrs.updated(gather=listed[::-1]))
    programs = (replace(p, instructions=tuple(steps)) if p is program else p for p in module.programs)
    problems = list(check_gathers(Values(replace(module, programs=tuple(programs)))))
    assert [problem.kind for problem in problems] == ["unequal gathers"]
    assert f"one cell of @{stages[1]} " in problems[0].message
