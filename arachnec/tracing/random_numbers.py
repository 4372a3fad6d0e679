"""Whether ``sample`` draws all of its random numbers from the generator that it is given.

The ranks that share a clip each call ``sample`` with a generator in one state; what they draw elsewhere differs, and
each would train on other noise. In: a model file and its clips. Out: nothing, or what differs, and where.
"""

from __future__ import annotations

import ast
import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, Span, UserError
from arachnec.models.file import line_span
from arachnec.tracing.global_generators import NUMPY, PYTHON, TORCH, move, restored, states
from arachnec.tracing.sample import CAPTIONS, SMALL, ModelSource, clip_of, sample_of

CALLS = 4  # of sample; a coin that falls the same way in all of them is one in eight
MOST_CALLS = 64  # where it has drawn from a global generator, and no output has differed yet
SECONDS = 1.0  # for more than two calls
REMEDIES = {
    TORCH: "give every draw of torch `generator=generator`; randn_like takes none: "
    "torch.randn(x.shape, generator=generator)",
    PYTHON: "draw with torch and `generator=generator` in place of `random`: "
    "float(torch.rand(1, generator=generator)) < 0.5",
    NUMPY: "draw with torch and `generator=generator` in place of numpy.random",
    "": "no generator of torch, random or numpy was drawn from: look for a counter, the time, or a generator of its "
    "own, and let the values follow from `clip` and `generator` alone",
}
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
DRAWS_ALIKE = {"rand_like", "randn_like", "randint_like"}
IN_PLACE = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_"}


@dataclass(frozen=True)
class OtherRandomNumbers(Diagnostic):
    title = "`sample` gives another {what} for clip `{clip}` each time, with one state of `generator`"
    label = "drawn from {source}"
    help = "ranks that share a clip would train on different values: {remedy}"
    what: str
    clip: str | int
    source: str
    remedy: str


def demand_own_generator(
    source: ModelSource, clips: Sequence[VideoClip], encoders: Mapping[str, nn.Module], path: Path, span: Span | None
) -> None:
    """Raises ``UserError`` where ``sample``, of the file at ``path``, gives other values when global states move.

    It runs on the smallest video and the smallest still, in numbers; where it raises there, on a small one without
    files; else nothing is known. ``encoders`` are on the meta device. Global states are what they were afterwards.
    """
    largest_first = sorted(clips, key=lambda clip: (math.prod(clip.shape[:3]), clip.text_tokens), reverse=True)
    for smallest in {clip.frames == 1: clip for clip in largest_first}.values():
        difference = _any_difference(source, smallest, encoders)
        if difference is not None:
            what, drawn = difference
            line = next(_draws(path, drawn), None)
            where = span if line is None else line_span(path, line)
            names = " and ".join(f"`{name}`" for name in what)
            raise UserError(OtherRandomNumbers(where, names, smallest.id, drawn or "elsewhere", REMEDIES[drawn]))


def _any_difference(
    source: ModelSource, clip: VideoClip, encoders: Mapping[str, nn.Module]
) -> tuple[list[str], str] | None:
    """Of a clip, or of one like it that has no files."""
    for like in (clip, clip_of(clip, SMALL[0], CAPTIONS[0])):
        with contextlib.suppress(Exception):  # what is wrong with it, tracing says
            return _difference(source, like, encoders)
    return None


def _difference(
    source: ModelSource, clip: VideoClip, encoders: Mapping[str, nn.Module]
) -> tuple[list[str], str] | None:
    """The outputs that differ between calls, and which global generator was drawn from, "" where none was."""
    with restored():
        started, drawn = time.perf_counter(), ""
        first: dict[str, Any] = {}
        for number in range(MOST_CALLS):
            move(number)
            before = states()
            kwargs, target = sample_of(source, clip, encoders, device="cpu")
            drawn = drawn or next((name for name, state in states().items() if state != before[name]), "")
            outputs = {**kwargs, "target": target}
            first = first or outputs
            if differing := [name for name in first.keys() | outputs if not _equal(first.get(name), outputs.get(name))]:
                return sorted(differing), drawn
            if (number and time.perf_counter() - started > SECONDS) or (number + 1 >= CALLS and not drawn):
                return None
    return None


def _equal(a: Any, b: Any) -> bool:
    """Equality of all leaves; of what no equality is known nothing is said."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_equal_leaves, leaves, others))


def _equal_leaves(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, bool | int | float | complex | str | bytes | type(None)):
        return repr(a) == repr(b)
    return True


def _draws(path: Path, drawn: str) -> Iterator[int]:
    """The lines of a file that draw from this generator without `generator=`, those of ``sample`` first."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    functions = sorted(tree.body, key=lambda node: getattr(node, "name", "") != "sample")
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Call) and _draws_from(node, drawn):
            yield node.lineno


def _draws_from(call: ast.Call, drawn: str) -> bool:
    *owner, name = ast.unparse(call.func).split(".")
    if drawn == PYTHON:
        return owner == ["random"]
    if drawn == NUMPY:
        return owner[-1:] == ["random"] and owner != ["random"]
    generator = any(word.arg in ("generator", None) for word in call.keywords)
    return drawn == TORCH and (name in DRAWS_ALIKE or (name in DRAWS | IN_PLACE and not generator))
