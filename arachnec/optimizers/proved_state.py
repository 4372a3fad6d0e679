"""What the optimizer of a run takes on every rank, counted into the stages that a plan is proved with.

``trace`` counts AdamW's two moments, and masters of low-precision parameters. Here stand the options' optimizer and its
averages in their place. An optimizer that needs whole tensors says of no part of it that it may lie on one rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from torch import Tensor, nn

from arachnec.executable.training_options import OWN_OPTIMIZER, Training
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Module, Stage
from arachnec.ir.state_placement import with_kept
from arachnec.models.file import ModelFile
from arachnec.optimizers.recipe import Recipe, recipe_of
from arachnec.optimizers.schedules import Rates, demand_schedule
from arachnec.optimizers.state import AVERAGE, most_kept, state_bytes

GIB = 2**30
MASTER = 8  # bytes, of parameters below fp32: the fp32 copy that is updated, and the gradient it is updated with
PARTS = {
    "sharded": "its state is dealt out over ranks (shard-optimizer)",
    "cell": "parameters are dealt out over cells of ranks",
    "part_of": "the model is cut into stages",
    "host": "its state lies in host memory",
}


def recipe_for(parameters: Mapping[str, Tensor], model_file: ModelFile, training: Training) -> Recipe:
    """What updates these parameters of a model, all that train, whole; on the meta device is enough.

    Raises ``UserError`` for options that they cannot be trained with.
    """
    recipe = recipe_of(parameters, training, model_file.optimizer, model_file.span("optimizer"))
    arguments = [group.arguments for group in recipe.groups]
    demand_schedule(training.schedule, arguments)
    if training.schedule.scheduler is None:
        return recipe
    # a schedule that sets momentum makes an optimizer keep a tensor for it, from the first update on
    moved = Rates(training.schedule, arguments).at(0)
    groups = (
        replace(group, arguments={**group.arguments, **rates, "lr": group.arguments["lr"]})
        for group, rates in zip(recipe.groups, moved, strict=True)
    )
    return replace(recipe, groups=tuple(groups))


def with_optimizer(stage: Stage, model: nn.Module, training: Training, recipe: Recipe) -> Stage:
    """A trained stage as ``trace`` made it, its state that of this recipe and these options."""
    if training == msgspec.structs.replace(training, optimizer=OWN_OPTIMIZER, groups=(), ema=0.0) and _is_own(recipe):
        return stage
    parameters = _trained(model)
    averages = AVERAGE if training.ema else 0
    if recipe.elementwise:
        kept, once = most_kept(parameters, recipe)
        return with_kept(stage, kept + averages, once)
    whole = kept_bytes(parameters, training, recipe)
    return with_kept(replace(stage, attrs=stage.attrs.updated(optimizer=None)), 0, 0, whole)


def kept_bytes(parameters: Mapping[str, Tensor], training: Training, recipe: Recipe) -> int:
    """Bytes of the optimizer's own state and of the averages."""
    averages = AVERAGE * sum(value.numel() for value in parameters.values()) if training.ema else 0
    return state_bytes(parameters, recipe) + averages


def more_state(
    model_file: ModelFile, compiled: tuple[nn.Module, Training], running: tuple[nn.Module, Training]
) -> float:
    """GiB that a run takes beyond what it was compiled for, with other options, on a rank that holds everything.

    Each is the model in the precision of its options, on the meta device.
    """
    before, after = (_whole_bytes(model, model_file, training) for model, training in (compiled, running))
    return max(0.0, (after - before) / GIB)


def demand_whole_tensors(module: Module, recipe: Recipe) -> None:
    """Raises ``UserError`` where a plan deals out what the optimizer needs whole."""
    if recipe.elementwise:
        return
    for stage in module.stages:
        for attribute, reason in PARTS.items():
            if stage.trained and attribute in stage.attrs:
                raise user_error(
                    f"{recipe.name} updates whole tensors, and of @{stage.name} {reason}",
                    help=(
                        "an update of a part is not that part of its update; take an elementwise optimizer such as "
                        "AdamW, devices that hold the whole state, or `--passes` without what deals it out"
                    ),
                )


def _whole_bytes(model: nn.Module, model_file: ModelFile, training: Training) -> int:
    parameters = _trained(model)
    kept = kept_bytes(parameters, training, recipe_for(parameters, model_file, training))
    return resident_bytes(model) + MASTER * sum(p.numel() for p in parameters.values() if p.dtype.itemsize < 4) + kept


def resident_bytes(model: nn.Module) -> int:
    """Bytes on every rank that computes: parameters, gradients of the trained ones, buffers."""
    parameters = sum(p.numel() * p.dtype.itemsize * (2 if p.requires_grad else 1) for p in model.parameters())
    return parameters + sum(b.numel() * b.dtype.itemsize for b in model.buffers())


def _is_own(recipe: Recipe) -> bool:
    return recipe.kind is not None and recipe.kind.__name__ == OWN_OPTIMIZER.name


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
