"""A program of an executable trains that executable's clips and stages, on its cluster, and no others.

``check`` proves a program for the batch, the stages and the device that the program itself names. This holds those to
what was traced, so that a program edited by hand cannot leave a clip out, freeze a stage or enlarge a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arachnec.executable.folder import Executable, iteration_of
from arachnec.executable.sampling_folder import SamplingExecutable
from arachnec.ir.diagnostic import Diagnostic, Mistake, UserError
from arachnec.ir.nodes import Clip, Cluster, Level, Module, Stage
from arachnec.ir.printer import value_text
from arachnec.ir.tables import LINK_SPEEDS, OF_PARTS, STAGE
from arachnec.ir.values import Attributes, Value

ASKED = ("steps", "branches", "window", "arrival")  # of a request, which no plan changes


@dataclass(frozen=True)
class OtherFigure(Diagnostic):
    title = "{node} has {attribute} = {value} in the program, and {right} where it was compiled"
    label = "{attribute} is {value}"
    help = "a program is proved for what was traced; compile again to change the model or the cluster"
    node: str
    attribute: str
    value: str
    right: str


def demand_own_input(
    executable: Executable,
    program: Module,
    number: int,
    cluster: Cluster | None = None,
    clips: Sequence[Clip] | None = None,
) -> None:
    """Raises ``UserError`` where ``program`` is not of iteration ``number`` of the executable, or not of ``clips``
    where these were drawn.

    ``cluster`` is the one it runs on where that is not the executable's: its stages are then not those of the folder,
    because what is dealt out over ranks is dealt out over others.
    """
    batch = iteration_of(executable.traced, number).clips if clips is None else clips
    problems = [*_clips(batch, program, number)]
    problems += _cluster(cluster or executable.model.cluster, program.cluster)
    if cluster is None or cluster == executable.model.cluster:
        problems += _stages(executable.model.stages, program.stages)
    if problems:
        raise UserError(*problems)


def demand_own_requests(executable: SamplingExecutable, program: Module, stages: tuple[Stage, ...] | None) -> None:
    """Raises ``UserError`` where ``program`` does not sample the requests of the executable, as they are asked for.

    ``stages`` are those traced, as the pipeline's passes of scope ``model`` leave them; None where these are not run.
    """
    traced = executable.traced
    problems = [*_clips(traced.clips, program, 0), *_cluster(traced.cluster, program.cluster)]
    if not problems and stages is not None:
        problems += _stages(stages, program.stages)
    asked = {clip.id: clip for clip in traced.clips}
    for clip in program.clips if not problems else ():
        for name in ASKED:
            right, given = asked[clip.id].attrs.get(name), clip.attrs.get(name)
            if right != given:
                problems.append(OtherFigure(clip.span, f"request {clip.id}", name, _shown(given), _shown(right)))
    if problems:
        raise UserError(*problems)


def _clips(batch: Sequence[Clip], program: Module, number: int) -> Iterator[Diagnostic]:
    wanted = {clip.id: clip for clip in batch}
    given = {clip.id: clip for clip in program.clips}
    for clip in program.clips:
        own = wanted.get(clip.id)
        if own is None or _shape(own) != _shape(clip):
            span = clip.span
            reason = f"has clip {clip.id}, which is {'none of its batch' if own is None else 'of another shape'}"
            break
    else:
        missing = next((clip for clip in wanted if clip not in given), None)
        if missing is None:
            return
        span, reason = program.span, f"leaves out clip {missing}"
    yield Mistake(
        span,
        f"the program of iteration {number} {reason}",
        label=f"not the clips of iteration {number}",
        help=f"its clips are those of `traced.cascade` with `iteration = {number}`; compile again",
    )


def _shape(clip: Clip) -> tuple[int, ...]:
    return clip.frames, clip.height, clip.width, clip.text, clip.tokens


def _cluster(right: Cluster | None, given: Cluster | None) -> Iterator[Diagnostic]:
    if right is not None and given is not None:
        measured = dict.fromkeys(LINK_SPEEDS)
        yield from _attributes(
            f"cluster @{right.name}", right.attrs.updated(**measured), given.attrs.updated(**measured)
        )


def _stages(right: tuple[Stage, ...], given: tuple[Stage, ...]) -> Iterator[Diagnostic]:
    by_name = {stage.name: stage for stage in given}
    if [stage.name for stage in right] != [stage.name for stage in given]:
        here, there = (", ".join(f"@{stage.name}" for stage in stages) for stages in (given, right))
        yield Mistake(
            given[0].span if given else None,
            f"the program has stages {here}, the executable {there}",
            help="a program is proved for what was traced; compile again to change the model",
        )
        return
    for stage in right:
        other = by_name[stage.name]
        if stage.trained != other.trained:
            words = ("trained" if trained else "frozen" for trained in (other.trained, stage.trained))
            yield OtherFigure(other.span, f"stage @{stage.name}", "phase", *words)
        yield from _attributes(f"stage @{stage.name}", stage.attrs, other.attrs.updated(measured=None))


def _attributes(node: str, right: Attributes, given: Attributes) -> Iterator[Diagnostic]:
    for name, value in right.pairs:
        if name not in OF_PARTS and given.get(name) != value:
            yield OtherFigure(given.span(name), node, name, _shown(given.get(name)), value_text(value))
            return
    for name, value in given.pairs:
        planned = name in STAGE and STAGE[name].since > Level.TRACED
        if name not in right and not planned:
            yield OtherFigure(given.span(name), node, name, value_text(value), "nothing")
            return


def _shown(value: Value | None) -> str:
    return "nothing" if value is None else value_text(value)
