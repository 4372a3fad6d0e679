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

from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.ir.nodes import Span

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class NoBlocks(Diagnostic):
    title = "{model} has no repeated blocks"
    help = (
        "keep the transformer blocks in an nn.ModuleList, or name their classes in a class attribute "
        "`_repeated_blocks = [...]` of the model"
    )
    model: str


@dataclass(frozen=True)
class BlocksNotCalled(Diagnostic):
    title = "the forward of {model} calls none of its blocks ({blocks}) as modules"
    help = "call each block as `block(...)`, not `block.forward(...)`"
    model: str
    blocks: str


@dataclass(frozen=True)
class NoTokenDimension(Diagnostic):
    title = "no input of {block} has a dimension that grows with the clip"
    label = "its inputs are {inputs}"
    help = "the blocks must take the video's tokens as one dimension of a tensor, [batch, tokens, hidden]"
    block: str
    inputs: str


@dataclass(frozen=True)
class CannotCapture(Diagnostic):
    title = "torch.export cannot capture {block}: {reason}"
    label = "in this operation"
    help = "{remedy}"
    block: str
    reason: str
    remedy: str = "the forward of a block must not branch on the values or the exact sizes of its tensors"


@dataclass(frozen=True)
class NotPolymorphic(Diagnostic):
    title = "the captured graph of {block} differs from the model at another shape or in another block: {reason}"
    label = "in the block that ends with `{op}`"
    help = (
        "the block must compute its sizes from its inputs' shapes, not keep the numbers of one shape, and keep what "
        "tells it from other blocks of its class in its own attributes"
    )
    block: str
    op: str
    reason: str


@dataclass(frozen=True)
class BlockFails(Diagnostic):
    title = "{block} runs without values, and not with them: {reason}"
    label = "here"
    help = (
        "check that build()(**sample(clip, generator)[0]) runs in the precision of training; with bf16 tensors of one "
        "dimension, such as timesteps, are not cast, and what the model makes of them it must cast itself"
    )
    block: str
    reason: str


@dataclass(frozen=True)
class GradientDiffers(Diagnostic):
    title = "the captured graph of {block} has another gradient of {name} than the model: off by {off}"
    help = (
        "`torch.no_grad()` inside a block is not captured: call `.detach()` on the tensors that no gradient should "
        "reach"
    )
    block: str
    name: str
    off: str  # of the gradient's largest value


@dataclass(frozen=True)
class NumberMatters(Diagnostic):
    title = "{block} depends on `{name}`, which is {first} in one call and {second} in another"
    help = (
        "a block is captured once for all clips: let it follow `{name}` from the shape of one of its tensors, or hand "
        "it what it makes of `{name}` as a tensor"
    )
    block: str
    name: str
    first: str
    second: str


@dataclass(frozen=True)
class ActiveDropout(Diagnostic):
    title = "{module} drops activations at random (p = {probability:g})"
    label = "in this operation"
    help = (
        "set its probability to 0: every random number of a step is drawn from (seed, step, clip), "
        "so that the plan cannot change the gradient"
    )
    module: str
    probability: float


@dataclass(frozen=True)
class RandomOperation(Diagnostic):
    title = "{block} draws random numbers of its own (`{op}`)"
    label = "in this operation"
    help = "draw them in sample(clip, generator) and pass them in, so that the plan cannot change the gradient"
    block: str
    op: str


@dataclass(frozen=True)
class WritesState(Diagnostic):
    title = "{block} writes to {target} in its forward"
    label = "in this operation"
    help = "return a new tensor instead: a block may run again, for recomputation and in another order"
    block: str
    target: str


@dataclass(frozen=True)
class RewritesArgument(Diagnostic):
    title = "{block} puts a tensor that it does not return into an object that it is given"
    help = "return what the block computes, and let the model take it from there"
    block: str


@dataclass(frozen=True)
class UnequalCall(Diagnostic):
    title = "{block} was called with {found}, but traced with {expected}"
    help = "trace the model with calls of the same form as those it trains with"
    block: str
    found: str
    expected: str


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
