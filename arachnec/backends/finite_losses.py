"""Losses that are not finite: what they do to a step, and which clips have them.

A loss that is not finite makes its whole gradient not a number. So one look at the global norm, which all ranks know
alike, says whether a step may be taken, and the host need not wait for its device to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


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
