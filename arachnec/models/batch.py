"""Batches. In: equal clips, seed and step. Out: one forward's arguments and target, the same in every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import TypeIs

from arachnec.data.clip import UNIFORM, Timesteps, VideoClip
from arachnec.data.encoded_file import read_encoded
from arachnec.ir.diagnostic import Span, UserError, user_error
from arachnec.models.argument_trees import flatten
from arachnec.models.clip_errors import naming
from arachnec.models.file import ModelFile, check_sample


def unequal_argument_error(span: Span | None, name: str, first: str | int, second: str | int, found: str) -> UserError:
    return user_error(
        f"`{name}` has no batch dimension and differs between the equal clips {first} and {second}",
        label=found,
        help="give it a first dimension of 1, or make it depend on the clip's size alone",
        span=span,
    )


def clip_seed(seed: int, step: int, clip: str | int) -> int:
    """63 bits of BLAKE2b over ``"seed/step/clip"``: the same on every machine, rank and plan."""
    digest = hashlib.blake2b(f"{seed}/{step}/{clip}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def clip_generator(seed: int, step: int, clip: str | int) -> torch.Generator:
    """The CPU generator that a clip's noise and timestep are drawn from in one step."""
    return torch.Generator("cpu").manual_seed(clip_seed(seed, step, clip))


def clip_in_step(clip: VideoClip, seed: int, step: int, dropout: float, timesteps: Timesteps = UNIFORM) -> VideoClip:
    """A clip as one step trains it: with these ``timesteps``, one of its captions, and with probability ``dropout`` an
    empty one.

    Which it is follows from (seed, step, clip) alone; noise and timestep are the same either way. The clip keeps its
    ``text_tokens``, which is what was planned, those of its longest caption: an encoder pads to them.
    """
    dropped = dropout > 0 and clip_seed(seed, step, f"caption/{clip.id}") / 2**63 < dropout
    several = clip.captions
    caption = several[clip_seed(seed, step, f"captions/{clip.id}") % len(several)] if several else clip.caption
    return replace(clip, timesteps=timesteps, caption="" if dropped else caption, captions=())


def make_batch(
    model_file: ModelFile,
    clips: Sequence[VideoClip],
    seed: int,
    step: int,
    device: torch.device | str,
    *,
    encoded: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """The forward's keyword arguments and the target of a micro-batch of equal clips.

    ``encoded`` maps an encoder's name to its output ``[len(clips), ...]``; of those that ran beforehand it is read.
    ``sample`` runs once per clip, on the CPU, or on the meta device if ``device`` is meta. Tensor arguments whose dim 0
    is 1, and targets, are joined along dim 0; everything else must be equal for all clips and is passed once. ``dtype``
    casts the floating-point batched arguments of two or more dimensions (not timesteps, not tables); the target keeps
    its precision. Raises ``UserError`` for what ``sample`` gets wrong.
    """
    device = torch.device(device)
    sample_device = torch.device("meta" if device.type == "meta" else "cpu")
    samples = []
    with sample_device:
        for index, clip in enumerate(clips):
            own = {} if sample_device.type == "meta" else read_encoded(clip)
            own |= {name: value[index : index + 1].to(sample_device) for name, value in (encoded or {}).items()}
            sampled = replace(clip, encoded=own) if own else clip
            with naming([clip]):
                pair = model_file.sample(sampled, clip_generator(seed, step, clip.id))
                check_sample(pair, lambda: model_file.span("sample"), clip.name)
                kwargs, target = pair
                samples.append((kwargs, target))
    arguments = {
        name: _joined(model_file, name, clips, [kwargs.get(name) for kwargs, _ in samples])
        for name in _names(model_file, clips, samples)
    }
    batched = {name for name, value in samples[0][0].items() if is_batched(value)}
    kwargs = {
        name: _moved(value, device, dtype if name in batched and dtype is not None else None)
        for name, value in arguments.items()
    }
    target = _joined(model_file, "target", clips, [target for _, target in samples])
    return kwargs, target.to(device)


def prediction_of(output: Any) -> Tensor:
    """The prediction in a forward's output: the output, or its first element."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    elif isinstance(output, tuple | list) or is_dataclass(output):
        output = next(iter(flatten(output)[0]), None)
    if not isinstance(output, Tensor):
        raise user_error(
            f"the model's forward returned {type(output).__name__} in place of a prediction",
            help="return a tensor, or a tuple or mapping whose first element is one",
        )
    return output


def _names(
    model_file: ModelFile, clips: Sequence[VideoClip], samples: Sequence[tuple[dict[str, Any], Tensor]]
) -> list[str]:
    names = list(samples[0][0])
    for clip, (kwargs, _) in zip(clips, samples, strict=True):
        other = sorted(set(names) ^ set(kwargs))
        if other:
            difference = "given for one of them only"
            raise unequal_argument_error(model_file.span("sample"), other[0], clips[0].name, clip.name, difference)
    return names


def _joined(model_file: ModelFile, name: str, clips: Sequence[VideoClip], values: Sequence[Any]) -> Any:
    first = values[0]
    if len(values) == 1:
        return first
    fits = _of_one_form if is_batched(first) else _equal
    for clip, value in zip(clips, values, strict=True):
        if not fits(first, value):
            difference = f"{_described(first)} and {_described(value)}"
            raise unequal_argument_error(model_file.span("sample"), name, clips[0].name, clip.name, difference)
    return torch.cat(list(values)) if is_batched(first) else first


def _of_one_form(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def is_batched(value: Any) -> TypeIs[Tensor]:
    """Whether an argument is a value of each clip, joined along its first dimension."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return _of_one_form(a, b) and (a.device.type == "meta" or torch.equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    (parts, form), (others, other) = flatten(a), flatten(b)
    if form.is_leaf() or other.is_leaf():
        return bool(a == b)
    return form == other and all(map(_equal, parts, others))


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        cast = dtype is not None and value.is_floating_point() and value.ndim >= 2
        return value.to(device, dtype) if cast else value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device, None) for key, item in value.items()}
    parts, form = flatten(value)
    return value if form.is_leaf() else pytree.tree_unflatten([_moved(part, device, None) for part in parts], form)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
