"""Trials of a model: whether it takes a clip's shape, and, made small, whether it keeps the clips of a batch apart."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.models.batch import is_batched, prediction_of
from arachnec.models.clip_errors import naming
from arachnec.tracing.errors import cannot_take_error, random_operation_error
from arachnec.tracing.export import is_seeded
from arachnec.tracing.find import Unread, find_blocks, structure, unread_settings
from arachnec.tracing.record import ExampleCall, Repeats, is_meta, run_once, training_mode
from arachnec.tracing.sample import ModelSource, arguments_of, clip_of, encoded_shape, raised_at, sample_of
from arachnec.tracing.sample_reads import NUMPY, PYTHON, move, restored, states
from arachnec.tracing.shell import TotalFlops
from arachnec.tracing.verify import SEED, TILE, FactoredMatrix, fill, is_wide, random_like

TOLERANCE = 1e-4  # of the largest value, in float32
MOST_FLOPS = 5e11  # of one forward: a few seconds of a processor
SURELY_FEW = 1e11  # weights times the values of an argument: fewer need not be counted
MOST_WEIGHTS = 2**31  # with values: 8 GiB


LACKING = (NotImplementedError, ImportError, MemoryError)  # of the processor or what is installed
LACKED = ("cuda", "driver", "allocate memory", "meta")  # in a message: a device, memory, a tensor without values


class CannotRun(Exception):
    """Why the model gives no prediction here."""


class ModelRaised(CannotRun):
    """The model's own code raised what is the cause of this, with a clip that it takes by its shape."""


@dataclass(eq=False)
class SmallModel:
    """``drawn``: the last random operation of a forward, or the generator that it drew from, where there was one."""

    name: str
    model: nn.Module
    blocks: Mapping[str, nn.Module]  # one of each structure
    converted: bool = False  # whether its weights had another precision
    drawn: str = field(default="", init=False)

    def run(self, arguments: Mapping[str, Any], seed: int = 0) -> Tensor:
        """The prediction, in float32. Raises ``CannotRun`` where only this machine or precision may be why the model
        raises, else ``ModelRaised``."""
        repeats = Repeats(self.model, self.blocks, values=True)
        with restored(), torch.no_grad(), training_mode(self.model), repeats, self.watching(seed):
            try:
                prediction = prediction_of(self.model(**pytree.tree_map_only(Tensor, _in_float32, dict(arguments))))
            except Exception as error:
                leaves = pytree.tree_leaves(dict(arguments))
                if of_the_trial(error, self.converted or any(map(_another_precision, leaves))):
                    raise CannotRun(raised(error)) from error
                raise ModelRaised(raised(error)) from error
        return prediction.float()

    @contextlib.contextmanager
    def watching(self, seed: int) -> Iterator[None]:
        """Inside, with the global generators moved, draws are noted."""
        move(seed)
        before = states()
        with _Drawn(self):
            yield
        after = states()
        self.drawn = next((name for name in (PYTHON, NUMPY) if after[name] != before[name]), self.drawn)


@dataclass
class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    small: SmallModel

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_seeded(func):
            self.small.drawn = str(func)
        return func(*args, **(kwargs or {}))


