"""One process, no distribution: executes a module at any level from ``partitioned`` on. It defines what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arachnec.backends.cascade_step import (
    build_encoders,
    build_model,
    cascade_loss,
    encode,
    in_step,
    trained_parameters,
)
from arachnec.backends.stages_in_turn import StagesInTurn
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cascade, Level, Module, Phase
from arachnec.model_state.kept_gradients import drop_gradients, gradients_of
from arachnec.models.encoders import running_encoders
from arachnec.models.file import ModelFile


@dataclass(frozen=True)
class Outcome:
    """The objective of one global batch, and its gradient by parameter name."""

    loss: float
    gradients: dict[str, Tensor]


def run_reference(
    module: Module,
    model_file: ModelFile,
    clips: Mapping[int, VideoClip],
    training: Training | None = None,
    *,
    step: int = 0,
    model: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> Outcome:
    """Loss and gradients of one iteration, computed one cascade after the other.

    ``clips`` maps the ids of the module's clips to what ``sample`` sees. ``model`` stands in for a freshly built one.
    Raises ``UserError`` for a module below ``partitioned`` or with phases that are not training.
    """
    if module.level < Level.PARTITIONED:
        raise user_error(
            f"@{module.name} is {module.level.word}: it has no cascades to run",
            help="run the pass `partition` first",
            span=module.span,
        )
    training = training or Training()
    device = torch.device(device)
    model = model if model is not None else build_model(model_file, training, device)
    running = [stage.name for stage in module.stages if not stage.trained]
    encoders = build_encoders(running_encoders(model_file, running), training, device)
    parameters = trained_parameters(model)
    drop_gradients(parameters)
    values: dict[str, Tensor] = {}
    pipeline = StagesInTurn(module, model, model_file, training)
    total = 0.0
    for cascade in module.cascades:
        chosen = [clips[clip] for clip in cascade.clips]
        if cascade.phase is Phase.ENCODE:
            read = [in_step(training, clip, step) for clip in chosen]
            values[cascade.name] = encode(encoders[cascade.stage], read, device)
        elif cascade.phase is Phase.TRAIN:
            encoded = encoded_inputs(module, cascade, values)
            weight = len(cascade.clips) / len(module.clips)
            loss = cascade_loss(model, model_file, chosen, encoded, training, step, device) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        elif pipeline.runs(cascade):
            encoded = encoded_inputs(module, cascade, values)
            total += pipeline.run(cascade, chosen, encoded, step, device)
        else:
            raise user_error(
                f"%{cascade.name} is a `{cascade.phase.value}` cascade, which the reference does not run",
                help="the reference runs `encode` and `train` cascades, and those of the stages that `stages` made",
                span=cascade.span,
            )
    gradients = gradients_of(parameters)
    drop_gradients(parameters)
    return Outcome(total, gradients)


def encoded_inputs(module: Module, cascade: Cascade, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A cascade's inputs by encoder name, their rows in the order of its clips.

    An encode cascade may hold more clips than its reader, and several may feed one encoder's name.
    """
    if not cascade.inputs:
        return {}
    producers = {other.name: other for other in module.cascades}
    rows: dict[str, dict[int, Tensor]] = {}
    for name in cascade.inputs:
        producer = producers[name]
        if producer.phase is not Phase.ENCODE:  # of a pipeline, the stage before
            continue
        held = rows.setdefault(producer.stage, {})
        held |= {clip: values[name][index : index + 1] for index, clip in enumerate(producer.clips)}
    return {stage: _in_order(held, cascade.clips) for stage, held in rows.items()}


def _in_order(held: Mapping[int, Tensor], clips: Sequence[int]) -> Tensor:
    return held[clips[0]] if len(clips) == 1 else torch.cat([held[clip] for clip in clips])
