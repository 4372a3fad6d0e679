"""The plan of the next step, made by a process of its own, also for other ranks than the passes were written for.

The planner is a child of rank 0: it reads a question per line, an iteration and the links as measured, and answers with
the lowered module's text, or with the mistake that kept it from one. Clip shapes that compiling had no time for are
tried before their plan is made, and the others while no question waits. It ends when rank 0 does.

A host that is lost leaves a job with fewer ranks, and it goes on there. What says how many ranks hold a stage or a cell
is given up where it does not fit, and planned; orders that a file says are given up always.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from arachnec.backends.torch_distributed.plans.kept_plan import better_plan, with_densities
from arachnec.cluster.topology import cluster_for, with_measured, with_slowdowns
from arachnec.executable.batches import shapes_key
from arachnec.executable.folder import Executable, iteration_of, read_executable
from arachnec.ir.diagnostic import UserError, render, user_error
from arachnec.ir.head_density import ByLength
from arachnec.ir.nodes import Clip, Cluster, Module
from arachnec.ir.parameter_cells import cell_fits
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes
from arachnec.launch.planner_process import PlannerProcess, answering
from arachnec.passes.annotate import Annotate
from arachnec.passes.infra.base import Pass
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.schedule_pipeline import SchedulePipeline
from arachnec.passes.schedule_same_bucket import ScheduleSameBucket
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.shard_parameters import ShardParameters
from arachnec.passes.stages import Stages

if TYPE_CHECKING:
    from arachnec.backends.torch_distributed.plans.shape_trials import ShapeTrials


def on_other_ranks(pipeline: Pipeline, cluster: Cluster) -> Pipeline:
    """The passes for a cluster of other size than the one that they were written for.

    ``stages`` keeps its ``p`` or ``cuts`` where the ranks of one pipeline divide all ranks. Else there is one pipeline
    of the most ranks, no more than before, that do. A ``degree`` stays where it divides the ranks of a stage, a
    ``cell`` too, else it is the largest that does; ``replicas`` and ``degrees`` are planned anew, and ``orders`` of a
    file give way to the schedule: they are for as many micro-batches as each pipeline had. The one ``degree`` of a
    fixed layout is at most all ranks.
    """
    schedule = next((step for step in pipeline.passes if isinstance(step, SchedulePipeline)), SchedulePipeline())
    per_rank = schedule.stages_each
    count = next((_count(step) for step in pipeline.passes if isinstance(step, Stages)), None)
    ranks = None if count is None else count // per_rank  # of one pipeline
    fitting = 1 if ranks is None else _most(ranks, cluster.world)
    replicas = cluster.world // fitting
    degree = schedule.degree if replicas % (schedule.degree or 1) == 0 else None

    def fitted(step: Pass) -> Pass:
        if isinstance(step, ShardParameters) and step.cell.isdecimal():
            cells = [size for size in range(1, int(step.cell) + 1) if replicas % size == 0]
            return replace(step, cell=str(max(size for size in cells if cell_fits(size, cluster.nodes, cluster.gpus))))
        if isinstance(step, Stages) and ranks is not None:
            fewer: dict[str, Any] = {} if fitting == ranks else {"p": fitting * per_rank, "cuts": None}
            return replace(step, replicas=None, **fewer)
        if isinstance(step, SchedulePipeline):
            return replace(step, degree=degree, degrees=None, orders=None)
        if isinstance(step, ScheduleStatic | ScheduleSameBucket) and step.degree is not None:
            return replace(step, degree=min(step.degree, cluster.world))
        return step

    return Pipeline(tuple(map(fitted, pipeline.passes)))


def _count(stages: Stages) -> int | None:
    return stages.p if stages.cuts is None else len(stages.cuts) + 1


def _most(ranks: int, world: int) -> int:
    return max(number for number in range(1, max(1, ranks) + 1) if world % number == 0)


PLANNER = "arachnec.backends.torch_distributed.plans.background_planner"


class PlannedClip(msgspec.Struct, frozen=True):
    """A clip to plan for, by its id in the IR."""

    id: int
    frames: int
    height: int
    width: int
    text: int
    tokens: int
    name: str

    @classmethod
    def of(cls, clip: Clip) -> PlannedClip:
        name = str(clip.attrs.get("name", clip.id))
        return cls(clip.id, clip.frames, clip.height, clip.width, clip.text, clip.tokens, name)

    def clip(self, iteration: int) -> Clip:
        attrs = Attributes.of(name=self.name, iteration=iteration)
        return Clip(self.id, self.frames, self.height, self.width, self.text, self.tokens, attrs)


class Question(msgspec.Struct, frozen=True):
    """The plan of an iteration, on links of these GB/s between two ranks where others than the cluster's were measured,
    and on ranks that are so many times slower.

    ``version`` counts the measurements that plans were made for. ``clips`` are those of the iteration; without, they
    are those that the executable has for it. ``densities`` are those of the layers that are sparse by now."""

    iteration: int
    version: int = 0
    links: list[tuple[int, int, float]] = []
    slowed: list[tuple[int, float]] = []
    clips: list[PlannedClip] | None = None
    densities: list[tuple[int, ByLength]] | None = None
    planned: bool = False  # it has a plan: only its shapes are to be tried


class Answer(msgspec.Struct, frozen=True):
    iteration: int
    version: int = 0
    text: str | None = None
    error: str | None = None
    refused: str | None = None  # a clip that the model cannot take, of this iteration or of another


@dataclass
class IterationPlanner:
    """Plans the iterations of an executable on ``world`` ranks, by its own pipeline (``on_other_ranks``)."""

    executable: Executable
    world: int
    _kept: dict[object, Module] = field(default_factory=dict)  # the latest plan of shapes on a cluster

    def plan(
        self,
        number: int,
        links: Mapping[tuple[int, int], float] | None = None,
        clips: Sequence[PlannedClip] | None = None,
        slowed: Mapping[int, float] | None = None,
        densities: Mapping[int, ByLength] | None = None,
    ) -> Module:
        """The lowered module of one iteration, on ``links`` and ranks as they were measured; of the executable's own
        ``clips`` where none are given. For measured ``densities`` the latest plan of these shapes is kept, unless a new
        one is predicted to gain. Raises ``UserError`` for what cannot be planned on so many ranks."""
        model = self._model
        if clips is not None:
            model = replace(model, clips=tuple(clip.clip(number) for clip in clips))
        iteration = iteration_of(model, number)
        if links and iteration.cluster is not None:
            iteration = replace(iteration, cluster=with_measured(iteration.cluster, links))
        if slowed and iteration.cluster is not None:
            iteration = replace(iteration, cluster=with_slowdowns(iteration.cluster, slowed))
        iteration = with_densities(iteration, densities)
        planned = self._pipeline.run_iteration_part(iteration)
        key = shapes_key(iteration.clips), iteration.cluster
        kept = self._kept.get(key) or self._compiled(key)
        if kept is not None and densities is not None:
            profile = next((step.profile for step in self._pipeline.passes if isinstance(step, Annotate)), None)
            planned = better_plan(kept, planned, profile)
        self._kept[key] = planned
        return planned

    def _compiled(self, key: object) -> Module | None:
        """The executable's own program, where it is of these shapes on this cluster."""
        clips = iteration_of(self.executable.traced, 0).clips
        return self.executable.program if key == (shapes_key(clips), self.executable.model.cluster) else None

    @cached_property
    def _pipeline(self) -> Pipeline:
        from arachnec.passes.infra.base import installed, load_file

        registry = installed()
        for name in self.executable.header.load:
            registry = load_file(self.executable.folder / name, registry)
        pipeline = Pipeline.parse(self.executable.header.pipeline, registry)
        return pipeline if self._as_compiled else on_other_ranks(pipeline, self._cluster)

    @cached_property
    def _cluster(self) -> Cluster:
        traced = self.executable.traced.cluster
        assert traced is not None
        return cluster_for(traced, self.world)

    @property
    def _as_compiled(self) -> bool:
        return self._cluster == self.executable.traced.cluster

    @cached_property
    def _model(self) -> Module:
        """The module after the passes of scope ``model``, for the ranks that run: once for all iterations.

        What was chosen when it was compiled is held, unless it runs on other ranks.
        """
        traced, planned = self.executable.traced, self.executable.model
        if self._as_compiled:
            return replace(planned, clips=traced.clips)
        return self._pipeline.run_model_part(replace(traced, cluster=self._cluster))


