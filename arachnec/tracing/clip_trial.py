"""The model run at a clip's shape, shapes only: whether it takes the clip, before any rank trains it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.models.batch import prediction_of
from arachnec.models.clip_errors import naming
from arachnec.tracing.errors import cannot_take_error
from arachnec.tracing.record import Repeats, training_mode
from arachnec.tracing.sample import ModelSource, arguments_of, raised_at


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
