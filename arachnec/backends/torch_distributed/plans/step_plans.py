"""The batch and the plan of each step on every rank: drawn, planned, shared as text, parsed and proved while the step
before runs.

All that happens in threads beside the one that trains, over connections of its own, so that a step waits for its plan
only where planning takes longer than the step before. A batch whose shapes were planned before runs that plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.plans.background_planner import BackgroundPlanner, PlannedClip, Question
from arachnec.backends.torch_distributed.plans.shape_trials import any_untried
from arachnec.backends.torch_distributed.plans.supported import demand_supported
from arachnec.backends.torch_distributed.reporting.report import PlannedTimes
from arachnec.backends.torch_distributed.weights.shared_weights import META
from arachnec.cluster.topology import cluster_for, machines, node_of
from arachnec.data.clip import VideoClip
from arachnec.executable.batches import Batches, Drawn, ManifestBatches, Mark, ShapesKey, placed_in, shapes_key
from arachnec.executable.folder import Executable, iteration_of
from arachnec.executable.program_input import demand_own_input
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import ByLength
from arachnec.ir.nodes import Instruction, Module, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.launch.phases import GROUP_TIMEOUT, Timeouts
from arachnec.models.file import ModelFile
from arachnec.optimizers.kept_state import more_state
from arachnec.passes.check import Check
from arachnec.runtime import told_batches
from arachnec.runtime.agreement import share_text

OF_STATE = ("dtype", "ema", "optimizer", "groups")


def state_beyond_plan(executable: Executable, model_file: ModelFile, training: Training) -> float:
    """GiB of state that these options take on a rank beyond those of the executable; 0 where they are the same."""
    compiled = executable.training
    if all(getattr(compiled, name) == getattr(training, name) for name in OF_STATE):
        return 0.0
    before, after = ((build_model(model_file, options, META), options) for options in (compiled, training))
    return more_state(model_file, before, after)


def demand_room(module: Module, more: float) -> None:
    """Raises ``UserError`` where some rank has less left than ``more`` GiB."""
    if not more or module.cluster is None:
        return
    values, nodes = Values(module), machines(module.cluster)
    for program in module.programs:
        free = nodes[node_of(module.cluster, program.rank)].memory - high_water(values, program).total
        if free < more:
            dtypes = ", ".join(str(stage.attrs.get("dtype")) for stage in module.stages if stage.trained)
            raise user_error(
                f"the options of this run take {more:.2f} GiB more than was proved: rank {program.rank} has "
                f"{free:.2f} GiB left",
                help=(
                    "compile again with the same --train and --set, so that the plan leaves room for them; the "
                    f"executable was compiled for {dtypes}"
                ),
            )


PlanKey = tuple[ShapesKey, int]  # the shapes of a batch, and which of the measurements its plan was made for
KEPT = 256
CLOSE_S = 5.0


@dataclass(frozen=True)
class MeasuredSpeeds:
    """What plans are made for where it is not as the cluster says: GB/s of links, how many times slower ranks are. And
    the densities of the layers that are sparse by now, by number and head; None where nothing was measured."""

    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    slowed: Mapping[int, float] = field(default_factory=dict)
    densities: Mapping[int, ByLength] | None = None


@dataclass(frozen=True)
class Planned:
    """A step as every rank knows it. ``key`` is equal for steps that run the same program, ``number`` the batch's."""

    step: int
    number: int
    module: Module
    clips: Mapping[int, VideoClip]  # by id in the module
    key: PlanKey
    mark: Mark  # of the batches, after this step
    reused: bool  # whether a batch of the same shapes was planned before
    times: PlannedTimes


