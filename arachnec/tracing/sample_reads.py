"""What a model file's ``sample`` reads: its generator, the noise level, dropped captions, padded text."""

from __future__ import annotations

import ast
import contextlib
import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from arachnec.data.clip import UNIFORM, Timesteps, VideoClip
from arachnec.data.encoded_file import encoded_beforehand
from arachnec.ir.diagnostic import Span, user_error
from arachnec.models.file import line_span
from arachnec.tracing.sample import CAPTIONS, SMALL, ModelSource, arguments_of, clip_of, meta_encoders, sample_of

TORCH, PYTHON, NUMPY = "torch", "random", "numpy.random"


def move(number: int) -> None:
    """Each to a state of its own for every number."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def states() -> dict[str, Any]:
    """By name; what was drawn from is in another state."""
    kind, keys, *rest = np.random.get_state()
    numpy_state = (kind, np.asarray(keys).tobytes(), *rest)
    return {TORCH: bytes(torch.get_rng_state().numpy()), PYTHON: random.getstate(), NUMPY: numpy_state}


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Afterwards they are as before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


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
            raise user_error(
                f"`sample` gives another {names} for clip `{smallest.id}` each time, with one state of `generator`",
                label=f"drawn from {drawn or 'elsewhere'}",
                help=f"ranks that share a clip would train on different values: {REMEDIES[drawn]}",
                span=where,
            )


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


def require_one_caption(clips: Sequence[VideoClip], encoders: Mapping[str, nn.Module]) -> None:
    """Raises ``UserError`` where an encoder that reads captions runs beforehand, and a clip has several."""
    several = next((clip for clip in clips if clip.captions), None)
    for name, encoder in encoders.items() if several is not None else ():
        if several is not None and _reads_captions(encoder, several):
            raise user_error(
                f"clip `{several.name}` has several captions, of which every step draws one, and `{name}` reads one "
                "beforehand",
                help=(
                    "leave that encoder to the training, with `arachnec cache --encoders` and the names of the "
                    "others, or give one caption"
                ),
            )


def demand_captions_read(dropout: float, clips: Sequence[VideoClip], encoders: Mapping[str, nn.Module]) -> None:
    """Raises ``UserError`` where captions are dropped behind an encoder that has read them.

    Of an encoder that the model file does not have, only ``vae`` is taken to read none.
    """
    for name in sorted(encoded_beforehand(clips)) if dropout else ():
        encoder = encoders.get(name)
        if name != "vae" if encoder is None else _reads_captions(encoder, clips[0]):
            raise user_error(
                f"`caption_dropout` drops captions, and `{name}` has encoded them beforehand",
                help=(
                    "leave that encoder to the training, with `arachnec cache --encoders` and the names of the "
                    "others, or drop none"
                ),
            )


def _reads_captions(encoder: nn.Module, clip: VideoClip) -> bool:
    noted = _Noted(replace(clip, path=None, caption=clip.caption or ""))
    with contextlib.suppress(Exception):  # a video that is not there
        encoder.load(noted, "cpu")  # type: ignore[operator]
    return "caption" in noted.reads


class _Noted:
    """A value that notes which of its attributes are read."""

    def __init__(self, value: object) -> None:
        self.reads: set[str] = set()
        self._value = value

    def __getattr__(self, name: str) -> Any:
        self.reads.add(name)
        return getattr(self._value, name)


def demand_timesteps_read(
    source: ModelSource, timesteps: Timesteps, clip: VideoClip, encoders: Mapping[str, nn.Module], span: Span | None
) -> None:
    """Raises ``UserError`` where ``sample``, defined at ``span``, would ignore these timesteps.

    ``encoders`` are on the meta device, as tracing has them.
    """
    if timesteps == UNIFORM:
        return
    noted = _Noted(timesteps)
    arguments_of(source, replace(clip, timesteps=noted), encoders, device="meta")  # type: ignore[arg-type]
    if not noted.reads:
        raise user_error(
            "the training options have `timesteps`, and `sample` does not read them",
            help=(
                "draw the noise level by `clip.timesteps`, as arachnec.models.diffusers.common.draw_time does, or "
                "leave [timesteps] out"
            ),
            span=span,
        )


PROBED = 2**14  # text tokens; where as many change nothing, captions do not reach the model as tokens


def padded_text(source: ModelSource, clips: Sequence[VideoClip]) -> int | None:
    """The most text tokens of a caption with which the model is given tensors of the same sizes as with these clips'.

    None where captions are not padded, or do not reach the model as tokens.
    """
    like, encoders = min(clips, key=lambda clip: clip.frames * clip.height * clip.width), meta_encoders(source)

    def sizes(text: int) -> list[tuple[int, ...]] | None:
        clip = clip_of(like, (like.frames, like.height, like.width), text)
        try:
            arguments = arguments_of(source, clip, encoders, device="meta")
        except Exception:  # the caption is longer than it takes
            return None
        return [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]

    longest = max(clip.text_tokens for clip in clips)
    own = sizes(longest)
    if own is None or sizes(1) != own or sizes(PROBED) == own:
        return None
    return longest + bisect_left(range(longest + 1, PROBED), True, key=lambda text: sizes(text) != own)
