"""Errors of tracing, and the source line of the user's model that a node of its graph comes from."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from arachnec.ir.diagnostic import Diagnostic, Mistake, UserError, user_error
from arachnec.ir.nodes import Span

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class NotCaptured(Mistake):
    """What another step of ``spmd.specialise`` may get round."""


def not_captured(title: str, *, label: str = "", help: str = "", span: Span | None = None) -> UserError:
    return UserError(NotCaptured(span, title, label, help))


def no_token_dimension_error(block: str, inputs: str) -> UserError:
    return not_captured(
        f"no input of {block} has a dimension that grows with the clip",
        label=f"its inputs are {inputs}",
        help="the blocks must take the video's tokens as one dimension of a tensor, [batch, tokens, hidden]",
    )


BRANCHES = "the forward of a block must not branch on the values or the exact sizes of its tensors"


def cannot_capture_error(block: str, reason: str, remedy: str = BRANCHES, span: Span | None = None) -> UserError:
    title = f"torch.export cannot capture {block}: {reason}"
    return not_captured(title, label="in this operation", help=remedy, span=span)


def unequal_call_error(block: str, found: object, expected: object) -> UserError:
    return not_captured(
        f"{block} was called with {found}, but traced with {expected}",
        help="trace the model with calls of the same form as those it trains with",
    )


def active_dropout_error(module: str, probability: float, span: Span | None = None) -> UserError:
    return user_error(
        f"{module} drops activations at random (p = {probability:g})",
        label="in this operation",
        help="set its probability to 0: every random number of a step is drawn from (seed, step, clip), "
        "so that the plan cannot change the gradient",
        span=span,
    )


def random_operation_error(block: str, op: str, span: Span | None = None) -> UserError:
    return user_error(
        f"{block} draws random numbers of its own (`{op}`)",
        label="in this operation",
        help="draw them in sample(clip, generator) and pass them in, so that the plan cannot change the gradient",
        span=span,
    )


def writes_state_error(block: str, target: str, span: Span | None = None) -> UserError:
    return user_error(
        f"{block} writes to {target} in its forward",
        label="in this operation",
        help="return a new tensor instead: a block may run again, for recomputation and in another order",
        span=span,
    )


@dataclass(frozen=True)
class CannotRecord(Diagnostic):
    title = "the model cannot be run on a small clip of {clip}: {reason}"
    label = "here"
    help = "check that build()(**sample(clip, generator)[0]) runs, and on torch.device('meta') too{hint}"
    clip: str
    reason: str
    hint: str = ""


def cannot_on_meta(refusal: UserError) -> bool:
    """Whether a model was refused only because it was on the meta device: one with values may be taken."""
    return all(
        isinstance(refused, CannotRecord) and any(said in refused.reason for said in ("meta", "unsupported scalarType"))
        for refused in refusal.diagnostics
    )


def cannot_take_error(span: Span | None, clip: str, shape: str, caption: int, reason: str) -> UserError:
    return user_error(
        f"the model cannot take clip {clip} ({shape}, {caption} text tokens): {reason}",
        label="here",
        help="change the clip's size to one that the model's patches and strides divide, or leave it out",
        span=span,
    )


def stack_span(stack_trace: str | None) -> Span | None:
    """The innermost line of a ``node.meta["stack_trace"]`` that is not torch's own."""
    frames = [
        (match["file"], int(match["line"]))
        for match in FRAME.finditer(stack_trace or "")
        if "/torch/" not in match["file"] and not match["file"].endswith("tracing/export.py")
    ]
    return line_span(*frames[-1]) if frames else None


def line_span(file: str, line: int) -> Span:
    row = linecache.getline(file, line).rstrip("\n")
    start = len(row) - len(row.lstrip()) + 1
    return Span(file, line, start, line, max(start + 1, len(row) + 1))


OF_TORCH = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What else torch says of a fake or meta tensor: item(), numpy(), a format string, an operator without a meta form.
SAID = re.compile(
    r"\bmeta\b|\bregister_meta\b|\bFakeTensor\b|not supported for tensor subclasses|its data is not allocated yet"
    r"|unsupported format string passed to Tensor",
    re.IGNORECASE,
)


def needs_values(error: Exception) -> bool:
    """Whether torch raised it because a tensor is on the meta device or fake; else it is the caller's own mistake.

    Of a ``UserError`` what it reports is asked: a model file's functions report their exceptions so.
    """
    raised = error.__cause__ if isinstance(error, UserError) and error.__cause__ is not None else error
    if isinstance(raised, OF_TORCH):
        return True
    return isinstance(raised, (NotImplementedError, RuntimeError, TypeError)) and SAID.search(str(raised)) is not None