class Plans:
    """Hands out checked programs. All ranks make it together, and ask for the same steps in the same order."""

    def __init__(
        self,
        executable: Executable,
        rank: int,
        world: int,
        batches: Batches | None = None,
        *,
        more_state: float = 0.0,
        replans: bool = False,
    ) -> None:
        """``more_state`` is GiB that this run's options take on every rank, beyond what is planned. With ``replans``
        the batches are not those of the executable."""
        self._more_state = more_state
        self._rank, self._world = rank, world
        self._executable = executable
        self.batches = batches or ManifestBatches(executable)
        traced = executable.traced.cluster
        assert traced is not None
        self._cluster = cluster_for(traced, world)
        self._steps: dict[int, Future[Planned | None]] = {}
        self._programs: dict[PlanKey, tuple[Module, PlannedTimes]] = {}
        self._asked: set[PlanKey] = set()
        self._speeds = [MeasuredSpeeds()]  # by version: 0 is the cluster as it was given
        self._versions: list[tuple[int, int]] = []  # from which step on, and the version
        program = executable.program
        fits = program.cluster is not None and program.cluster.world == world
        self._compiled = print_module(program) if fits else None
        self._compiled_clips = iteration_of(executable.traced, 0).clips
        self._compiled_key = shapes_key(self._compiled_clips)
        # the program that was compiled waits too, until its clips' shapes were tried
        self._tries = any_untried(executable, self._compiled_clips)
        # where links choose the grouping, plans follow what is measured of them
        self.follows_links = "grouping" in program.attrs
        # and where they say which layers are sparse, what is measured of these
        self.follows_densities = "sparsify" in executable.header.pipeline
        replans = replans or self.batches.told or executable.header.iterations > 1 or not fits
        replans = replans or self.follows_links or self._tries
        self._group: dist.ProcessGroup | None = None
        self._planner: BackgroundPlanner | None = None
        if replans:
            self._plan_anew()
        self._draws = ThreadPoolExecutor(1, "draws")
        self._thread = ThreadPoolExecutor(1, "plans")
        self._closing = False

    def _plan_anew(self) -> None:
        """Have plans made in the background, of batches that have none. Collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            self._planner = BackgroundPlanner(self._executable.folder, self._world) if self._rank == 0 else None

    def get(self, step: int) -> Planned | None:
        """A step's batch and program, waited for if need be; None where the batches have ended.

        Raises ``UserError`` for a batch that cannot be drawn, and a plan that cannot be made or that does not check.
        """
        self.prepare(step)
        for done in [known for known in self._steps if known < step]:
            del self._steps[done]  # and the tensors of its clips
        return self._steps[step].result()

    def get_ready(self, step: int) -> Planned | None:
        """A later step where this rank has proved it by now. A mistake is left for ``get``."""
        plan = self._steps.get(step)
        return plan.result() if plan is not None and plan.done() and plan.exception() is None else None

    def prepare(self, step: int) -> None:
        """Have a step drawn, planned and proved in the background, after what was asked for before."""
        if step in self._steps:
            return
        version = next((number for since, number in reversed(self._versions) if step >= since), 0)
        draws = self._rank == 0 or not self.batches.told
        drawing = self._draws.submit(self._drawn, step, version) if draws else None
        self._steps[step] = self._thread.submit(self._planned, step, version, drawing)

    def follow(self, step: int, **measured: Any) -> None:
        """Plan from ``step`` on for fields of ``MeasuredSpeeds`` that were ``measured`` anew. Collective: all ranks say
        the same, before they ask for that step."""
        self._plan_anew()
        speeds = replace(self._speeds[self._versions[-1][1] if self._versions else 0], **measured)
        if speeds not in self._speeds:
            self._speeds.append(speeds)
        self._versions.append((step, self._speeds.index(speeds)))
        self.prepare(step)

    def close(self) -> None:
        """End the planner. Plans that were asked for and not used are given up, on all ranks."""
        self._closing = True
        if self._planner is not None:
            self._planner.close()
        wait(self._steps.values(), CLOSE_S)
        for thread in (self._draws, self._thread):
            thread.shutdown(wait=False)

    def _drawn(self, step: int, version: int) -> Drawn | None:
        """Draw a batch, and ask for its plan where its shapes have none."""
        if self._closing:
            return None
        drawn = self.batches.draw(step)
        if drawn is not None and self._planner is not None:
            key = _key(drawn, version)
            if key not in self._asked and (self._tries or not self._is_compiled(key)):
                self._asked.add(key)
                self._planner.ask(self._question(drawn, key))
        return drawn

    def _planned(self, step: int, version: int, drawing: Future[Drawn | None] | None) -> Planned | None:
        if self.batches.told:
            drawn = told_batches.told(drawing, self._group)
        else:
            drawn = None if drawing is None else drawing.result()
        if drawn is None:
            return None
        key = _key(drawn, version)
        reused = key in self._programs
        if reused:
            self._programs[key] = self._programs.pop(key)  # the latest used
        else:
            proved = self._proved(drawn, key)
            self._programs[key] = proved, PlannedTimes.of(proved)
            if len(self._programs) > KEPT:
                self._programs.pop(next(iter(self._programs)))
        module, times = self._programs[key]
        clips = placed_in(module.clips, drawn)
        if self.batches.told:
            clips = told_batches.delivered(clips, module, self._group)
        return Planned(step, drawn.number, module, clips, key, drawn.mark, reused, times)

    def _proved(self, drawn: Drawn, key: PlanKey) -> Module:
        compiled = self._is_compiled(key)
        text = self._shared(drawn, key) if self._tries or not compiled else ""
        module = checked_program((self._compiled or "") if compiled else text, f"iteration {drawn.number}")
        clips = self._compiled_clips if compiled else drawn.planned
        if self._speeds[key[1]].densities is not None and shapes_key(module.clips) == key[0]:
            clips = module.clips  # a plan that is kept may be of an earlier batch
        demand_own_input(self._executable, module, drawn.number, self._cluster, clips)
        demand_room(module, self._more_state)
        return module

    def _shared(self, drawn: Drawn, key: PlanKey) -> str:
        if self._planner is None:
            return share_text(None, self._group)
        try:
            text = "" if self._closing else self._planner.fetch(self._question(drawn, key))
        except UserError:
            if self._closing:
                share_text("", self._group)  # the other ranks wait for it
            raise
        return share_text(text, self._group)

    def _question(self, drawn: Drawn, key: PlanKey) -> Question:
        version = key[1]
        speeds = self._speeds[version]
        links = [(a, b, speed) for (a, b), speed in speeds.links.items()]
        clips = [PlannedClip.of(clip) for clip in drawn.planned]
        densities = None if speeds.densities is None else sorted(speeds.densities.items(), key=lambda item: item[0])
        slowed, planned = sorted(speeds.slowed.items()), self._is_compiled(key)
        return Question(drawn.number, version, links, slowed, clips, densities, planned)

    def _is_compiled(self, key: PlanKey) -> bool:
        return key == (self._compiled_key, 0) and self._compiled is not None


def _key(drawn: Drawn, version: int) -> PlanKey:
    return shapes_key(drawn.planned), version


def checked_program(text: str, source: str) -> Module:
    """A lowered module that was parsed, verified and proved, and that this back end can run.

    Raises ``UserError`` with every problem found.
    """
    module = parse_module(text, source)
    problems = verify(module)
    if problems:
        raise UserError(*problems)
    module = Check().run(module)
    demand_supported(module, module.programs)
    return module


@dataclass
class StepLimits:
    """``applies``: planned times are those of this device; ``compiles``: a plan's first step may compile kernels."""

    timeouts: Timeouts
    applies: bool
    compiles: bool
    _longest_ms: float = 0.0  # of the steps so far, but for the first of each plan
    _begun: set[PlanKey] = field(default_factory=set)  # plans that were carried out before

    @classmethod
    def of(cls, timeouts: Timeouts, executable: Executable, device: torch.device) -> StepLimits:
        on_cpu = device.type == "cpu"
        return cls(timeouts, planned_for_cpu(executable) or not on_cpu, not on_cpu)

    def of_step(self, planned: Planned) -> float:
        """Seconds. A plan's first step may take as long beyond its own limit as the start may."""
        first = 0.0 if planned.key in self._begun else self.timeouts.of_start(planned.module)
        return self.timeouts.of_step(planned.times.ends, self._longest_ms, first=first, applies=self.applies)

    def of_instructions(self, planned: Planned) -> Callable[[Instruction], float]:
        """Seconds for every instruction of a step that is about to begin."""
        compiles = self.compiles and planned.key not in self._begun
        first = self.timeouts.of_start(planned.module) if compiles else 0.0

        def limit(instruction: Instruction) -> float:
            time = instruction.attrs.get("time")
            ms = 0.0 if time is None else quantity(time)
            return self.timeouts.of_instruction(
                ms, self._longest_ms, planned.times.ends, first=first, applies=self.applies
            )

        return limit

    def took(self, planned: Planned, ms: float) -> None:
        """Note what a step took."""
        if planned.key in self._begun:
            self._longest_ms = max(self._longest_ms, ms)
        self._begun.add(planned.key)


def planned_for_cpu(executable: Executable) -> bool:
    """Whether the executable's cluster is one of CPUs."""
    cluster = executable.program.cluster
    return cluster is not None and cluster.attrs.get("device") == "cpu"
