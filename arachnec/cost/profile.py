"""Profiles: what was measured on a machine, and the formulas fitted to it, as a JSON file.

Fitted per stage and phase is ``ms = a B S^2 / d + b B S T / d + c B S / d + e B T + f B + g`` with no negative
coefficient, by least squares on the relative error of what was measured on one rank. What cascades on several ranks
took beyond that is fitted, over all stages and phases, by ``alpha messages + bytes / beta``. The file keeps the
measurements, the residuals and the error on points that were held out, so that anybody can see how far to trust it.

An encoder's formula has only terms in what the encoder is given, and stands only for clips of sizes that were not
measured (``find_clip_time``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachnec.cost.sparse_profile import SparseProfile, sparse_problem
from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.ir.limits import LARGEST, LARGEST_PROFILE, MOST_MS, SMALLEST
from arachnec.ir.nodes import Span
from arachnec.ir.values import Formula, Term

# A stage's parts are stages of a profile, named `stage/part`: a block of each class, what lies before and behind them.
FIRST, LAST = "first", "last"
BATCH = "batch"  # a part, too: what a forward is given is made by a thread beside it, on CPU ranks by the same cores
# The backward is measured whole, and in the two parts of a split one.
PHASES = ("forward", "backward", "activation", "weight")
GATHER, SCATTER = "all-gather", "reduce-scatter"  # of a layer's parameters and gradients in a cell
HANDOFF = "handoff"  # each of two ranks hands a part to the other
# what compute takes longer beside one: on CPU ranks of one machine the same cores do both
OVERLAPPED = {op: f"overlapped-{op}" for op in (GATHER, SCATTER, HANDOFF)}
LEAST_LATENCY, MOST_GBS = 0.1, 1e4  # us and GB/s, where nothing of it was to be seen
ONE_SIZE = 0.05  # messages whose sizes differ by less, relatively, are taken for one size


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One timed run: ``batch`` clips of ``tokens`` and ``text`` tokens on ``degree`` ranks took ``ms``.

    Each of several ranks waited for ``messages`` that followed one another, and sent ``moved`` bytes. ``sizes``: of an
    encoder, those of the clips' frames, height, width (pixels) and text (tokens) that change what it is given: clips
    equal in these take the same time. None for a trained stage.
    """

    batch: int
    tokens: int
    text: int
    degree: int
    ms: float
    messages: float = 0.0
    moved: float = 0.0
    sizes: dict[str, int] | None = None


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The formula of one stage and phase, and how well it fits.

    ``coefficients``: ms per unit of ``B*S^2``, ``B*S*T``, ``B*S``, ``B*T``, ``B`` and ``1``. ``residuals``: (predicted
    - measured) / measured of each measurement. ``held_out``: mean absolute relative error of predicting each one that
    ran on one rank from the others. ``exponent``: p of time ~ S^p over the measured range, what S has no part in taken
    off.
    """

    coefficients: dict[str, float]
    residuals: list[float]
    held_out: float | None
    exponent: float | None


class StageProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stage: str
    phase: str  # forward or backward; of a part of a stage also activation or weight
    measurements: list[Measurement]
    fit: Fit


class LinkProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Alpha-beta of the links: us and GB/s. ``all_reduce``: GB/s of gradients within a node.

    ``host``: GB/s at which all ranks of a node together send each other what lies in the host's memory.
    """

    latency: float
    intra: float
    inter_latency: float | None = None
    inter: float | None = None
    all_reduce: float | None = None
    host: float | None = None


