"""Training options, stored in ``executable.json``: optimizer, schedule, precision, EMA, seed, and what is drawn.

``train_file`` reads them as a person writes them; docs/training_options.md says what each does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from arachnec.data.clip import UNIFORM, Timesteps
from arachnec.data.columns import Columns
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.limits import MOST_BATCHES, MOST_IN_BATCH
from arachnec.ir.nodes import Span


class TorchClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class by its name in torch, and its arguments by keyword."""

    name: str
    arguments: dict[str, Any] = {}


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The learning rate over steps: ``warmup`` of them rising linearly, then a scheduler of torch, or none."""

    warmup: int = 0
    scheduler: TorchClass | None = None


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters with ``arguments`` of the optimizer of their own.

    Those whose name fits one of the patterns in ``match`` and that have at most ``dimensions`` dimensions; None fits
    all.
    """

    match: tuple[str, ...] | None = None
    dimensions: int | None = None
    arguments: dict[str, Any] = {}


class Logging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where every step is written: a file of JSON lines, a folder of TensorBoard, a project of Weights & Biases."""

    jsonl: str | None = None
    tensorboard: str | None = None
    wandb: str | None = None


EVERY = 100  # optimizer steps between two validations, or two samples


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest whose loss is told behind every so many optimizer steps."""

    data: str | None = None
    every: int = EVERY


class SampledRequests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sampler file and requests, which the trained model samples behind every so many optimizer steps."""

    file: str | None = None
    requests: str | None = None
    every: int = EVERY


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest of a mix; clips are drawn from it as often as its ``weight`` says, beside the others' weights."""

    data: str
    weight: float = 1.0


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifests of which every batch draws so many clips."""

    batch: int = 0
    manifests: tuple[Source, ...] = ()

    @property
    def paths(self) -> list[str]:
        return [source.data for source in self.manifests]


BATCHES = f"give a number of global batches, from 1 to {MOST_BATCHES}"
OWN_OPTIMIZER = TorchClass("AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.01})


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the optimizer and of the random generators.

    ``dtype`` is the precision of parameters, activations and gradients; with ``bf16`` the optimizer keeps fp32 master
    copies. ``clip_norm`` 0 switches clipping off, ``ema`` 0 the moving average. A parameter has the arguments of the
    first of the ``groups`` that it fits. An update is made of ``accumulate`` global batches; with ``shuffle`` clips
    come in another order in every epoch, with ``stratified`` also each batch has its share of every shape. In a step a
    clip has no caption with probability ``caption_dropout``. ``columns`` says which of manifests are read, and
    ``long_captions`` what becomes of those with more text tokens than the model takes.
    """

    lr: float = 1e-4
    clip_norm: float = 1.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    ema: float = 0.0
    seed: int = 0
    optimizer: TorchClass = OWN_OPTIMIZER
    groups: tuple[Group, ...] = ()
    schedule: Schedule = Schedule()
    accumulate: int = 1
    shuffle: bool = False
    stratified: bool = False
    caption_dropout: float = 0.0
    timesteps: Timesteps = UNIFORM
    logging: Logging = Logging()
    validation: Validation = Validation()
    sampling: SampledRequests = SampledRequests()
    mix: Mix = Mix()
    columns: str = ""
    long_captions: Literal["cut", "refuse"] = "cut"


@dataclass(frozen=True)
class BadTrainValue(Diagnostic):
    title = "the training option `{key}` is {found}: {reason}"
    label = "not what it must be"
    help = "{remedy}"
    key: str
    found: str
    reason: str
    remedy: str


def bad_value(key: str, value: object, reason: str, remedy: str, span: Span | None = None) -> BadTrainValue:
    """``value`` as it was given, cut where it is long."""
    shown = repr(value)
    return BadTrainValue(span, key, shown if len(shown) <= 80 else f"{shown[:77]}...", reason, remedy)


@dataclass(frozen=True)
class BadTraining(Diagnostic):
    title = "{option} = {value} cannot be trained with"
    label = "out of range"
    help = "{remedy}"
    option: str
    value: float
    remedy: str


def _demand_finite(training: Training) -> None:
    """Raises ``UserError`` for an argument of torch's that is infinite or no number."""
    scheduler = training.schedule.scheduler
    tables = [("optimizer", training.optimizer.arguments)]
    tables += [] if scheduler is None else [("schedule", scheduler.arguments)]
    tables += [(f"groups[{number}]", group.arguments) for number, group in enumerate(training.groups)]
    for table, arguments in tables:
        for name, value in arguments.items():
            numbers = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise UserError(bad_value(f"{table}.{name}", value, "it is not finite", "give a finite number"))


def _is_batch(mix: Mix) -> bool:
    return 1 <= mix.batch <= MOST_IN_BATCH if mix.manifests else mix.batch >= 0


