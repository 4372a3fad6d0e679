"""Calls of the model for clips that need not exist: small ones to record, large ones to count tokens."""

from __future__ import annotations

import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_like
from arachnec.ir.diagnostic import Span, UserError
from arachnec.models.argument_trees import register_dataclasses
from arachnec.models.batch import is_batched
from arachnec.models.encoders import tiles_called, tiling_vae
from arachnec.models.file import ModelFile, line_span
from arachnec.models.pretrained_on_meta import without_values
from arachnec.tracing.errors import CannotRecord, needs_values
from arachnec.tracing.find import find_blocks
from arachnec.tracing.record import ExampleCall, Repeats, is_meta, training_mode

# Small pixel shapes that most models take: 8k + 1 frames, sides that are multiples of 32. All differ in everything.
SMALL = ((9, 64, 96), (17, 96, 160), (17, 64, 96), (9, 64, 128))
CAPTIONS = (19, 23)


class ModelSource(Protocol):
    """What tracing needs of a model file."""

    @property
    def build(self) -> Callable[[], nn.Module]: ...
    @property
    def sample(self) -> Callable[[VideoClip, torch.Generator], tuple[dict[str, object], Tensor]]: ...
    @property
    def encoders(self) -> Callable[[], dict[str, nn.Module]] | None: ...
    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor] | None: ...


def arguments_of(
    source: ModelSource, clip: VideoClip, encoders: Mapping[str, nn.Module], *, device: str
) -> dict[str, Any]:
    """Forward's keyword arguments for one clip; on the meta device nothing of the clip's size is allocated.

    ``encoders`` are on the meta device: only the shapes of what they give are used. A sample that looks at its numbers
    gets numbers. Raises what ``sample`` raises.
    """
    return sample_of(source, clip, encoders, device=device)[0]


def sample_of(
    source: ModelSource, clip: VideoClip, encoders: Mapping[str, nn.Module], *, device: str, seed: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """The same with the clip's target; ``seed`` draws the numbers, where there are some."""
    shapes = {name: _shape_of(name, encoder, clip) for name, encoder in encoders.items()}
    generator = torch.Generator("cpu").manual_seed(seed)
    if device == "meta":
        try:
            # Everything in it claims to be on the CPU, so a user's `device="cpu"` and CPU generators work.
            with FakeTensorMode(allow_non_fake_inputs=True), _quiet():
                encoded = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in shapes.items()}
                kwargs, target = source.sample(replace(clip, encoded=encoded), generator)
            return _on(kwargs, device), _on({"target": target}, device)["target"]
        except Exception as error:
            if not needs_values(error):
                raise
            generator.manual_seed(seed)
    with torch.device("cpu"):  # numbers, also where the model is run on the meta device
        encoded = {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in shapes.items()}
        kwargs, target = source.sample(replace(clip, encoded=encoded), generator)
    return _on(kwargs, device), _on({"target": target}, device)["target"]


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and no log of what torch raises as well: shapes that do not fit."""
    log = logging.getLogger(fake_tensor.__name__)
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


def _shape_of(name: str, encoder: nn.Module, clip: VideoClip) -> Tensor:
    """As the clip's file has it, where the encoder ran beforehand: a meta tensor."""
    known = encoded_like(clip, name)
    return encoded_shape(encoder, clip) if known is None else known


def encoded_shape(encoder: nn.Module, clip: VideoClip) -> Tensor:
    """What an encoder on the meta device gives for a clip: a meta tensor. One run serves all that is loaded alike."""
    known: dict[tuple[torch.Size, torch.dtype], Tensor] = encoder.__dict__.setdefault("shapes_of_clips", {})
    with torch.device("meta"), torch.no_grad(), _every_tile_size_once(encoder):
        loaded = encoder.load(clip, torch.device("meta"))  # type: ignore[operator]
        if not isinstance(loaded, Tensor):
            output: Tensor = encoder(loaded)
            return output
        key = loaded.shape, loaded.dtype
        if key not in known:
            known[key] = encoder(loaded)
        return known[key]


