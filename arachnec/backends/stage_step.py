"""One stage for one micro-batch: forward, backward, weight gradients apart, and what goes between stages as bytes.

The values that a stage hands on, and the gradients that it hands back, are known by number and shape on both sides
(``tracing.cuts``), so they travel as one message.

A linear layer's backward is two products: the gradient of its input, which the stage before waits for, and that of its
weight, which nobody waits for (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.1). Inside
``Deferred`` a linear layer computes the first in the backward and keeps what the second needs, until ``run``. All other
parameters, of norms, convolutions and tables, have their gradients in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from arachnec.backends.staged_model import StageRun
from arachnec.model_state.kept_gradients import gradient_dtype, gradient_of, set_gradient
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
        torch.autograd.backward(roots, with_respect)
    return {output: value.grad for output, value in run.given.items() if value.grad is not None}


def _places(forms: Mapping[Output, Form]) -> dict[Output, int]:
    places, place = {}, 0
    for output, form in forms.items():
        places[output] = place
        place += _padded(form.bytes)
    return places


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


PLAIN = functional.linear
LINEAR = (PLAIN, torch.ops.aten.linear.default, torch.ops.aten.linear)


@dataclass(frozen=True, eq=False)
class _Product:
    """What the gradients of one linear layer in one micro-batch need."""

    weight: nn.Parameter
    bias: Tensor | None
    input: Tensor
    gradient: Tensor


@dataclass
class Deferred:
    """The weight gradients of one micro-batch on one stage. Entered for its forward, and where blocks are run again.

    Modules call ``functional.linear``; that alone is another function inside, for a mode that sees every call of torch
    costs a tenth of a small block's forward. Captured ``graphs`` call the operator: they take the mode.
    """

    graphs: bool = False
    products: list[_Product] = field(default_factory=list)
    _inside: list[AbstractContextManager[object]] = field(default_factory=list)

    def __enter__(self) -> Deferred:
        inside = _EveryCall(self.linear) if self.graphs else _calling(self.linear)
        inside.__enter__()
        self._inside.append(inside)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._inside.pop().__exit__(*raised)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``functional.linear``; of a parameter that trains the gradient is left for later."""
        plain = type(input) is Tensor and isinstance(weight, nn.Parameter) and weight.requires_grad
        if plain and torch.is_grad_enabled() and (bias is None or isinstance(bias, nn.Parameter)):
            result: Tensor = _Linear.apply(input, weight, bias, self.products)  # type: ignore[no-untyped-call]
            return result
        return PLAIN(input, weight, bias)

    @torch.no_grad()
    def run(self, only: Collection[int] | None = None) -> None:
        """Add all weight gradients to their parameters, or those of which one has one of these ids."""
        kept: list[_Product] = []
        taken: list[_Product] = []
        for product in self.products:
            wanted = only is None or id(product.weight) in only or id(product.bias) in only
            (taken if wanted else kept).append(product)
        self.products[:] = kept
        while taken:
            product = taken.pop()
            gradient = product.gradient.reshape(-1, product.gradient.shape[-1])
            _add_product(product.weight, gradient.t(), product.input.reshape(-1, product.input.shape[-1]))
            if product.bias is not None and product.bias.requires_grad:
                _add(product.bias, gradient.sum(0))


class _Linear(torch.autograd.Function):
    """A linear layer whose backward leaves its parameters' gradients for later."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: nn.Parameter, bias: Tensor | None, products: list[_Product]) -> Tensor:
        ctx.save_for_backward(value)
        ctx.weight, ctx.bias, ctx.products = weight, bias, products
        return PLAIN(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (value,), gradient = ctx.saved_tensors, gradients[0]
        ctx.products.append(_Product(ctx.weight, ctx.bias, value, gradient))
        return gradient @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, None


@contextmanager
def _calling(linear: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, this thread's modules call this in the place of ``functional.linear``; those of other threads do not."""
    before, thread = functional.linear, get_ident()

    def called(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return (linear if get_ident() == thread else before)(input, weight, bias)

    functional.linear = called
    try:
        yield
    finally:
        functional.linear = before


class _EveryCall(TorchFunctionMode):
    """Sees every call of torch in this thread, and has linear layers computed by ``linear``."""

    def __init__(self, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if func in LINEAR else func)(*args, **(kwargs or {}))


def _add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Where precisions agree the product is added as it is made, and takes no memory of its own."""
    kept = gradient_of(parameter)
    if kept is not None and kept.dtype == left.dtype == right.dtype:
        torch.addmm(kept, left, right, out=kept)
    else:
        _add(parameter, left @ right)


def _add(parameter: Tensor, gradient: Tensor) -> None:
    kept, dtype = gradient_of(parameter), gradient_dtype(parameter)
    set_gradient(parameter, gradient.to(dtype) if kept is None else kept.add_(gradient))
