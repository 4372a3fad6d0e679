"""What the four rules take for granted: every rank has one program, and every name in it is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from arachnec.analysis.uses import COMPUTE, PHASES, Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.nodes import STAGE_OPS, Instruction


def check_structure(values: Values) -> Iterator[Diagnostic]:
    module = values.module
    assert module.cluster is not None
    world = module.cluster.world
    counts = Counter(program.rank for program in module.programs)
    for rank in sorted({*counts, *range(world)}):
        if counts[rank] != int(rank < world):
            yield Mistake(
                module.span,
                f"rank {rank} has {counts[rank]} programs",
                kind="program count",
                label="every rank of the cluster has exactly one",
                help=f"the cluster has ranks 0 to {world - 1}",
            )
    stages = {stage.name for stage in module.stages}
    sound: set[tuple[int, ...]] = set()
    for program in module.programs:
        for instruction in program.instructions:
            kind = "stage" if instruction.op in STAGE_OPS else "cascade"
            if instruction.target not in (stages if kind == "stage" else values.cascades):
                yield Mistake(
                    instruction.span,
                    f"rank {program.rank} has `{written(instruction)}`, and there is no such {kind}",
                    kind="unknown target",
                    label=f"unknown {kind}",
                    help=f"name a {kind} of this module",
                )
                continue
            if instruction.op in COMPUTE:
                yield from _phase(values, program.rank, instruction)
            reason = _peers(program.rank, instruction, world, sound)
            if reason:
                yield Mistake(
                    instruction.span,
                    f"rank {program.rank} has `{written(instruction)}`: {reason}",
                    kind="bad peers",
                    label=reason,
                    help=(
                        "send and receive name one other rank; every other group names this rank and each of its "
                        "ranks once"
                    ),
                )


def _phase(values: Values, rank: int, instruction: Instruction) -> Iterator[Diagnostic]:
    phase = values.cascades[instruction.target].phase
    if phase not in PHASES[instruction.op]:
        ops = " and ".join(f"`{op}`" for op, phases in PHASES.items() if phase in phases)
        yield Mistake(
            instruction.span,
            f"rank {rank} has `{written(instruction)}`, and %{instruction.target} is a cascade of phase {phase.value}",
            kind="wrong phase",
            label="not what this cascade does",
            help=f"a cascade of phase {phase.value} is run by {ops}",
        )


def _peers(rank: int, instruction: Instruction, world: int, sound: set[tuple[int, ...]]) -> str | None:
    """What is wrong with an instruction's ranks, else None. ``sound`` collects the groups already checked."""
    peers, op = instruction.peers, instruction.op
    if op in ("send", "receive"):
        if len(peers) != 1:
            return "it names no single other rank"
        if peers[0] == rank:
            return "a rank does not send to itself"
    elif op in ("free", "replan"):
        return "it takes no ranks" if peers else None
    elif not peers:
        return None if op in ("encode", "decode", "step") else "it names no ranks"
    elif rank not in peers:
        return f"rank {rank} is not one of its ranks"
    if peers in sound:
        return None
    if len(set(peers)) != len(peers):
        return "a rank stands in it twice"
    outside = tuple(peer for peer in peers if not 0 <= peer < world)
    if outside:
        return f"the cluster has no rank {rank_list(outside)}"
    sound.add(peers)
    return None