class Synchronisation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of an iteration: the all-reduce of ``bytes`` of gradients over ``ranks``, and the optimizer's step."""

    stage: str
    ranks: int
    bytes: int
    reduce_ms: float
    step_ms: float


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An all-gather or a reduce-scatter of a layer of so many ``bytes``, whole, over ``ranks`` of one machine.
    Or a ``handoff`` of half of them from each of two ranks to the other.

    ``overlapped``: ms that compute takes longer while it runs beside it. None where that was not measured.
    """

    op: str
    ranks: int
    bytes: int
    ms: float
    overlapped: float | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    device: str
    stages: list[StageProfile]
    links: LinkProfile | None = None
    synchronisation: list[Synchronisation] = []
    collectives: list[Collective] = []
    sparsity: list[SparseProfile] = []
    version: int = 1
    dtype: str = ""  # of the trained stage's parameters; empty where it was not noted
    measured_at: str = ""  # date and time of the machine


def bad_profile_error(span: Span | None, profile: str, reason: str) -> UserError:
    return user_error(
        f"`{profile}` is not a profile: {reason}", help="make a new one with `arachnec profile`", span=span
    )


@dataclass(frozen=True)
class StageNotProfiled(Diagnostic):
    title = "the profile has no stage `{stage}`"
    help = "it has {known}; profile this model, or leave `profile` out to use the device's specs"
    stage: str
    known: str


def read_profile(path: str | Path) -> Profile:
    """Raises UserError where the file is missing, too large, or not a profile."""
    file = Path(path)
    if not file.is_file():
        from arachnec.cluster.device_specs import DEVICE_SPECS

        raise user_error(
            f"`{path}` is neither a profile file nor a known device",
            help=f"make a profile with `arachnec profile`, or name one of {', '.join(sorted(DEVICE_SPECS))}",
        )
    span = Span(str(path), 1, 1, 1, 2)
    if file.stat().st_size > LARGEST_PROFILE:
        raise bad_profile_error(span, str(path), f"larger than {LARGEST_PROFILE >> 20} MiB")
    try:
        profile = msgspec.json.decode(file.read_bytes(), type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_profile_error(span, str(path), str(error)) from error
    if problem := next(_problems(profile), None):
        raise bad_profile_error(span, str(path), problem)
    return profile


def _problems(profile: Profile) -> Iterator[str]:
    """What no measurement can have come to."""
    plain = msgspec.to_builtins(profile)
    if (value := next(_out_of_bounds(plain), None)) is not None:
        yield f"it has the number {str(value)[:24]}; the largest may be {LARGEST:g}"
        return
    for entry in profile.stages:
        where = f"stage `{entry.stage}`, {entry.phase}"
        for name, value in entry.fit.coefficients.items():
            if name not in _POWERS:
                yield f"{where}: there is no coefficient `{name}`, only {', '.join(_POWERS)}"
            if value > MOST_MS / 1e3 ** sum(power for symbol, power in _POWERS.get(name, ()) if symbol != "B"):
                yield f"{where}: the coefficient of {name} is {value:g}, of clips that never end"
            if value < 0:
                yield f"{where}: the coefficient of {name} is {value}, less than nothing"
        for run in entry.measurements:
            if min(run.batch, run.degree) < 1 or min(run.tokens, run.text, run.messages, run.moved) < 0:
                yield f"{where}: a measurement has sizes below nothing"
            if run.ms <= 0:
                yield f"{where}: a measurement took {run.ms} ms"
    for name, value in msgspec.structs.asdict(profile.links).items() if profile.links is not None else ():
        least, unit = (0.0, "us") if name.endswith("latency") else (SMALLEST, "GB/s")
        if value is not None and value < least:
            yield f"`{name}` of its links is {value} {unit}"
    for end in profile.synchronisation:
        if end.ranks < 1 or min(end.bytes, end.reduce_ms, end.step_ms) < 0:
            yield f"the synchronisation of `{end.stage}` has sizes or times below nothing"
    yield from (problem for problem in map(sparse_problem, profile.sparsity) if problem is not None)
    for row in profile.collectives:
        if row.op not in OVERLAPPED:
            yield f"there is no collective `{row.op}`, only {', '.join(OVERLAPPED)}"
        if max(row.ms, row.overlapped or 0.0) > MOST_MS:
            yield f"a measured {row.op} took more than {MOST_MS:g} ms"
        if row.ranks < 2 or min(row.bytes, row.ms) <= 0:
            yield f"a measured {row.op} has sizes or times below nothing"
        if row.overlapped is not None and row.overlapped < 0:
            yield f"compute beside a measured {row.op} is said to take {row.overlapped} ms longer"


def _out_of_bounds(value: object) -> Iterator[float]:
    """The numbers of a profile with which no cost can be computed."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _out_of_bounds(part)
    elif isinstance(value, int | float) and abs(value) > LARGEST:
        yield value