def small_model(model: nn.Module, call: ExampleCall) -> SmallModel:
    """Raises ``CannotRun`` where the call, or what has to have values, is too large, or there is no copying it.

    One block of each structure has weights; the others return what the first of theirs returned, so that a model of 40
    layers costs little more than one of a single layer. Weights are random and of the size that keeps a signal's: none
    is zero, as an adapter or a gate may begin, so every argument reaches the prediction.
    """
    blocks = find_blocks(model)
    unread = unread_settings(blocks, lambda: run_once(model, call))
    firsts: dict[Any, nn.Module] = {}
    copies: dict[int, Any] = {}
    try:
        for block in blocks.values():
            copies[id(block)] = copy.deepcopy(firsts.setdefault(structure(block, unread), block), copies)
        small = copy.deepcopy(model, copies)
    except Exception as error:
        raise CannotRun(f"there is no copying it: {raised(error)}") from error
    weights = sum(parameter.numel() for parameter in small.parameters())
    if weights > MOST_WEIGHTS:
        raise CannotRun(f"{weights / 1e9:.1f} billion weights lie outside its repeated blocks")
    largest = max(leaf.numel() for leaf in pytree.tree_leaves(dict(call.arguments)) if isinstance(leaf, Tensor))
    if is_meta(model) and weights * largest > SURELY_FEW:
        _demand_few_flops(model, blocks, unread, call)
    converted = any(map(_another_precision, small.parameters()))
    _give_values(small)
    named = {path: small.get_submodule(path) for path in blocks}
    return SmallModel(type(model).__name__, small, named, converted)


def _demand_few_flops(model: nn.Module, blocks: Mapping[str, nn.Module], unread: Unread, call: ExampleCall) -> None:
    with TotalFlops() as counter, Repeats(model, blocks, unread):
        run_once(model, call)
    flops = counter.get_total_flops() / call.batch
    if flops > MOST_FLOPS:
        raise CannotRun(f"its smallest clip takes {flops / 1e12:.1f} TFLOP")


def _give_values(model: nn.Module) -> None:
    """Random weights, in float32; buffers keep the values that they have."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    tile = torch.empty(TILE).uniform_(-1, 1, generator=generator)
    before = [*model.parameters(), *model.buffers()]  # alive, so that no other tensor gets the id of one
    known: dict[int, Any] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in known:
                    known[id(parameter)] = _weight(name, parameter, tile, generator)
                module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), _in_float32(_real(buffer, generator)))
        for name, held in vars(module).items():
            if not name.startswith("_") and any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves(held)):
                module.__dict__[name] = pytree.tree_map_only(Tensor, lambda t: _real(t, generator), held)
    before.clear()


def _weight(name: str, like: nn.Parameter, tile: Tensor, generator: torch.Generator) -> nn.Parameter:
    """Of a matrix so that what goes through keeps its size, of a norm's weight around 1."""
    if is_wide(like):
        return FactoredMatrix.like(like, torch.float32, torch.device("cpu"), generator)
    values = _values(name, like, tile, generator)
    return nn.Parameter(values, requires_grad=like.requires_grad)