class BackgroundPlanner:
    """Rank 0's side: ask early, fetch late."""

    def __init__(self, folder: Path, world: int) -> None:
        self._process = PlannerProcess.of(PLANNER, str(folder.absolute()), str(world))
        self._answers: dict[tuple[int, int], Answer] = {}
        self._asked: set[tuple[int, int]] = set()
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, question: Question) -> None:
        """Have an iteration planned; returns at once."""
        if key_of(question) in self._asked:
            return
        self._asked.add(key_of(question))
        self._process.ask(question)  # ``fetch`` reports the process's end

    def fetch(self, question: Question) -> str:
        """The plan as text, waited for if need be; asked for if it was not."""
        self.ask(question)
        key = key_of(question)
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or self._ended)
            answer = self._answers.pop(key, None)
            self._asked.discard(key)
        if answer is None:
            raise user_error(
                f"the planning process ended with exit code {self._process.process.wait()} before it answered",
                help="its own output above says more",
            )
        if answer.refused is not None:
            raise user_error(answer.refused.removeprefix("error: "))
        if answer.text is None:
            raise user_error(f"iteration {question.iteration} has no plan\n{answer.error or ''}")
        return answer.text

    def close(self) -> None:
        self._process.close()

    def _listen(self) -> None:
        for line in self._process.answers():
            answer = msgspec.json.decode(line, type=Answer)
            with self._changed:
                self._answers[key_of(answer)] = answer
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def key_of(message: Question | Answer) -> tuple[int, int]:
    return message.iteration, message.version