@contextmanager
def _every_tile_size_once(encoder: nn.Module) -> Iterator[None]:
    """A VAE that tiles calls its ``encoder`` for every tile. Only the shape of the result counts here, so calls that
    are given nothing but pixels run once for each size, of all clips: what they gave is kept on the module."""
    vae = tiling_vae(encoder)
    if vae is None:
        yield
        return
    known = vae.__dict__.setdefault("shapes_of_tiles", {})

    def once(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:  # caches go along
            return run(*args, **kwargs)
        if args[0].shape not in known:
            known[args[0].shape] = run(*args)
        return known[args[0].shape]

    with tiles_called(vae, once):
        yield


def _on(kwargs: Mapping[str, Any], device: str) -> dict[str, Any]:
    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if device == "meta":
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return leaf.to(device)

    register_dataclasses(kwargs)
    moved_kwargs: dict[str, Any] = pytree.tree_map(moved, dict(kwargs))
    return moved_kwargs


def clip_of(like: VideoClip, shape: tuple[int, ...], text: int) -> VideoClip:
    """A clip of this size and caption length, of no video; files and numbers of its manifest's columns it keeps."""
    values = {name: value for name, value in like.values.items() if name not in like.tensors}
    return replace(
        like, frames=shape[0], height=shape[1], width=shape[2], text_tokens=text, path=None,
        caption="a" * max(1, text - 1), captions=(), encoded={}, cached={}, values=values,
    )  # fmt: skip


def tiled(kwargs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """The call for ``batch`` equal clips: what has a first dimension of 1 is repeated, everything else passed once."""
    return {name: torch.cat([value] * batch) if is_batched(value) else value for name, value in kwargs.items()}


def example_calls(
    model: nn.Module,
    source: ModelSource,
    clips: Sequence[VideoClip],
    encoders: Mapping[str, nn.Module] | None = None,
    *,
    most: int | None = None,
) -> list[ExampleCall]:
    """The recordings that ``capture_blocks`` wants, found by trying: small synthetic clips, else the smallest given.

    Ranks call it again at launch, on the real model. ``encoders`` are on the meta device; built if not given. ``most``
    clips are in a call, where a number is given. Raises ``UserError`` where the model takes no clip it could be
    recorded with.
    """
    if encoders is None:
        encoders = meta_encoders(source)
    like = clips[0] if clips else VideoClip(0, *SMALL[0], CAPTIONS[0])
    probe = _Probe(model, source, encoders, like, min(2, most or 2))
    base, others = _shapes(probe, clips)
    texts = _texts(probe, base, clips)
    first, second = texts[0], texts[-1]
    wanted = [(base, 2, first), *((shape, 2, first) for shape in others), (base, 3, first)]
    if second != first:
        wanted.append((base, 2, second))
    wanted.append((min(others, key=math.prod), 1, second))  # compared with eager in numbers: small

    sizes = dict.fromkeys((shape, min(n, most or n), text) for shape, n, text in wanted)
    return [ExampleCall(tiled(probe.arguments(shape, text), n), shape, n, text) for shape, n, text in sizes]


def calls_of_shape(
    model: nn.Module, source: ModelSource, clip: VideoClip, *, most: int | None = None
) -> list[ExampleCall]:
    """Calls with clips like this one that differ in their number alone: 2 and 3, or ``most``."""
    probe = _Probe(model, source, meta_encoders(source), clip, 1)
    shape = clip.frames, clip.height, clip.width
    arguments = probe.arguments(shape, clip.text_tokens)
    counts = dict.fromkeys(min(n, most or n) for n in (2, 3))
    return [ExampleCall(tiled(arguments, n), shape, n, clip.text_tokens) for n in counts]


def meta_encoders(source: ModelSource) -> dict[str, nn.Module]:
    """The encoders on the meta device: made there, or where making them needs values, moved."""
    if source.encoders is None:
        return {}
    try:
        with torch.device("meta"):
            encoders = source.encoders()
    except Exception as error:
        if not needs_values(error):
            raise
        encoders = source.encoders()
    return {
        name: encoder if all(parameter.is_meta for parameter in encoder.parameters()) else without_values(encoder)
        for name, encoder in encoders.items()
    }


class _Probe:
    """Tries one shape after the other on the model and keeps what it was called with."""

    def __init__(
        self, model: nn.Module, source: ModelSource, encoders: Mapping[str, nn.Module], like: VideoClip, batch: int
    ) -> None:
        self.model, self.source, self.encoders, self.like, self.batch = model, source, encoders, like, batch
        self.device = "meta" if is_meta(model) else str(next(iter(model.parameters()), torch.empty(0)).device)
        self.repeats = Repeats(model, find_blocks(model))
        self.calls: dict[tuple[tuple[int, ...], int], dict[str, Any]] = {}

    def arguments(self, shape: tuple[int, ...], text: int) -> dict[str, Any]:
        if (shape, text) not in self.calls:
            clip = clip_of(self.like, shape, text)
            self.calls[shape, text] = arguments_of(self.source, clip, self.encoders, device=self.device)
        return self.calls[shape, text]

    def takes(self, shape: tuple[int, ...], text: int) -> Exception | None:
        """None if the model runs on such a clip, else what it raised."""
        try:
            with torch.no_grad(), training_mode(self.model), torch.device(self.device), self.repeats:
                self.model(**tiled(self.arguments(shape, text), self.batch))
        except Exception as error:
            return error
        return None


def _shapes(probe: _Probe, clips: Sequence[VideoClip]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A pixel shape to record at, and up to three that differ from it."""
    text = min((clip.text_tokens for clip in clips), default=CAPTIONS[0])
    error = None
    for shapes in _families(clips):
        accepted = []
        for shape in shapes:
            error = probe.takes(shape, text)
            if error is None:
                accepted.append(shape)
            elif not accepted:
                break
        if len(accepted) > 1:
            return accepted[0], accepted[1:]
    if isinstance(error, UserError):  # it says itself what is wrong, and where
        raise error
    raise UserError(_cannot(probe.source, clips, error)) from error


def _families(clips: Sequence[VideoClip]) -> Iterator[Sequence[tuple[int, ...]]]:
    yield list(SMALL)
    own = sorted({(c.frames, c.height, c.width) for c in clips}, key=lambda s: s[0] * s[1] * s[2])
    yield own[:4]
    if own:  # one shape only: more of its frames, and twice its size
        f, h, w = own[0]
        yield [own[0], (f + 8, h, w), (f, 2 * h, w), (f, h, 2 * w)]


def _texts(probe: _Probe, base: tuple[int, ...], clips: Sequence[VideoClip]) -> tuple[int, ...]:
    """Two caption lengths that the model takes, or the one that it takes."""
    lengths = sorted({clip.text_tokens for clip in clips})
    for pair in (CAPTIONS, tuple(lengths[:2])):
        if len(pair) == 2 and all(probe.takes(base, text) is None for text in pair):
            return pair
    return (lengths[0],) if lengths else CAPTIONS[:1]


OF_PRECISION = (
    "; with dtype = bf16 arguments of one dimension, such as timesteps, stay as `sample` gives them: cast them there "
    "where the model wants them in its own precision"
)


def _cannot(source: ModelSource, clips: Sequence[VideoClip], error: Exception | None) -> CannotRecord:
    shape = " x ".join(map(str, (clips[0].frames, clips[0].height, clips[0].width) if clips else SMALL[0]))
    message = " ".join(str(error).split("\n")[0].split())
    reason = f"{type(error).__name__}: {message}".rstrip(": ") if error else "it has only one size of clip"
    hint = OF_PRECISION if "dtype" in message else ""
    return CannotRecord(raised_at(source, error), shape, reason, hint)


def raised_at(source: ModelSource, error: Exception | None) -> Span | None:
    """The innermost line of the model file that the error went through; else its ``sample``."""
    if not isinstance(source, ModelFile):
        return None
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [frame.lineno for frame in frames if frame.filename == str(source.path)]
    return line_span(source.path, lines[-1] or 1) if lines else source.span("sample")
