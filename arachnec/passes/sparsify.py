"""``sparsify``: layers attend to chosen keys (DSV, arXiv 2502.07590). It changes numerics, so no default has it.

Attention over a clip's video tokens, self- or joint, is marked with the density of every head; costs, plans and the
proof follow. Attention to captions stays dense, and so does what cannot be sparse (``planning.sparse_stages``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from arachnec.cost.sparse_profile import KernelSpeeds, kernel_speeds
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import ByLength, learned_densities
from arachnec.ir.limits import LARGEST, SMALLEST
from arachnec.ir.nodes import Level, Module, Stage
from arachnec.ir.sampling import models_of
from arachnec.ir.stage_sizes import count_in, layers_of
from arachnec.kernels.sparse.cube_sides import CELL
from arachnec.passes.infra.base import Duration, Pass, Scope
from arachnec.planning.sparse_stages import Choice, sparse_stage
from arachnec.sparsity.density_file import read_densities

DENSITY = 0.1  # that is taken before a run has measured
LEARNS = "predictors of the device are taken to learn"
RANK = 16  # features of a predictor, of heads that have as many


def out_of_range_error(option: str, value: str, expected: str, meaning: str) -> UserError:
    return user_error(f"`sparsify{{{option}={value}}}`: expected {expected}", help=f"{option}: {meaning}")


def not_trained_error(models: str, reason: str, example: str) -> UserError:
    return user_error(
        f"`sparsify` cannot choose keys for {models}: {reason}",
        help=(
            f"have the sampler file's `predictors()` return {{{example}: FOLDER}}, the checkpoints of a run "
            "with `sparsify` in which layers have turned sparse (see its run.json); or leave `sparsify` out"
        ),
    )


@dataclass(frozen=True)
class Sparsify(Pass):
    """Marks the layers whose attention over video tokens takes chosen keys only.

    ``file`` has densities that a run measured; without it every head is taken to have ``density``, by default 0.1. Of
    models that sample those layers are marked whose predictors a run has trained, by default with the densities that
    it measured. Keys are chosen for ``group`` queries at a time (by default what suits the device) in blocks of
    ``block``, by a predictor of ``rank`` (by default 16, or a head's size where that is less), until they hold ``mass``
    of the attention, which takes ``overhead`` a layer for any clip. ``division`` is "groups" where heads may be cut
    between ranks, "heads" where they stay whole. The speeds are those of sparse kernels over dense ones, in FLOPs a
    second; by default, as the overhead, those of ``arachnec.cost.sparse_profile`` for the device. ``learning_speed``
    is how much faster than there a predictor learns.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    file: str | None = None
    density: float | None = None
    group: int | None = None
    block: int = 64
    rank: int | None = None
    mass: float = 0.9
    division: Literal["groups", "heads"] = "groups"
    overhead: Duration | None = None
    forward_speed: float | None = None
    backward_speed: float | None = None
    choice_speed: float | None = None
    learning_speed: float = 1.0

    def __post_init__(self) -> None:
        if self.file is not None and self.density is not None:
            raise ValueError("density is of all heads, and the file has one for each: give one of them")

    def run(self, module: Module) -> Module:
        self._demand(module)
        known = kernel_speeds(str(module.cluster.attrs.get("device")) if module.cluster else "cpu")
        stages = tuple(self._marked(stage, module, known) for stage in module.stages)
        return replace(module, stages=stages)

    def _choice(self, stage: Stage, module: Module, known: KernelSpeeds) -> Choice:
        """As the options say, and by default as is ``known`` of the device."""
        overhead = known.overhead + known.head_overhead * count_in(stage, "heads")
        return Choice(
            self.group or known.group,
            self.block,
            CELL,
            self.rank or min(RANK, self._head_size(module)),
            self.mass,
            self.division,
            known.moved,
            overhead if self.overhead is None else self.overhead,
            (
                self.forward_speed or known.forward,
                self.backward_speed or known.backward,
                self.choice_speed or known.choice,
            ),
            tuple(x / self.learning_speed for x in known.learning),
        )

    def _marked(self, stage: Stage, module: Module, known: KernelSpeeds) -> Stage:
        samples = stage.name in models_of(module)
        if not (stage.trained or samples) or not count_in(stage, "attentions"):
            return stage
        choice = self._choice(stage, module, known)
        if samples:
            return self._of_sampling(stage, module, choice)
        if self.file is None:
            return sparse_stage(stage, module.graphs, DENSITY if self.density is None else self.density, choice)
        measured = read_densities(self.file)
        measured.demand_of(str(stage.attrs.get("source")), len(layers_of(stage)), count_in(stage, "heads"))
        return sparse_stage(stage, module.graphs, measured.layers, choice)

    def _of_sampling(self, stage: Stage, module: Module, choice: Choice) -> Stage:
        learned = learned_densities(stage)
        if learned is None:
            why = "the sampler file names no predictors of it"
            return replace(stage, attrs=stage.attrs.updated(dense=((stage.name, why),)))
        choice = replace(choice, rank=count_in(stage, "predictor_rank"))
        own = {
            n: layer.by_length if self.density is None else ByLength((self.density,) * len(layer.heads))
            for n, layer in learned.items()
        }
        marked = sparse_stage(stage, module.graphs, own, choice, "has no predictor that is ready")
        return replace(marked, attrs=marked.attrs.updated(learned=None))

    def _head_size(self, module: Module) -> int:
        """The smallest of the stages' heads."""
        sizes = [
            count_in(stage, "hidden") // count_in(stage, "heads")
            for stage in module.stages
            if count_in(stage, "hidden") and count_in(stage, "heads")
        ]
        return min(sizes, default=self.rank or RANK)

    def _demand(self, module: Module) -> None:
        """Raises UserError for an option that says nothing."""
        size, (rank, group) = self._head_size(module), (1 if n is None else n for n in (self.rank, self.group))
        speeds = ("forward_speed", "backward_speed", "choice_speed", "learning_speed")
        of_kernels = ((name, getattr(self, name)) for name in speeds)
        density = DENSITY if self.density is None else self.density
        overhead = self.overhead or 0.0
        checks = (
            ("density", density, 0 < density <= 1, "above 0, to 1", "share of keys that a query attends to"),
            ("mass", self.mass, 0 < self.mass <= 1, "above 0, to 1", "share of the attention that chosen keys hold"),
            ("rank", rank, 1 <= rank <= size, f"1 to {size}", "features of the predictor, at most a head's"),
            ("group", group, 1 <= group <= LARGEST, f"1 to {LARGEST:g}", "queries whose keys are chosen together"),
            ("block", self.block, 1 <= self.block <= LARGEST, f"1 to {LARGEST:g}", "keys that are chosen together"),
            (
                "overhead",
                overhead,
                overhead <= LARGEST,
                f"{LARGEST:g} ms at most",
                "of a layer's choice, for any clip",
            ),
            *(
                (
                    name,
                    x,
                    SMALLEST <= x <= LARGEST,
                    f"{SMALLEST:g} to {LARGEST:g}",
                    "1 for as fast as " + (LEARNS if name == "learning_speed" else "dense"),
                )
                for name, x in of_kernels
                if x is not None
            ),
        )
        for option, value, right, expected, meaning in checks:
            if not right:
                shown = f"{value:.15g}" if isinstance(value, float) else str(value)[:40]
                raise out_of_range_error(option, shown, expected, meaning)
        self._demand_trained([stage for stage in module.stages if stage.name in models_of(module)])

    def _demand_trained(self, models: Sequence[Stage]) -> None:
        """Raises UserError where models that sample have no predictor that a run has trained."""
        if not models:
            return
        if self.file is not None:
            raise user_error(
                f"`sparsify{{file={self.file}}}` is for training",
                help=(
                    "leave `file` out: models that sample have the densities that were measured as their predictors "
                    "were trained; `density` sets one for all heads"
                ),
            )
        names, example = " and ".join(f"`{stage.name}`" for stage in models), f'"{models[0].name}"'
        learned = [learned_densities(stage) for stage in models]
        if all(layers is None for layers in learned):
            raise not_trained_error(names, "the sampler file names no predictors", example)
        if not any(learned):
            raise not_trained_error(names, "in its checkpoint no layer's predictor is ready", example)
        for stage in models:
            rank = count_in(stage, "predictor_rank")
            if self.rank is not None and rank and rank != self.rank:
                meaning = "features of the predictor; leave it out"
                raise out_of_range_error("rank", str(self.rank), f"{rank}, as it was trained", meaning)
