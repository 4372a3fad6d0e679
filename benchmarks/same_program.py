"""When two plans are the same: their ranks do the same, in the same order, whatever the cascades are called."""

from __future__ import annotations

from arachnec.ir.nodes import Module


def shape(module: Module) -> str:
    """What two lowered programs share exactly if they are the same."""
    known: dict[str, tuple[object, ...]] = {c.name: (c.stage, c.batch, c.tokens, c.text) for c in module.cascades}
    known |= {stage.name: (stage.name,) for stage in module.stages}
    lists = [
        [(step.op, known[step.target], step.peers, step.attrs.get("bytes")) for step in program.instructions]
        for program in module.programs
    ]
    return repr(lists)