def _demand_mixable(training: Training) -> None:
    sources = training.mix.manifests
    for number, source in enumerate(sources):
        if not 0 < source.weight < math.inf:
            key = f"mix.manifests[{number}].weight"
            raise UserError(bad_value(key, source.weight, "a weight is above zero", "leave the manifest out"))
    if len(set(training.mix.paths)) < len(sources):
        raise UserError(
            bad_value("mix.manifests", training.mix.paths, "one is listed twice", "give it the sum of the weights")
        )
    if training.mix.batch and not sources:
        remedy = "list them below [[mix.manifests]]; the batches of one manifest are made by `compile --batch N`"
        raise UserError(bad_value("mix.batch", training.mix.batch, "the mix has no manifests", remedy))
    if sources and training.shuffle:
        raise UserError(bad_value("shuffle", True, "a mix is in random order", "leave `shuffle` out"))
    if training.stratified and (sources or training.shuffle):
        other = "mix" if sources else "shuffle"
        raise UserError(bad_value("stratified", True, f"`{other}` is another order", "keep one of them"))


def _demand_not_empty(training: Training) -> None:
    texts = [(f"logging.{name}", getattr(training.logging, name)) for name in Logging.__struct_fields__]
    texts += [("validation.data", training.validation.data)]
    texts += [("sampling.file", training.sampling.file), ("sampling.requests", training.sampling.requests)]
    texts += [(f"mix.manifests[{number}].data", source.data) for number, source in enumerate(training.mix.manifests)]
    for key, value in texts:
        if value is not None and not value.strip():
            raise UserError(bad_value(key, value, "it is empty", "leave the key out, or name a place"))


def _demand_sampler_and_requests(training: Training) -> None:
    given = training.sampling
    for key, value, other in (("file", given.file, given.requests), ("requests", given.requests, given.file)):
        if value is None and other is not None:
            raise UserError(bad_value(f"sampling.{key}", value, "one needs the other", f"give `sampling.{key}` too"))


def _is_used(file: str | None, every: int) -> bool:
    """Whether ``every`` says how often something is done, or was left as it is."""
    return file is not None or every == EVERY


def verified(training: Training) -> Training:
    """The options themselves, or a ``UserError`` that names the one out of range."""
    Columns.of(training.columns)
    warmup, dropout, drawn = training.schedule.warmup, training.caption_dropout, training.timesteps
    least, most = (drawn.min or 0.0), (1.0 if drawn.max is None else drawn.max)
    rules = (
        ("lr", training.lr, 0 <= training.lr < math.inf, "a learning rate is zero or more"),
        ("clip-norm", training.clip_norm, 0 <= training.clip_norm < math.inf, "give a norm, or 0 for no clipping"),
        ("ema", training.ema, 0 <= training.ema < 1, "a decay lies below 1, such as 0.999; 0 keeps no average"),
        ("seed", training.seed, 0 <= training.seed < 2**63, "a seed is zero or more, and below 2**63"),
        ("schedule.warmup", warmup, warmup >= 0, "give a number of steps, or 0 for none"),
        (
            "validation.every",
            training.validation.every,
            training.validation.every >= 1,
            "give a number of steps, 1 or more",
        ),
        (
            "sampling.every",
            training.sampling.every,
            training.sampling.every >= 1,
            "give a number of steps, 1 or more",
        ),
        (
            "validation.every",
            training.validation.every,
            training.validation.every < 1 or _is_used(training.validation.data, training.validation.every),
            "nothing is validated without validation.data, a manifest",
        ),
        (
            "sampling.every",
            training.sampling.every,
            training.sampling.every < 1 or _is_used(training.sampling.file, training.sampling.every),
            "nothing is sampled without sampling.file and sampling.requests",
        ),
        (
            "mix.batch",
            training.mix.batch,
            _is_batch(training.mix),
            f"give the clips of a batch, from 1 to {MOST_IN_BATCH}",
        ),
        ("accumulate", training.accumulate, 1 <= training.accumulate <= MOST_BATCHES, BATCHES),
        ("caption_dropout", dropout, 0 <= dropout <= 1, "a probability lies between 0 and 1"),
        ("timesteps.std", drawn.std, 0 < drawn.std < math.inf, "a spread is above zero"),
        ("timesteps.mean", drawn.mean, -math.inf < drawn.mean < math.inf, "a mean is a finite number"),
        ("timesteps.shift", drawn.shift, 0 < drawn.shift < math.inf, "a shift is above zero; 1 shifts nothing"),
        ("timesteps.min", least, 0 <= least < 1, "a noise level lies on [0, 1], the least below 1"),
        ("timesteps.max", most, max(0, least) < most <= 1, "a noise level lies on [0, 1], above timesteps.min"),
        ("timesteps.base_tokens", drawn.base_tokens or 1, (drawn.base_tokens or 1) > 0, "give a number of tokens"),
    )
    bad = tuple(BadTraining(None, option, value, remedy) for option, value, holds, remedy in rules if not holds)
    if bad:
        raise UserError(*bad)
    _demand_finite(training)
    _demand_not_empty(training)
    _demand_sampler_and_requests(training)
    _demand_mixable(training)
    return training
