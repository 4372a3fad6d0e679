"""Clips to micro-batches to cascades.

Clips of equal frames, height, width and caption length may share a micro-batch. How many do is the policy's decision:

* ``single``: one clip per micro-batch.
* ``equal-token``: B*S <= ``tokens``.
* ``encode``: one clip per cascade, of the encoders alone; what trains is left out of the module.
* ``dual``: B*S <= M_mem and B*S^p <= M_comp (AdaptiveLoad, arXiv 2605.17923, section 3): memory grows with the tokens,
  time with a power p of them between 1 and 2.

Where parameters are dealt out over cells, a micro-batch runs on whole cells, its clips side by side
(``planning.cell_batches``).

Every policy keeps every clip; a clip that alone exceeds a limit is a micro-batch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

from arachnec.cost.profile import exponent_of, read_profile
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import formula_in, is_encoder, most_clips
from arachnec.ir.tables import OF_PARTS
from arachnec.passes.infra.base import Count, Pass
from arachnec.planning.cell_batches import MICRO_BATCHES_PER_CELL, cell_batches, most_in_memory
from arachnec.planning.launch_bound import Launches
from arachnec.planning.pipeline_orders import SPLITTING

# Fewer, larger micro-batches save launches; but the planner needs several per GPU to balance them.
MICRO_BATCHES_PER_RANK = 4


@dataclass(frozen=True)
class Partition(Pass):
    """Clips to micro-batches of equal shape, and those to encode and train cascades.

    ``tokens`` is M_mem, the most tokens of a micro-batch; by default those of the longest clip. ``p`` is the exponent
    of ``dual``: a number, ``profile`` to take the one fitted from the file ``profile``, or by default that one where
    the file has several lengths, else one fitted to the stage's FLOPs over the lengths at hand.

    Of a model in stages every micro-batch has a forward and a backward for each stage; with ``split_backward``, which a
    schedule that needs it switches on, weight gradients are cascades of their own.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.PARTITIONED

    policy: Literal["dual", "equal-token", "single", "encode"] = "dual"
    tokens: Count | None = None
    p: str | None = None
    profile: str | None = None
    split_backward: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None and self.policy in ("single", "encode"):
            raise ValueError(f"tokens is of `dual` and `equal-token`, and the policy is `{self.policy}`")
        if self.p is not None and self.policy != "dual":
            raise ValueError(f"p is of `dual`, and the policy is `{self.policy}`")

    def run(self, module: Module) -> Module:
        if not module.clips:
            raise user_error("there are no clips to train on", help="the manifest needs at least one clip")
        if self.policy == "encode":
            return _encoders_alone(module)
        trained = [stage for stage in module.stages if stage.trained]
        if not trained:
            raise user_error("no stage of the module is trained", help="at least one parameter must require a gradient")
        batches = self._batches(module, trained[0])
        stages = tuple(without_figures(stage) for stage in module.stages)
        split = self.split_backward or module.attrs.get("schedule") in SPLITTING
        return replace(module, level=Level.PARTITIONED, stages=stages, cascades=cascades(batches, stages, split))

    def informed(self, following: tuple[Pass, ...]) -> Partition:
        split = any(getattr(step, "splits_backward", False) for step in following)
        return replace(self, split_backward=True) if split else self

    def _batches(self, module: Module, stage: Stage) -> list[tuple[Clip, ...]]:
        if self.policy == "single":
            return [(clip,) for clip in module.clips]
        longest = max(clip.tokens for clip in module.clips)
        most_tokens = float(longest if self.tokens is None else self.tokens)
        if self.policy == "equal-token":
            return self._filled(module, stage, lambda clip: most_tokens / clip.tokens)
        p = self._exponent(module, stage)
        work = math.fsum(clip.tokens**p for clip in module.clips)
        world = module.cluster.world if module.cluster else 1
        in_turn = (cell_of(stage) or 1) == 1 or _is_part(stage)  # a pipeline is filled by several of them
        several = MICRO_BATCHES_PER_RANK if in_turn else MICRO_BATCHES_PER_CELL
        most_work = min(float(longest) ** p, work / (several * world))
        few = None if self.tokens is not None or _is_part(stage) else Launches.of(module, stage, several)

        def limit_of(clip: Clip) -> float:
            usual: float = min(most_tokens / clip.tokens, most_work / float(clip.tokens) ** p)
            return usual if few is None else max(usual, few.clips_on_a_rank(module, stage, clip))

        return self._filled(module, stage, limit_of)

    def _filled(self, module: Module, stage: Stage, limit_of: Callable[[Clip], float]) -> list[tuple[Clip, ...]]:
        """Micro-batches of at most so many clips per rank: on any ranks, or on whole cells of them."""
        cell, most = cell_of(stage) or 1, most_clips(stage) or math.inf
        if cell == 1:
            return micro_batches(module.clips, lambda clip: min(most, limit_of(clip)))

        def of_a_cell(clip: Clip) -> float:
            return min(cell * min(most, limit_of(clip)), most_in_memory(module, stage, clip, cell))

        return cell_batches(module.clips, cell, of_a_cell)

    def _exponent(self, module: Module, stage: Stage) -> float:
        if self.p == "profile" or (self.p is None and self.profile is not None):
            if self.profile is None:
                raise user_error(
                    "`partition{p=profile}` needs a profile",
                    help="write `partition{p=profile,profile=FILE}`; `arachnec profile` makes such a file",
                )
            measured = exponent_of(read_profile(self.profile), stage.name)
            if measured is not None:
                return measured
            if self.p == "profile" and len({clip.tokens for clip in module.clips}) > 1:
                raise user_error(
                    f"`{self.profile}` has `@{stage.name}` at one length only, which says no exponent p",
                    help="profile clips of several lengths, or leave `p` out: it then follows from the stage's FLOPs",
                )
        if self.p is None or self.p == "profile":
            return fitted_exponent(stage, module.clips)
        try:
            p = float(self.p)
        except ValueError:
            p = 0.0
        if not 1 <= p <= 3:
            raise user_error(
                f"the exponent p = {self.p} of `partition` is not between 1 and 3",
                help="time grows at least with the tokens and at most with a little more than their square",
            )
        return p


