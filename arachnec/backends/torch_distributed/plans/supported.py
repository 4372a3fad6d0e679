"""Which programs this back end can run: refused at load is what it would run as something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from arachnec.ir.diagnostic import Diagnostic, Mistake, UserError
from arachnec.ir.head_density import layer_densities
from arachnec.ir.host_placement import in_host
from arachnec.ir.nodes import STAGE_OPS, Instruction, Module, Phase, Program

# A forward runs the whole model to its loss in a cascade of phase `train`, and in one of phase `forward` a stage of a
# model that `stages` cut. What is handed on is an encoder's tensor, or all that goes between two stages.
PHASES: dict[str, tuple[Phase, ...]] = {
    "encode": (Phase.ENCODE,),
    "forward": (Phase.TRAIN, Phase.FORWARD),
    "backward": (Phase.TRAIN, Phase.BACKWARD),
    "weight": (Phase.WEIGHT,),
    "send": (Phase.ENCODE, Phase.FORWARD, Phase.BACKWARD),
    "receive": (Phase.ENCODE, Phase.FORWARD, Phase.BACKWARD),
    "free": (Phase.ENCODE, Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD),
}
OF_STAGES = tuple(op for op in STAGE_OPS if op != "replan")
STAGED = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


def demand_supported(module: Module, programs: Sequence[Program]) -> None:
    """Raises ``UserError`` where this back end cannot run ``programs``, of a lowered ``module``.

    Names the first instruction of each operation and phase that it does not know.
    """
    trained = [stage for stage in module.stages if stage.trained]
    problems: list[Diagnostic] = []
    if len(trained) > 1 and len({stage.attrs.get("part_of", stage.name) for stage in trained}) > 1:
        names = " and ".join(f"`@{stage.name}`" for stage in trained)
        problems.append(
            Mistake(
                trained[1].span,
                f"this back end trains a model as one stage or cut by `stages`, and {names} are trained",
                label="the second one",
                help="`arachnec simulate` runs the plan; for `arachnec run` make the whole model one trained stage",
            )
        )
    problems += islice(_sparse_problems(module), 1)
    parts = {stage.name for stage in module.stages if "part_of" in stage.attrs}
    phases = {cascade.name: cascade.phase for cascade in module.cascades}
    apart = {c.name for c in module.cascades if c.phase in STAGED and c.stage not in parts}
    refused: dict[tuple[str, Phase | None], Mistake] = {}
    for program in programs:
        for instruction in program.instructions:
            phase = phases.get(instruction.target)
            if not _known(instruction.op, phase) or instruction.target in apart:
                refused.setdefault((instruction.op, phase), _refusal(instruction, phase, program.rank))
    if problems or refused:
        raise UserError(*problems, *refused.values())


def _sparse_problems(module: Module) -> Iterator[Diagnostic]:
    """Attention to chosen keys runs in models that lie on devices, its heads exchanged between the ranks of a clip."""
    whole = "compile with `sparsify,shard-optimizer,partition,annotate,schedule-z3,place,bucket,lower,check`"
    for stage in module.stages:
        if not stage.trained or not layer_densities(stage):
            continue
        refused = (
            (bool(in_host(stage)), "where parts of the model lie in host memory", whole),
            ("graphs" in stage.attrs, "in blocks that no one graph serves", "compile without `sparsify`"),
        )
        for cannot, how, remedy in refused:
            if cannot:
                yield Mistake(
                    stage.span,
                    f"`@{stage.name}` attends to chosen keys, which this back end cannot do {how}",
                    label="planned so here",
                    help=f"`arachnec simulate` runs the plan; for `arachnec run` {remedy}",
                )


def _known(op: str, phase: Phase | None) -> bool:
    return op in OF_STAGES or phase in PHASES.get(op, ())


def _refusal(instruction: Instruction, phase: Phase | None, rank: int) -> Mistake:
    op = instruction.op
    known = ", ".join(f"`{name}` of {' or '.join(p.value for p in phases)}" for name, phases in PHASES.items())
    if op not in PHASES:
        reason = "it does not know the operation"
    elif phase in STAGED:
        reason = f"its cascade is of phase `{phase.value}`, and its stage was not made by `stages`"
    else:
        reason = f"its cascade is of phase `{phase and phase.value}`"
    of_stages = ", ".join(f"`{name}`" for name in OF_STAGES)
    return Mistake(
        instruction.span,
        f"`{op} %{instruction.target}` cannot be executed by this back end: {reason}",
        label=f"in the program of rank {rank}",
        help=f"`arachnec simulate` runs it; `arachnec run` takes {known} cascades, and {of_stages}",
    )