def answer(planner: IterationPlanner, question: Question) -> Answer:
    links = {(a, b): speed for a, b, speed in question.links}
    densities = None if question.densities is None else dict(question.densities)
    try:
        module = planner.plan(question.iteration, links, question.clips, dict(question.slowed), densities)
        return Answer(*key_of(question), text=print_module(module))
    except UserError as error:
        if question.slowed:  # a run goes on with the plan for equal ranks
            return answer(planner, msgspec.structs.replace(question, slowed=[]))
        return Answer(*key_of(question), error="\n".join(render(d) for d in error.diagnostics))


def _refused(trials: ShapeTrials | None, question: Question) -> Answer | None:
    """What the model refuses of the question's clips, or was found to refuse; an empty text where nothing else is asked
    for."""
    if trials is not None:
        clips = [(clip.name, (clip.frames, clip.height, clip.width, clip.text)) for clip in question.clips or []]
        try:
            trials.try_clips(clips)
        except UserError as error:
            return Answer(*key_of(question), refused="\n".join(render(d) for d in error.diagnostics))
    return Answer(*key_of(question), text="") if question.planned else None


def _read(lines: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def _next_line(lines: queue.SimpleQueue[str | None], trials: ShapeTrials | None) -> str | None:
    """The next question, None where there will be no more; until it is there, clip shapes are tried."""
    while trials is not None and trials.unfinished and lines.empty():
        trials.try_next()
    return lines.get()


def main(folder: str, world: str) -> None:
    reply = answering()
    if not Path(folder).is_dir():  # an own loop's, which has ended before this process began
        return
    os.chdir(folder)  # where the pipeline finds its profile
    planner = IterationPlanner(read_executable(Path(folder)), int(world))
    trials = None
    if planner.executable.header.untried:
        from arachnec.backends.torch_distributed.plans.shape_trials import ShapeTrials  # torch, which plans need not

        trials = ShapeTrials.of(planner.executable)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while (line := _next_line(lines, trials)) is not None:
        question = msgspec.json.decode(line, type=Question)
        reply(_refused(trials, question) or answer(planner, question))


if __name__ == "__main__":
    main(*sys.argv[1:])