def _encoders_alone(module: Module) -> Module:
    encoders = tuple(stage for stage in module.stages if is_encoder(stage))
    if not encoders:
        raise user_error(
            "no stage of the module is an encoder",
            help="`partition{policy=encode}` is for models whose file has encoders()",
        )
    nodes = cascades([(clip,) for clip in module.clips], encoders)
    return replace(module, level=Level.PARTITIONED, stages=encoders, graphs=(), cascades=nodes)


def micro_batches(clips: Sequence[Clip], limit_of: Callable[[Clip], float]) -> list[tuple[Clip, ...]]:
    """Clips of equal shape in runs of at most ``limit_of(clip)`` clips (never less than one), as even as possible.

    The order is that of each shape's first clip, and within a shape that of the clips.
    """
    shapes: dict[tuple[int, int, int, int], list[Clip]] = {}
    for clip in clips:
        shapes.setdefault((clip.frames, clip.height, clip.width, clip.text), []).append(clip)
    batches: list[tuple[Clip, ...]] = []
    for members in shapes.values():
        limit = max(1, math.floor(limit_of(members[0]) + 1e-9))
        count = math.ceil(len(members) / limit)
        bounds = [len(members) * part // count for part in range(count + 1)]
        batches += [tuple(members[a:b]) for a, b in pairwise(bounds)]
    return batches


def cascades(
    batches: Sequence[tuple[Clip, ...]], stages: Sequence[Stage], split_backward: bool = False
) -> tuple[Cascade, ...]:
    """One `encode` per encoder and micro-batch, then one `train` per trained stage, which reads them.

    The parts of a stage are a pipeline instead: a forward of each, which reads the one before it, then the backwards in
    the other order. Every forward reads the encoders, because it makes the micro-batch's arguments itself.
    """
    encoders = [stage for stage in stages if is_encoder(stage)]
    trained = [stage for stage in stages if stage.trained and not _is_part(stage)]
    parts = [stage for stage in stages if _is_part(stage)]
    nodes: list[Cascade] = []
    for batch in batches:

        def add(phase: Phase, stage: Stage, *inputs: str | None, batch: tuple[Clip, ...] = batch) -> str:
            name, first = str(len(nodes)), batch[0]
            clips, reads = tuple(clip.id for clip in batch), tuple(name for name in inputs if name is not None)
            nodes.append(Cascade(name, phase, stage.name, clips, len(batch), first.tokens, first.text, reads))
            return name

        encoded = [add(Phase.ENCODE, stage) for stage in encoders]
        for stage in trained:
            add(Phase.TRAIN, stage, *encoded)
        forwards: list[str] = []
        for stage in parts:
            forwards.append(add(Phase.FORWARD, stage, *encoded, *forwards[-1:]))
        gradient: str | None = None
        for stage, forward in reversed(list(zip(parts, forwards, strict=True))):
            if not stage.trained:
                break
            gradient = add(Phase.BACKWARD, stage, forward, gradient)
            if split_backward:
                add(Phase.WEIGHT, stage, forward, gradient)
    return tuple(nodes)


def _is_part(stage: Stage) -> bool:
    return "part_of" in stage.attrs


def without_figures(stage: Stage) -> Stage:
    """A stage without what is only of use for cutting it."""
    if not any(name in stage.attrs for name in OF_PARTS):
        return stage
    kept = ("layer_params",) if "trained" in stage.attrs else ()  # where frozen parameters lie
    return replace(
        stage,
        attrs=stage.attrs.updated(**{name: None for name in OF_PARTS if name not in kept}),
    )


def fitted_exponent(stage: Stage, clips: Sequence[Clip]) -> float:
    """p of FLOPs ~ S^p between the shortest and the longest clip, by the stage's own formula; 2 where it has none."""
    flops = formula_in(stage, "flops")
    short = min(clips, key=lambda clip: clip.tokens)
    long = max(clips, key=lambda clip: clip.tokens)
    if flops is None or short.tokens == long.tokens:
        return 2.0
    low = flops(B=1, S=short.tokens, T=short.text)
    high = flops(B=1, S=long.tokens, T=long.text)
    if low <= 0 or high <= low:
        return 1.0
    return min(2.0, max(1.0, math.log(high / low) / math.log(long.tokens / short.tokens)))
