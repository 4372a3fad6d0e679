"""A lowered program on clips of a few tokens: the same lists, on small shapes, of a small model for the real one.

Every instruction, rank, weight and order stays. Clips of different lengths stay different, and a rank's share of the
tokens stays in proportion.

A program says nothing of a model but its layers. So one of a few numbers a layer shows whether the program computes
what it should. It is in float64: a wrong weight is told from rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from arachnec.backends.staged_model import parts_of
from arachnec.cost.compute import is_divided
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Cascade, Clip, Instruction, Module, Phase, Stage, integer, integers
from arachnec.ir.stage_sizes import layers_of, tied_sets
from arachnec.models.file import ModelFile

CHANNELS = 4  # of a token, as encoders make it
NUMBER = torch.float64


@dataclass(frozen=True)
class Form:
    """``trains`` for every layer, in the order they run; ``shared`` are sets of layers that read one parameter."""

    trains: tuple[bool, ...]
    shared: tuple[frozenset[int], ...] = ()
    ends_train: bool = True  # what lies outside the layers
    first_trains: bool = True  # the stage of the embeddings: one without a backward trains nothing
    heads: int = 2
    encoders: tuple[str, ...] = ()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: list[nn.Parameter]) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.shared = nn.ParameterList(shared)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        scale = 1 + time[:, None]
        for parameter in self.shared:
            scale = scale + parameter
        parts = self.qkv(x * scale).view(batch, tokens, 3, self.heads, width // self.heads).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + torch.tanh(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class StandIn(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        width = 2 * form.heads
        self.embed = nn.Linear(CHANNELS, width)
        self.time = nn.Linear(1, width)
        shared = [nn.Parameter(torch.full((width,), 0.1 + number)) for number in range(len(form.shared))]
        self.blocks = nn.ModuleList(
            Block(width, form.heads, [shared[n] for n, layers in enumerate(form.shared) if layer in layers])
            for layer in range(len(form.trains))
        )
        self.head = nn.Linear(width, CHANNELS)
        self.to(NUMBER)
        for name, parameter in self.named_parameters():
            root, layer, *_ = f"{name}.".split(".")
            ends_train = form.ends_train and (root == "head" or form.first_trains)
            parameter.requires_grad_(form.trains[int(layer)] if root == "blocks" else ends_train)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale = self.time(time[:, None])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale)
        return cast(Tensor, self.head(x))


class Encoder(nn.Module):
    """Of a clip's place in the batch and its size: no two clips give the same."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv3d(2, CHANNELS, 3, padding=1, dtype=NUMBER)

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        shape = 2, clip.frames, clip.height // 8, clip.width // 8
        values = torch.arange(math.prod(shape), dtype=NUMBER, device=device)
        return torch.sin(values * (1 + int(clip.id))).view(1, *shape)

    def forward(self, loaded: Tensor) -> Tensor:
        return torch.tanh(cast(Tensor, self.mix(loaded)))