def write_profile(profile: Profile, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


_POWERS: dict[str, tuple[tuple[str, int], ...]] = {
    "B*S^2": (("B", 1), ("S", 2)),
    "B*S*T": (("B", 1), ("S", 1), ("T", 1)),
    "B*S": (("B", 1), ("S", 1)),
    "B*T": (("B", 1), ("T", 1)),
    "B": (("B", 1),),
    "1": (),
}


def fit_profile(
    measurements: Sequence[tuple[str, str, Sequence[Measurement]]],
    *,
    machine: str,
    device: str,
    links: LinkProfile | None = None,
    synchronisation: Sequence[Synchronisation] = (),
    collectives: Sequence[Collective] = (),
    sparsity: Sequence[SparseProfile] = (),
    dtype: str = "",
) -> Profile:
    """A profile of (stage, phase, measurements) triples, each fitted.

    ``links`` are those of plain messages, which stand for what no cascade on several ranks could tell. Raises
    ValueError for a triple without measurements or with a time that is not positive.
    """
    solved = [(stage, phase, list(runs), _solved(runs)) for stage, phase, runs in measurements]
    plain, links = links, fit_links([(runs, coefficients) for _, _, runs, coefficients in solved], links)
    if links is not None:
        host = links.host if plain is None else plain.host
        links = msgspec.structs.replace(links, all_reduce=fit_all_reduce(links, synchronisation), host=host)
    stages = [
        StageProfile(stage, phase, runs, _fit(runs, coefficients, links)) for stage, phase, runs, coefficients in solved
    ]
    others = list(synchronisation), list(collectives), list(sparsity)
    return Profile(machine, device, stages, links, *others, dtype=dtype)


def fit(measurements: Sequence[Measurement]) -> Fit:
    """Non-negative least squares on the relative error (each row divided by its measured time)."""
    return _fit(measurements, _solved(measurements), None)


def fit_links(
    solved: Sequence[tuple[Sequence[Measurement], dict[str, float]]], plain: LinkProfile | None = None
) -> LinkProfile | None:
    """Alpha and beta of what runs on several ranks took beyond their computing; ``plain`` without such runs.

    Messages of one size say nothing of alpha and beta apart: then beta is that of ``plain`` messages.
    """
    import numpy as np
    from scipy.optimize import nnls

    shared = [
        (run, run.ms - predict(coefficients, run))
        for runs, coefficients in solved
        for run in runs
        if run.messages and run.sizes is None  # what an encoder is slower by is its own: ``find_undivided``
    ]
    if not shared:
        return plain
    rows = np.array([[run.messages / run.ms, run.moved / run.ms] for run, _ in shared])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    took = np.array([max(0.0, excess) / run.ms for run, excess in shared])
    solution, _ = nnls(rows / scale, took)
    alpha, beta = (float(value) for value in solution / scale)  # ms a message, ms a byte
    unseen = beta <= 1e-6 / MOST_GBS  # not 0 to the bit on every processor
    if plain is not None and (unseen or np.linalg.matrix_rank(rows / scale, tol=ONE_SIZE) < 2):
        beta = 1e-6 / plain.intra
        alpha = float(nnls(rows[:, :1], np.maximum(0.0, took - rows[:, 1] * beta))[0][0])
    return LinkProfile(max(alpha * 1e3, LEAST_LATENCY), min(1e-6 / beta if beta > 0 else MOST_GBS, MOST_GBS))


def fit_all_reduce(links: LinkProfile, synchronisation: Sequence[Synchronisation]) -> float | None:
    """GB/s at which gradients are all-reduced, given the links' latency: a ring passes 2 (n-1)/n of the bytes."""
    speeds = []
    for end in synchronisation:
        waiting = 2 * math.ceil(math.log2(end.ranks)) * links.latency * 1e-3
        moving = end.reduce_ms - min(waiting, end.reduce_ms / 2)
        speeds.append(2 * (end.ranks - 1) / end.ranks * end.bytes / moving / 1e6)
    return min(speeds, default=None)


def fit_collective(profile: Profile, op: str) -> tuple[float, float] | None:
    """Latency in us of one of log2(n) steps, and GB/s of the (n-1)/n of its bytes that every rank passes on.

    From the smallest and the largest that were measured; None where they are of one size. An ``op`` of ``OVERLAPPED``
    stands for what compute beside the collective takes longer.
    """
    runs = [run for run in profile.collectives if run.op == op]
    for plain in (plain for plain, overlapped in OVERLAPPED.items() if overlapped == op):
        known = [(run, run.overlapped) for run in profile.collectives if run.op == plain]
        runs = [msgspec.structs.replace(run, ms=ms) for run, ms in known if ms is not None]
    runs.sort(key=lambda run: run.bytes)
    if not runs or runs[0].bytes == runs[-1].bytes:
        return None
    small, large = runs[0], runs[-1]
    latency = min(small.ms, large.ms)
    moved = (large.bytes - small.bytes) * (large.ranks - 1) / large.ranks
    speed = moved / max(large.ms - latency, 1e-6) / 1e6
    return latency / math.ceil(math.log2(small.ranks)) * 1e3, max(SMALLEST, min(speed, MOST_GBS))


def _solved(runs: Sequence[Measurement]) -> dict[str, float]:
    if not runs or min(run.ms for run in runs) <= 0:
        raise ValueError("a fit needs measurements with positive times")
    return _solve(_alone(runs))


def _alone(runs: Sequence[Measurement]) -> Sequence[Measurement]:
    """Those on one rank; where there are none, all."""
    return [run for run in runs if run.degree == 1] or runs


def _fit(runs: Sequence[Measurement], coefficients: dict[str, float], links: LinkProfile | None) -> Fit:
    residuals = [(predict(coefficients, run) + sent(run, links) - run.ms) / run.ms for run in runs]
    return Fit(coefficients, residuals, _held_out(_alone(runs)), _exponent(coefficients, runs))


def sent(run: Measurement, links: LinkProfile | None) -> float:
    """ms that the run's ranks sent to each other."""
    if links is None or not run.messages:
        return 0.0
    return run.messages * links.latency * 1e-3 + run.moved / links.intra * 1e-6


def predict(coefficients: dict[str, float], run: Measurement) -> float:
    """ms of one run's computing, by a fit's coefficients."""
    return math.fsum(value * _basis(name, run) for name, value in coefficients.items())


def _basis(name: str, run: Measurement) -> float:
    sizes = {"B": run.batch, "S": run.tokens, "T": run.text}
    value = math.prod(float(sizes[symbol]) ** power for symbol, power in _POWERS[name])
    return value / run.degree if "S" in name else value


def _solve(measurements: Sequence[Measurement]) -> dict[str, float]:
    import numpy as np
    from scipy.optimize import nnls

    names = _terms_of(measurements)
    rows = np.array([[_basis(name, run) for name in names] for run in measurements])
    rows /= np.array([run.ms for run in measurements])[:, None]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(rows / scale, np.ones(len(measurements)))
    return {name: float(value / size) for name, value, size in zip(names, solution, scale, strict=True) if value > 0}


def _terms_of(measurements: Sequence[Measurement]) -> list[str]:
    """Of an encoder without those that its measurements say it does not depend on: these would only fit noise."""
    sizes = [run.sizes for run in measurements]
    text = any(names is None or "text" in names for names in sizes)
    tokens = any(names is None or names.keys() - {"text"} for names in sizes)
    return [name for name in _POWERS if (text or "T" not in name) and (tokens or "S" not in name)]


def _held_out(measurements: Sequence[Measurement]) -> float | None:
    if len(measurements) < 3:
        return None
    errors = []
    for index, run in enumerate(measurements):
        others = [*measurements[:index], *measurements[index + 1 :]]
        errors.append(abs(predict(_solve(others), run) - run.ms) / run.ms)
    return math.fsum(errors) / len(errors)


def _exponent(coefficients: dict[str, float], measurements: Sequence[Measurement]) -> float | None:
    lengths = sorted({(run.tokens, run.text) for run in measurements})
    (short, short_text), (long, long_text) = lengths[0], lengths[-1]
    varying = {name: value for name, value in coefficients.items() if name not in ("B", "1")}
    curve = formula_of(varying)
    low, high = curve(B=1, S=short, T=short_text), curve(B=1, S=long, T=long_text)
    if short == long or low <= 0 or high <= 0 or not any("S" in name for name in varying):
        return None
    return math.log(high / low) / math.log(long / short)


def formula_of(coefficients: dict[str, float]) -> Formula:
    """The ms formula of a fit, as a stage carries it."""
    terms = tuple(Term(coefficients[name], _POWERS[name]) for name in _POWERS if name in coefficients)
    return Formula(terms or (Term(0.0),), "ms")


def only_length(entry: StageProfile) -> int | None:
    """S of all measurements of a stage, where it is the same: what other lengths take the profile cannot know."""
    lengths = {run.tokens for run in entry.measurements}
    return lengths.pop() if len(lengths) == 1 else None


def find_fit(profile: Profile, stage: str, phase: str) -> Fit | None:
    return next((entry.fit for entry in profile.stages if entry.stage == stage and entry.phase == phase), None)


def find_steps(profile: Profile, stage: str) -> tuple[Measurement, ...]:
    """The forwards of a stage that were measured."""
    entries = (entry for entry in profile.stages if (entry.stage, entry.phase) == (stage, "forward"))
    return tuple(run for entry in entries for run in entry.measurements)


def find_clip_time(profile: Profile, stage: str, sizes: Mapping[str, int]) -> float | None:
    """ms of an encoder for one clip with these sizes, alone on one rank: the mean of the measurements of clips equal in
    all that decides its time. None where there are none."""
    times = [
        run.ms
        for entry in profile.stages
        if entry.stage == stage
        for run in entry.measurements
        if run.sizes is not None and (run.batch, run.degree) == (1, 1) and run.sizes.items() <= sizes.items()
    ]
    return math.fsum(times) / len(times) if times else None


def find_undivided(profile: Profile, stage: str) -> float | None:
    """The part of an encoder's time on one rank that it takes on several, too, beyond what they send to each other.

    The mean over clips that were measured both ways; None where there are none.
    """
    parts = [
        ((run.ms - sent(run, profile.links)) / alone - 1 / run.degree) / (1 - 1 / run.degree)
        for entry in profile.stages
        if entry.stage == stage
        for run in entry.measurements
        if run.sizes is not None and run.degree > 1
        if (alone := find_clip_time(profile, stage, run.sizes)) is not None
    ]
    return min(1.0, max(0.0, math.fsum(parts) / len(parts))) if parts else None


def find_synchronisation(profile: Profile, stage: str) -> Synchronisation | None:
    return next((entry for entry in profile.synchronisation if entry.stage == stage), None)


def exponent_of(profile: Profile, stage: str) -> float | None:
    """The p of ``dual`` that this profile says for a stage, its phases taken together.

    None where the stage was profiled at one length. Raises UserError where it was not profiled.
    """
    fits = [entry.fit for entry in profile.stages if entry.stage == stage]
    if not fits:
        profiled = ", ".join(sorted({f"`{entry.stage}`" for entry in profile.stages})) or "none"
        raise UserError(StageNotProfiled(None, stage, profiled))
    exponents = [fit.exponent for fit in fits if fit.exponent is not None]
    if not exponents:
        return None
    return min(2.0, max(1.0, math.fsum(exponents) / len(exponents)))
