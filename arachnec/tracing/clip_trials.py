"""Trials of a model: whether it takes a clip's shape, and whether it keeps the clips of a batch apart."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.models.batch import is_batched, prediction_of
from arachnec.models.clip_errors import naming
from arachnec.tracing.errors import RandomOperation, cannot_take_error
from arachnec.tracing.global_generators import restored
from arachnec.tracing.record import ExampleCall, Repeats, training_mode
from arachnec.tracing.sample import ModelSource, arguments_of, clip_of, encoded_shape, raised_at, sample_of
from arachnec.tracing.small_model import (
    TOLERANCE,
    CannotRun,
    ModelRaised,
    SmallModel,
    of_the_trial,
    raised,
    small_model,
)
from arachnec.tracing.verify import random_like

SEEDS = 8  # of a forward that draws; a coin falls the same way in all of them in one of 128
Sample = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True)
class ClipsMixed(Diagnostic):
    title = "two clips in a batch are not what they are alone: {what}"
    help = (
        "an argument with a first dimension of 1 must be a value of its clip; what is shared needs another first "
        "dimension, and statistics over a batch mix its clips"
    )
    what: str


@dataclass(frozen=True)
class ModelFails(Diagnostic):
    title = "the model fails on a clip of {clip} with {caption} text tokens: {reason}"
    label = "here"
    help = (
        "it takes this shape, and not these values: check that build()(**sample(clip, generator)[0]) runs, and loss() "
        "of what it gives"
    )
    clip: str
    caption: int
    reason: str


def demand_clips_apart(
    model: nn.Module, source: ModelSource, call: ExampleCall, like: VideoClip, encoders: Mapping[str, nn.Module]
) -> str | None:
    """None, or why it cannot be told. ``call`` is a small call of the model, of a clip ``like`` this one.

    Raises ``UserError`` where the predictions or the loss of a batch differ from those of its clips, where the model
    draws its prediction, and where the model or its loss raises with what its own ``sample`` gives. It cannot be told
    where this machine lacks what the model needs, or ``sample`` gives no values for a clip without files.
    """
    clip = clip_of(like, call.clip, call.text)
    first, second, drawn = _two_samples(source, clip, encoders)
    try:
        _compare(small_model(model, call), first, second, source.loss)
    except ModelRaised as reason:
        if drawn:
            return f"{reason} (with values drawn at random: sample() gives none without files)"
        error = reason.__cause__
        if isinstance(error, UserError):
            raise error from reason
        span = raised_at(source, error if isinstance(error, Exception) else None)
        shape = f"{clip.frames} x {clip.height} x {clip.width}"
        raise UserError(ModelFails(span, shape, clip.text_tokens, str(reason))) from error
    except CannotRun as reason:
        return str(reason)
    return None


def _compare(small: SmallModel, first: Sample, second: Sample, loss: Any) -> None:
    alone = [small.run(arguments) for arguments, _ in (first, second)]
    if not all(prediction.isfinite().all() for prediction in alone):
        raise CannotRun("its prediction is not finite with random weights")
    if small.drawn and any(not _apart(small.run(first[0], seed), alone[0]) <= TOLERANCE for seed in range(1, SEEDS)):
        raise UserError(RandomOperation(None, small.name, small.drawn))
    try:
        together = small.run(_joined(first[0], second[0]))
    except CannotRun as error:
        raise UserError(ClipsMixed(None, f"together they raise {error}")) from error
    apart = _apart(together, _cat(alone))
    if not apart <= TOLERANCE:
        names = ", ".join(_not_per_clip(small, first[0], second[0]))
        reason = f" ({names} has a first dimension of 1 and is no value of its clip)" if names else ""
        size = f"differs by {apart:.1%}" if math.isfinite(apart) else "has another size"
        raise UserError(ClipsMixed(None, f"the prediction {size}{reason}"))
    if loss is None:
        return
    _refuse_drawing(small, loss, alone[0], first[1])
    targets = torch.cat([first[1], second[1]]) if is_batched(first[1]) else first[1]
    try:
        mean = (float(loss(alone[0], first[1])) + float(loss(alone[1], second[1]))) / 2
    except Exception as error:
        kind = CannotRun if of_the_trial(error, small.converted) else ModelRaised
        raise kind(f"loss() raises {raised(error)}") from error
    try:
        actual = float(loss(together, targets))
    except Exception as error:
        raise UserError(ClipsMixed(None, f"their loss raises {raised(error)}, that of each alone does not")) from error
    if not abs(actual - mean) <= TOLERANCE * abs(mean):
        raise UserError(ClipsMixed(None, f"their loss is {actual:.4g}, the mean of the two alone {mean:.4g}"))


def _refuse_drawing(small: SmallModel, loss: Any, prediction: Tensor, target: Tensor) -> None:
    small.drawn, losses = "", set()
    with restored(), contextlib.suppress(Exception):  # what it raises is told where it is compared
        for seed in range(SEEDS):
            with small.watching(seed):
                losses.add(str(float(loss(prediction, target))))
            if not small.drawn:
                return
    if len(losses) > 1:
        raise UserError(RandomOperation(None, "`loss`", small.drawn))


def _not_per_clip(small: SmallModel, first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """The arguments that do not reach the clip whose they are: the clips of a batch differ in one at a time."""
    for name, value in first.items():
        if is_batched(value) and not torch.equal(value, second[name]):
            other = first | {name: second[name]}
            try:
                together = small.run(_joined(first, other))
                apart = _apart(together, _cat([small.run(first), small.run(other)]))
            except CannotRun:
                continue
            if not apart <= TOLERANCE:
                yield f"`{name}`"


def _two_samples(
    source: ModelSource, clip: VideoClip, encoders: Mapping[str, nn.Module]
) -> tuple[Sample, Sample, bool]:
    """Two equal clips' arguments and targets, in numbers: as ``sample`` draws them, else at random in its shapes, and
    whether at random. What is not a fraction and comes from an encoder is so, too.

    A ``sample`` that reads a clip's files cannot draw for one that has none.
    """
    shapes = sample_of(source, clip, encoders, device="meta")
    for other in (replace(clip, id=f"{clip.id}.1"), clip):
        try:
            first, second = (sample_of(source, c, encoders, device="cpu", seed=n) for n, c in enumerate((clip, other)))
        except Exception:
            continue
        if _form(first) == _form(second) == _form(shapes):
            whole = any(not encoded_shape(encoder, clip).is_floating_point() for encoder in encoders.values())
            return first, _with_shared(first, second), whole
    generator = torch.Generator("cpu").manual_seed(0)
    first, second = (_at_random(shapes, generator) for _ in range(2))
    return first, _with_shared(first, second), True


def _form(sample: Sample) -> list[tuple[str, Any]]:
    """Names, and sizes and types of tensors."""
    leaves, spec = pytree.tree_flatten(sample)
    return [(str(spec), ""), *(("", (x.shape, x.dtype) if isinstance(x, Tensor) else type(x)) for x in leaves)]


def _at_random(shapes: Sample, generator: torch.Generator) -> Sample:
    drawn: Sample = pytree.tree_map_only(Tensor, lambda like: random_like(like, generator), shapes)
    return drawn


def _with_shared(first: Sample, second: Sample) -> Sample:
    """The second clip with what is passed once for both, as it is passed for the first."""
    own = {name: second[0][name] if is_batched(value) else value for name, value in first[0].items()}
    return own, second[1] if is_batched(first[1]) else first[1]


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.cat([value, second[name]]) if is_batched(value) else value for name, value in first.items()}


def _cat(predictions: Sequence[Tensor]) -> Tensor:
    return torch.cat([prediction.reshape(-1) for prediction in predictions])


def _apart(prediction: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest value; infinite where there is another number of values."""
    if prediction.numel() != expected.numel():
        return math.inf
    difference = (prediction.reshape(-1) - expected.reshape(-1)).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-30))


class Reached(BaseException):
    """Ends a forward at its first block; no ``except Exception`` of a model stops it."""


def run_clip(
    model: nn.Module,
    source: ModelSource,
    encoders: Mapping[str, nn.Module],
    clip: VideoClip,
    repeats: Repeats | None = None,
) -> None:
    """Run the model at a clip, on the device that it lies on; on the meta device with ``repeats`` each kind of block
    once.

    ``encoders`` are on the meta device. Without ``repeats`` a hook is expected to raise ``Reached``. Raises
    ``UserError``, which names the clip, where the model cannot take it.
    """
    device = str(next(model.parameters()).device)
    try:
        with naming([clip]):
            arguments = arguments_of(source, clip, encoders, device=device)
        with torch.no_grad(), training_mode(model), torch.device(device), repeats or contextlib.nullcontext():
            prediction_of(model(**arguments))
    except Reached:
        pass
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise cannot_take_error(
            raised_at(source, error), clip.name, sizes_of(clip), clip.text_tokens, reason
        ) from error


def sizes_of(clip: VideoClip) -> str:
    return f"{clip.frames} x {clip.height} x {clip.width}"