def tokens(clip: VideoClip) -> int:
    return clip.frames * (clip.height // 8) * (clip.width // 8)


def stand_in(form: Form) -> ModelFile:
    """The model file of this form."""
    return ModelFile(
        build=partial(StandIn, form),
        sample=_sample,
        loss=_loss,
        encoders=partial(_encoders, form.encoders) if form.encoders else None,
        path=Path(__file__),
        digest="",
    )


def _sample(clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
    noise = torch.randn(1, tokens(clip), CHANNELS, generator=generator, dtype=NUMBER)
    time = torch.rand(1, generator=generator, dtype=NUMBER)
    x = 1 + time * noise
    for number, part in enumerate(_flat(clip), 1):
        x = x + part * number
    return {"x": x, "time": time}, noise


def _flat(clip: VideoClip) -> Iterator[Tensor]:
    for _, value in sorted(clip.encoded.items()):
        yield value.flatten(2).transpose(1, 2)


def _loss(prediction: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(prediction, target)


def _encoders(names: tuple[str, ...]) -> dict[str, nn.Module]:
    return {name: Encoder() for name in names}


LAYERS = 2  # where a stage does not say how many it has
PATCH = 8  # pixels of a token
DIVIDED = 4 * PATCH  # pixels along height and width, of clips that several ranks encode


@dataclass(frozen=True)
class CannotExecute(Diagnostic):
    title = "@{module} cannot be executed on small tensors: {reason}"
    help = "`check` without --equivalence proves it as it is"
    module: str
    reason: str


@dataclass(frozen=True)
class Small:
    """``names`` are the real paths of its layers ``blocks.0``, ``blocks.1``, ...; ``clips`` by their ids in the IR."""

    module: Module
    clips: dict[int, VideoClip]
    form: Form
    names: tuple[str, ...]
    stage_of: tuple[str, ...]  # the stage of each layer


def small(module: Module) -> Small:
    """Raises ``UserError`` for a program that trains no model, or several."""
    parts = parts_of(module) or tuple(stage for stage in module.stages if stage.trained)
    if not any(stage.trained for stage in parts) or (len(parts) > 1 and not parts_of(module)):
        raise UserError(CannotExecute(module.span, module.name, "it does not train one model"))
    layers = [layers_of(stage) or ((str(number), 1) for number in range(LAYERS)) for stage in parts]
    named = [(stage.name, path, count) for stage, own in zip(parts, layers, strict=True) for path, count in own]
    numbers = iter(range(len(named)))
    renamed = {
        stage.name: replace(
            stage, attrs=stage.attrs.updated(layers=tuple((f"blocks.{next(numbers)}", n) for _, n in layers_of(stage)))
        )
        for stage in parts
        if layers_of(stage)
    }
    sizes = _small_sizes(module)
    clips = tuple(_small_clip(clip, sizes, _side(module)) for clip in module.clips)
    tokens = {clip.id: clip.tokens for clip in clips}
    cascades = tuple(_small_cascade(cascade, tokens) for cascade in module.cascades)
    of = {cascade.name: cascade.tokens for cascade in cascades}
    programs = tuple(
        replace(program, instructions=tuple(_small_step(step, of) for step in program.instructions))
        for program in module.programs
    )
    changed = replace(
        module,
        clips=clips,
        stages=tuple(_by_frames(renamed.get(stage.name, stage)) for stage in module.stages),
        graphs=(),
        cascades=cascades,
        programs=programs,
    )
    return Small(
        changed,
        {clip.id: VideoClip(clip.id, clip.frames, clip.height, clip.width, 0) for clip in clips},
        _form(module, parts, named),
        tuple(path for _, path, _ in named),
        tuple(stage for stage, _, _ in named),
    )


def _form(module: Module, parts: Sequence[Stage], named: Sequence[tuple[str, str, int]]) -> Form:
    first = {stage: number for number, (stage, _, _) in reversed(list(enumerate(named)))}
    sets = dict.fromkeys(pair[0] for stage in parts for pair in tied_sets(stage.attrs.get("tied")))
    trained = [_trained(stage) for stage in parts]
    steps = [step for program in module.programs for step in program.instructions if step.op == "forward"]
    used = {cascade.stage for cascade in module.cascades if cascade.phase is Phase.ENCODE}
    return Form(
        trains=tuple(count > 0 for _, _, count in named),
        shared=tuple(frozenset(first[parts[number].name] for number in numbers) for numbers in sets),
        ends_train=sum(trained) > sum(count for _, _, count in named),
        first_trains=parts[0].trained,
        heads=1 + max([1, *(integer(step.attrs.get("ulysses", 1)) for step in steps)]),
        encoders=tuple(stage.name for stage in module.stages if stage.name in used),
    )


def _by_frames(stage: Stage) -> Stage:
    """A small encoder has no blocks of some width: what ranks divide of it are its frames."""
    if "tensor_parallel" not in stage.attrs:
        return stage
    return replace(stage, attrs=stage.attrs.updated(tensor_parallel=None, divides=stage.attrs["tensor_parallel"]))


def _trained(stage: Stage) -> int:
    whole = sum(count for _, count in layers_of(stage)) + 1
    return integer(stage.attrs.get("trained", stage.attrs.get("params", whole))) if stage.trained else 0


def _small_sizes(module: Module) -> dict[int, int]:
    """Frames of a small clip by the real one's tokens: more than ranks share a clip, and all different."""
    most = max((cascade.degree for cascade in module.cascades), default=1)
    return {tokens: most + 2 + n for n, tokens in enumerate(sorted({clip.tokens for clip in module.clips}))}


def _side(module: Module) -> int:
    """Pixels of a clip's height and width: one token, or several where ranks divide a clip to encode it."""
    stages = {stage.name: stage for stage in module.stages}
    divided = any(is_divided(cascade, stages[cascade.stage], cascade.degree) for cascade in module.cascades)
    return DIVIDED if divided else PATCH


def _small_clip(clip: Clip, sizes: dict[int, int], side: int) -> Clip:
    frames = sizes[clip.tokens]
    return replace(clip, frames=frames, height=side, width=side, text=0, tokens=frames * (side // PATCH) ** 2)


def _small_cascade(cascade: Cascade, tokens: dict[int, int]) -> Cascade:
    length = tokens[cascade.clips[0]]
    shards = cascade.attrs.get("shards")
    attrs = cascade.attrs if shards is None else cascade.attrs.updated(shards=_in_proportion(integers(shards), length))
    return replace(cascade, tokens=length, text=0, attrs=attrs)


def _small_step(step: Instruction, tokens: dict[str, int]) -> Instruction:
    if step.op != "forward":
        return step
    attrs, shards = step.attrs.updated(attention=None), step.attrs.get("shards")  # kernels are those of this machine
    if shards is not None:
        attrs = attrs.updated(shards=_in_proportion(integers(shards), tokens[step.target]))
    return replace(step, attrs=attrs)


def _in_proportion(shards: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Shares of ``total`` in the proportion of these, by the largest remainder; none where there was none, else one."""
    least = [min(1, share) for share in shards]
    left, whole = total - sum(least), sum(shards)
    exact = [left * share / whole for share in shards]
    floors = [int(value) for value in exact]
    order = sorted(range(len(shards)), key=lambda n: (floors[n] - exact[n], n))
    more = set(order[: left - sum(floors)])
    return tuple(least[n] + floors[n] + (n in more) for n in range(len(shards)))
