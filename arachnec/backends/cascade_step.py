"""What one cascade computes, whoever runs it, and which of its clips have losses that are not finite.

A loss that is not finite makes its whole gradient not a number. So one look at the global norm, which all ranks know
alike, says whether a step may be taken, and the host need not wait for its device to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import Span, UserError, user_error
from arachnec.models.batch import clip_in_step, make_batch, prediction_of
from arachnec.models.file import ModelFile, own_errors
from arachnec.models.precision import CastSamples, in_precision


def poisoning(loss: Tensor, share: float = 1.0) -> Tensor:
    """The scalar times ``share``; where it is not finite, every gradient that follows from it is not a number."""
    return loss * (loss.detach() * 0.0 + share)  # no finite number times zero is anything else


def finite_rows(prediction: Tensor, target: Tensor, clips: int) -> Tensor | None:
    """Of a micro-batch whether each clip's prediction and target are finite, ``[clips]``; None where its tensors have
    no row for each."""
    values = prediction.detach(), target
    if any(value.ndim == 0 or value.shape[0] != clips for value in values):
        return None
    of_each = [value.isfinite().reshape(clips, -1).all(1) for value in values]
    return of_each[0] & of_each[1].to(of_each[0].device)


def not_finite(
    losses: Mapping[str, Tensor], rows: Mapping[str, Tensor], clips: Mapping[str, Sequence[str | int]]
) -> list[str | int]:
    """The clips, by name, whose loss is not finite. All arguments are by cascade; waits for the device.

    Of a micro-batch those with rows that are not finite, and all of them where the loss alone says so.
    """
    named: list[str | int] = []
    for cascade, loss in losses.items():
        if not loss.isfinite():
            finite = rows[cascade].tolist() if cascade in rows else []
            bad = [clip for clip, whole in zip(clips[cascade], finite, strict=False) if not whole]
            named += bad or clips[cascade]
    return named


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def no_gradient_error(span: Span | None, found: str) -> UserError:
    return user_error(
        f"no gradient can follow from `loss`: {found}",
        help="loss(prediction, target) returns one scalar tensor that depends on the prediction",
        span=span,
    )


def build_model(model_file: ModelFile, training: Training, device: torch.device) -> nn.Module:
    """The model with the weights that ``seed`` gives, in the precision of ``training``."""
    torch.manual_seed(training.seed)
    model = model_file.build()
    if training.dtype != "fp32":
        model = in_precision(model, DTYPES[training.dtype])
    return model.to(device)


def in_training_precision(model_file: ModelFile, training: Training) -> ModelFile:
    """The model file as it is trained: its model and its samples in the precision of ``training``."""
    if training.dtype == "fp32":
        return model_file
    dtype = DTYPES[training.dtype]
    cast = CastSamples(model_file, dtype)
    return replace(model_file, build=lambda: in_precision(model_file.build(), dtype), sample=cast.sample)


def build_encoders(model_file: ModelFile, training: Training, device: torch.device) -> dict[str, nn.Module]:
    """The frozen encoders by name; none where the model file has none."""
    if model_file.encoders is None:
        return {}
    torch.manual_seed(training.seed)
    encoders = model_file.encoders()
    return {name: encoder.to(device).eval().requires_grad_(False) for name, encoder in encoders.items()}


def in_step(training: Training, clip: VideoClip, step: int) -> VideoClip:
    """A clip as the options have it in one step, for its encoders and its sample."""
    return clip_in_step(clip, training.seed, step, training.caption_dropout, training.timesteps)


def encode(encoder: nn.Module, clips: Sequence[VideoClip], device: torch.device) -> Tensor:
    """``encoder`` applied to clips that are loaded here."""
    load = encoder.load
    assert callable(load)
    return encode_loaded(encoder, (load(clip, device) for clip in clips))


@torch.no_grad()
def encode_loaded(encoder: nn.Module, loaded: Iterable[Tensor]) -> Tensor:
    """``encoder`` applied to each clip by itself, joined along dim 0: what was batched does not change the values."""
    return torch.cat([encoder(clip) for clip in loaded])


def cascade_loss(
    model: nn.Module,
    model_file: ModelFile,
    clips: Sequence[VideoClip],
    encoded: Mapping[str, Tensor],
    training: Training,
    step: int,
    device: torch.device,
) -> Tensor:
    """The mean loss of a micro-batch of equal clips, a scalar with its graph.

    What is drawn for a clip follows from (seed, step, clip) alone.
    """
    kwargs, target = batch_of(model_file, clips, encoded, training, step, device)
    return batch_loss(model, model_file, kwargs, target)


def batch_of(
    model_file: ModelFile,
    clips: Sequence[VideoClip],
    encoded: Mapping[str, Tensor],
    training: Training,
    step: int,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Any], Tensor]:
    """The forward's keyword arguments and the target of a micro-batch of equal clips."""
    dtype = None if training.dtype == "fp32" else DTYPES[training.dtype]
    clips = [in_step(training, clip, step) for clip in clips]
    return make_batch(model_file, clips, training.seed, step, device, encoded=encoded, dtype=dtype)


def batch_loss(
    model: nn.Module,
    model_file: ModelFile,
    kwargs: Mapping[str, Any],
    target: Tensor,
    predicted: Callable[[Tensor], None] | None = None,
    kept: Sequence[int] | None = None,
    share: float = 1.0,
) -> Tensor:
    """The mean loss of one prepared micro-batch times ``share``, a scalar with its graph; ``predicted`` sees the
    prediction, and only the clips ``kept`` count."""
    with own_errors(model_file.path, "the model's forward"):
        output = model(**kwargs)
    prediction = prediction_of(output)
    if predicted is not None:
        predicted(prediction)
    return loss_of(model_file, prediction, target, kept, share)


def loss_of(
    model_file: ModelFile, prediction: Tensor, target: Tensor, kept: Sequence[int] | None = None, share: float = 1.0
) -> Tensor:
    """The mean loss of a prediction times ``share``, a scalar with its graph. One that is not finite has no finite
    gradient.

    Of a micro-batch only the clips ``kept`` count, by number; zero where none does.
    """
    if kept is not None and not kept:
        return prediction.sum() * 0.0
    if kept is not None:
        prediction, target = prediction[list(kept)], target[list(kept)]
    assert model_file.loss is not None, "what trains has a loss"
    loss = model_file.loss(prediction, target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise no_gradient_error(model_file.span("loss"), f"it returned {shape}")
    if not loss.requires_grad:
        raise no_gradient_error(model_file.span("loss"), "its result depends on no parameter that trains")
    return poisoning(loss.reshape(()), share)


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, under the module's own names."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