def _values(name: str, like: Tensor, tile: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    of_matrix = like.ndim > 1 and like.shape[0] > 1
    scale = math.sqrt(3 * like.shape[0] / like.numel()) if of_matrix else 0.5
    values = torch.empty(like.shape)
    if like.numel() < TILE:
        values.uniform_(-scale, scale, generator=generator)
    else:
        fill(values, tile.roll(int(torch.randint(TILE, (), generator=generator))) * scale)
    return values.add_(1.0) if name == "weight" and like.ndim == 1 else values


def _real(value: Tensor, generator: torch.Generator) -> Tensor:
    return random_like(value, generator) if value.is_meta else value.detach().cpu()


def _in_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _another_precision(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32


def of_the_trial(error: Exception, converted: bool) -> bool:
    """Whether an error may come of how the model is run here, and not of its code: on this processor, without what is
    not installed, and in float32 where it is written for another precision."""
    said = str(error).lower()
    return isinstance(error, LACKING) or any(word in said for word in LACKED) or (converted and "type" in said)


def raised(error: Exception) -> str:
    """An exception in a line."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")[:200]


SEEDS = 8  # of a forward that draws; a coin falls the same way in all of them in one of 128
Sample = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True)
class ClipsMixed(Diagnostic):
    title = "two clips in a batch are not what they are alone: {what}"
    help = (
        "an argument with a first dimension of 1 must be a value of its clip; what is shared needs another first "
        "dimension, and statistics over a batch mix its clips"
    )
    what: str


def demand_clips_apart(
    model: nn.Module, source: ModelSource, call: ExampleCall, like: VideoClip, encoders: Mapping[str, nn.Module]
) -> str | None:
    """None, or why it cannot be told. ``call`` is a small call of the model, of a clip ``like`` this one.

    Raises ``UserError`` where the predictions or the loss of a batch differ from those of its clips, where the model
    draws its prediction, and where the model or its loss raises with what its own ``sample`` gives. It cannot be told
    where this machine lacks what the model needs, or ``sample`` gives no values for a clip without files.

    The model runs in numbers, one block of each structure (``small_model``).
    """
    clip = clip_of(like, call.clip, call.text)
    first, second, drawn = _two_samples(source, clip, encoders)
    try:
        _compare(small_model(model, call), first, second, source.loss)
    except ModelRaised as reason:
        if drawn:
            return f"{reason} (with values drawn at random: sample() gives none without files)"
        error = reason.__cause__
        if isinstance(error, UserError):
            raise error from reason
        span = raised_at(source, error if isinstance(error, Exception) else None)
        raise user_error(
            f"the model fails on a clip of {sizes_of(clip)} with {clip.text_tokens} text tokens: {reason}",
            label="here",
            help="it takes this shape, and not these values: check that build()(**sample(clip, generator)[0]) runs, "
            "and loss() of what it gives",
            span=span,
        ) from error
    except CannotRun as reason:
        return str(reason)
    return None


def _compare(small: SmallModel, first: Sample, second: Sample, loss: Any) -> None:
    alone = [small.run(arguments) for arguments, _ in (first, second)]
    if not all(prediction.isfinite().all() for prediction in alone):
        raise CannotRun("its prediction is not finite with random weights")
    if small.drawn and any(not _apart(small.run(first[0], seed), alone[0]) <= TOLERANCE for seed in range(1, SEEDS)):
        raise random_operation_error(small.name, small.drawn)
    try:
        together = small.run(_joined(first[0], second[0]))
    except CannotRun as error:
        raise UserError(ClipsMixed(None, f"together they raise {error}")) from error
    apart = _apart(together, _cat(alone))
    if not apart <= TOLERANCE:
        names = ", ".join(_not_per_clip(small, first[0], second[0]))
        reason = f" ({names} has a first dimension of 1 and is no value of its clip)" if names else ""
        size = f"differs by {apart:.1%}" if math.isfinite(apart) else "has another size"
        raise UserError(ClipsMixed(None, f"the prediction {size}{reason}"))
    if loss is None:
        return
    _refuse_drawing(small, loss, alone[0], first[1])
    targets = torch.cat([first[1], second[1]]) if is_batched(first[1]) else first[1]
    try:
        mean = (float(loss(alone[0], first[1])) + float(loss(alone[1], second[1]))) / 2
    except Exception as error:
        kind = CannotRun if of_the_trial(error, small.converted) else ModelRaised
        raise kind(f"loss() raises {raised(error)}") from error
    try:
        actual = float(loss(together, targets))
    except Exception as error:
        raise UserError(ClipsMixed(None, f"their loss raises {raised(error)}, that of each alone does not")) from error
    if not abs(actual - mean) <= TOLERANCE * abs(mean):
        raise UserError(ClipsMixed(None, f"their loss is {actual:.4g}, the mean of the two alone {mean:.4g}"))


def _refuse_drawing(small: SmallModel, loss: Any, prediction: Tensor, target: Tensor) -> None:
    small.drawn, losses = "", set()
    with restored(), contextlib.suppress(Exception):  # what it raises is told where it is compared
        for seed in range(SEEDS):
            with small.watching(seed):
                losses.add(str(float(loss(prediction, target))))
            if not small.drawn:
                return
    if len(losses) > 1:
        raise random_operation_error("`loss`", small.drawn)


def _not_per_clip(small: SmallModel, first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """The arguments that do not reach the clip whose they are: the clips of a batch differ in one at a time."""
    for name, value in first.items():
        if is_batched(value) and not torch.equal(value, second[name]):
            other = first | {name: second[name]}
            try:
                together = small.run(_joined(first, other))
                apart = _apart(together, _cat([small.run(first), small.run(other)]))
            except CannotRun:
                continue
            if not apart <= TOLERANCE:
                yield f"`{name}`"


def _two_samples(
    source: ModelSource, clip: VideoClip, encoders: Mapping[str, nn.Module]
) -> tuple[Sample, Sample, bool]:
    """Two equal clips' arguments and targets, in numbers: as ``sample`` draws them, else at random in its shapes, and
    whether at random. What is not a fraction and comes from an encoder is so, too.

    A ``sample`` that reads a clip's files cannot draw for one that has none.
    """
    shapes = sample_of(source, clip, encoders, device="meta")
    for other in (replace(clip, id=f"{clip.id}.1"), clip):
        try:
            first, second = (sample_of(source, c, encoders, device="cpu", seed=n) for n, c in enumerate((clip, other)))
        except Exception:
            continue
        if _form(first) == _form(second) == _form(shapes):
            whole = any(not encoded_shape(encoder, clip).is_floating_point() for encoder in encoders.values())
            return first, _with_shared(first, second), whole
    generator = torch.Generator("cpu").manual_seed(0)
    first, second = (_at_random(shapes, generator) for _ in range(2))
    return first, _with_shared(first, second), True


def _form(sample: Sample) -> list[tuple[str, Any]]:
    """Names, and sizes and types of tensors."""
    leaves, spec = pytree.tree_flatten(sample)
    return [(str(spec), ""), *(("", (x.shape, x.dtype) if isinstance(x, Tensor) else type(x)) for x in leaves)]


def _at_random(shapes: Sample, generator: torch.Generator) -> Sample:
    drawn: Sample = pytree.tree_map_only(Tensor, lambda like: random_like(like, generator), shapes)
    return drawn


def _with_shared(first: Sample, second: Sample) -> Sample:
    """The second clip with what is passed once for both, as it is passed for the first."""
    own = {name: second[0][name] if is_batched(value) else value for name, value in first[0].items()}
    return own, second[1] if is_batched(first[1]) else first[1]


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.cat([value, second[name]]) if is_batched(value) else value for name, value in first.items()}


def _cat(predictions: Sequence[Tensor]) -> Tensor:
    return torch.cat([prediction.reshape(-1) for prediction in predictions])


def _apart(prediction: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest value; infinite where there is another number of values."""
    if prediction.numel() != expected.numel():
        return math.inf
    difference = (prediction.reshape(-1) - expected.reshape(-1)).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-30))


class Reached(BaseException):
    """Ends a forward at its first block; no ``except Exception`` of a model stops it."""


def run_clip(
    model: nn.Module,
    source: ModelSource,
    encoders: Mapping[str, nn.Module],
    clip: VideoClip,
    repeats: Repeats | None = None,
) -> None:
    """Run the model at a clip, on the device that it lies on; on the meta device with ``repeats`` each kind of block
    once.

    ``encoders`` are on the meta device. Without ``repeats`` a hook is expected to raise ``Reached``. Raises
    ``UserError``, which names the clip, where the model cannot take it.
    """
    device = str(next(model.parameters()).device)
    try:
        with naming([clip]):
            arguments = arguments_of(source, clip, encoders, device=device)
        with torch.no_grad(), training_mode(model), torch.device(device), repeats or contextlib.nullcontext():
            prediction_of(model(**arguments))
    except Reached:
        pass
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise cannot_take_error(
            raised_at(source, error), clip.name, sizes_of(clip), clip.text_tokens, reason
        ) from error


def sizes_of(clip: VideoClip) -> str:
    return f"{clip.frames} x {clip.height} x {clip.width}"
