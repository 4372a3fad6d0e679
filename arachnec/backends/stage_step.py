"""Forward and backward of one stage for one micro-batch, and what goes between stages, as one run of bytes.

The values that a stage hands on, and the gradients that it hands back, are known by number and shape on both sides
(``tracing.dataflow``), so they travel as one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from arachnec.backends.staged_model import StageRun
from arachnec.tracing.dataflow import Cut, Form, Output

ALIGNED = 16  # bytes: every tensor begins at a multiple, so that it can be viewed in its own precision


def forms_between(cut: Cut, stage: int) -> dict[Output, Form]:
    """What goes from a stage to the next."""
    return {output: cut.flow.form(output) for output in cut.handed_on(stage)}


def gradient_forms(cut: Cut, stage: int) -> dict[Output, Form]:
    """What comes back from the next stage to this one: gradients of what trained parameters had a part in."""
    return {output: form for output, form in forms_between(cut, stage).items() if form.trained}


def packed_size(forms: Mapping[Output, Form]) -> int:
    """Bytes of a message with these tensors."""
    return sum(_padded(form.bytes) for form in forms.values())


def pack(values: Mapping[Output, Tensor], forms: Mapping[Output, Form], message: Tensor) -> None:
    """Write every tensor of ``forms`` into a run of bytes; one that is not there is zeros."""
    for output, place in _places(forms).items():
        value, form = values.get(output), forms[output]
        if value is None:
            message[place : place + form.bytes].zero_()
        elif form.bytes:
            part = message[place : place + form.bytes].view(form.dtype).view(form.shape)
            part.copy_(value.detach())
        message[place + form.bytes : place + _padded(form.bytes)].zero_()


def as_message(values: Mapping[Output, Tensor], forms: Mapping[Output, Form]) -> Tensor | None:
    """A single dense tensor as its own message, not copied: nobody may write to it any more. Else None."""
    if len(forms) != 1:
        return None
    ((output, form),) = forms.items()
    value = values.get(output)
    if value is None or value.dtype != form.dtype or not value.is_contiguous() or _padded(form.bytes) != value.nbytes:
        return None
    return value.detach().view(-1).view(torch.uint8)


def unpack(message: Tensor, forms: Mapping[Output, Form]) -> dict[Output, Tensor]:
    """The tensors of a message, views of it."""
    return {
        output: message[place : place + forms[output].bytes].view(forms[output].dtype).view(forms[output].shape)
        for output, place in _places(forms).items()
    }


def as_inputs(values: Mapping[Output, Tensor], forms: Mapping[Output, Form]) -> dict[Output, Tensor]:
    """What a stage was handed, as leaves of its own graph."""
    return {output: value.detach().requires_grad_(forms[output].trained) for output, value in values.items()}


def backward_of(run: StageRun, objective: Tensor | None, gradients: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
    """The backward of a stage: from the ``objective`` on the last, else from the next stage's gradients.

    Returns the gradients of what the stage was handed; a tensor that nothing used has none.
    """
    roots: list[Tensor] = []
    with_respect: list[Tensor | None] = []
    if objective is not None:
        roots, with_respect = [objective], [None]
    for output, gradient in gradients.items():
        if run.outputs[output].requires_grad:
            roots.append(run.outputs[output])
            with_respect.append(gradient)
    if roots:
        _run_backward(roots, with_respect)
    return {output: value.grad for output, value in run.given.items() if value.grad is not None}


def _run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    torch.autograd.backward(list(roots), list(gradients))


def _places(forms: Mapping[Output, Form]) -> dict[Output, int]:
    places, place = {}, 0
    for output, form in forms.items():
        places[output] = place
        place += _padded(form.bytes)
    return places


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
