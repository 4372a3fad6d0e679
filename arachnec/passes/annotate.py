"""Costs for every stage: fitted from a profile, or derived from FLOPs and a device's specs.

From device specs, one forward takes the stage's TFLOP over the cluster's sustained TFLOP/s and a constant per block;
a backward takes twice that (two matrix products for each one of forward).

An encoder's time is no formula of sizes: its cascades carry what one of their clips takes, where a profile has it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from arachnec.cluster.device_specs import block_overhead_of, find_device_specs
from arachnec.cluster.topology import has_gpus
from arachnec.cost.profile import (
    BATCH,
    FIRST,
    GATHER,
    LAST,
    OVERLAPPED,
    PHASES,
    SCATTER,
    Profile,
    StageNotProfiled,
    find_clip_time,
    find_fit,
    find_steps,
    find_synchronisation,
    find_undivided,
    fit_collective,
    formula_of,
    read_profile,
)
from arachnec.cost.sparse_attention import with_sparse_layers
from arachnec.cost.sparse_profile import with_measured_sparsity
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Stage, integer, quantity
from arachnec.ir.sampling import CODING, models_of
from arachnec.ir.stage_sizes import blocks_run, crowding, element_bytes, formula_in
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value, formula_sum
from arachnec.passes.infra.base import Pass

BACKWARD = 2.0  # backward over forward
_OPTIONS = {"f32": "fp32", "bf16": "bf16"}  # precisions, as users write them


@dataclass(frozen=True)
class Annotate(Pass):
    """Gives every stage its ``forward`` and ``backward`` time as formulas in B, S and T.

    Encoders' cascades of clips that the profile measured get their time ``per_clip``. Of a stage with densities every
    cascade says which of its layers run ``sparse``: those that are faster so, by these times and the clip's length.

    ``profile`` is a file made by ``arachnec profile`` or the name of a known device. By default
    the specs of the cluster's device are taken, with the cluster's own ``flops``.
    """

    needs: ClassVar[Level] = Level.PARTITIONED
    gives: ClassVar[Level] = Level.COSTED

    profile: str | None = None

    def run(self, module: Module) -> Module:
        if module.cluster is None:
            raise user_error(
                "the module has no cluster, so nothing can be costed",
                help="add a `cluster` to the module, or compile with `--cluster`",
            )
        specs = find_device_specs(self.profile) if self.profile and not Path(self.profile).is_file() else None
        if specs is not None:
            flops, overhead = specs.sustained, specs.block_overhead
        else:
            flops = quantity(module.cluster.attrs["flops"])
            overhead = block_overhead_of(module.cluster)
        profile = read_profile(self.profile) if self.profile and specs is None else None
        source = profile_source(Path(self.profile or ""), profile) if profile is not None else ""
        if profile is not None:
            demand_precision(module, profile)
        stages, models = [], models_of(module)
        for stage in module.stages:
            part = part_from_profile(stage, profile, module.cluster) if profile is not None else None
            if part is not None:
                stages.append(replace(part, attrs=part.attrs.updated(costs=source)))
            elif profile is not None and _is_measured(stage, profile, models):
                measured = from_profile(stage, profile, module.cluster)
                stages.append(replace(measured, attrs=measured.attrs.updated(costs=source)))
            else:
                stages.append(from_device_specs(stage, flops, overhead))
        if profile is not None:
            crowd = crowding(module.cluster)
            stages = [with_timed_steps(s, profile, crowd) if s.name in models else s for s in stages]
            stages = [with_measured_sparsity(stage, profile.sparsity, crowd) for stage in stages]
        cluster = with_measured_links(module.cluster, profile) if profile else module.cluster
        cascades = with_sparse_layers(with_measured_clips(module, profile), stages)
        return replace(module, level=Level.COSTED, cluster=cluster, stages=tuple(stages), cascades=cascades)


def _is_measured(stage: Stage, profile: Profile, models: Collection[str]) -> bool:
    """Whether its times are the profile's, or nothing's: a whole model that it does not know is another's profile."""
    whole = (stage.trained or stage.name in models) and "part_of" not in stage.attrs
    return whole or find_fit(profile, stage.name, "forward") is not None


def demand_precision(module: Module, profile: Profile) -> None:
    """Raises UserError, at the stage, where a trained stage computes in another precision than was measured: on a GPU
    times differ several times over."""
    for stage in module.stages:
        computed = str(stage.attrs.get("dtype", profile.dtype))
        if stage.trained and profile.dtype and computed != profile.dtype:
            measured, wanted = (_OPTIONS.get(dtype, dtype) for dtype in (profile.dtype, computed))
            option = wanted if wanted in _OPTIONS.values() else "fp32"
            raise user_error(
                f"the profile was measured in {measured}, and stage `@{stage.name}` computes in {wanted}",
                help=(
                    f"make one with `arachnec profile --dtype {option}`, or leave `profile` out to use the device's "
                    "specs"
                ),
                span=stage.span,
            )


def profile_source(path: Path, profile: Profile) -> str:
    """``profile profile.json of 2026-03-01 12:30``: the file's name, and when it was measured where it says so."""
    when = profile.measured_at[:32]
    return f"profile {path.name}" + (f" of {when}" if when else "")


def from_device_specs(stage: Stage, flops: float, overhead: float) -> Stage:
    """``flops`` are the device's sustained TFLOP/s, ``overhead`` ms for each block; raises UserError without FLOPs."""
    work = formula_in(stage, "flops")
    if work is None:
        raise user_error(
            f"stage `@{stage.name}` has neither `flops` nor an entry in a profile",
            label="what it takes is unknown",
            help="give the stage a `flops` formula, or profile it",
            span=stage.span,
        )
    forward = _scaled(work, 1e3 / flops, overhead * max(1, blocks_run(stage)))
    backward = _scaled(forward, BACKWARD, 0.0) if stage.trained else None
    return _with(stage, forward=forward, backward=backward, costs="device specs")


def from_profile(stage: Stage, profile: Profile, cluster: Cluster) -> Stage:
    """A plan's times are for nodes whose ranks all compute. Raises UserError where a trained stage's backward was not
    measured."""
    forward = find_fit(profile, stage.name, "forward")
    backward = find_fit(profile, stage.name, "backward")
    if forward is None or (stage.trained and backward is None):
        profiled = ", ".join(f"`{entry.stage}` {entry.phase}" for entry in profile.stages)
        raise UserError(StageNotProfiled(stage.span, stage.name, profiled))
    crowd = crowding(cluster)
    end = find_synchronisation(profile, stage.name) if stage.trained else None
    if end is not None:
        stage = replace(stage, attrs=stage.attrs.updated(update=Quantity(end.step_ms * crowd, "ms")))
    undivided = find_undivided(profile, stage.name) if "divides" in stage.attrs else None
    if undivided is not None:
        stage = replace(stage, attrs=stage.attrs.updated(undivided=round(undivided, 6)))
    return _with(
        stage,
        forward=_scaled(formula_of(forward.coefficients), crowd, 0.0),
        backward=_scaled(formula_of(backward.coefficients), crowd, 0.0) if stage.trained and backward else None,
        costs="profile",
    )


def part_from_profile(stage: Stage, profile: Profile, cluster: Cluster) -> Stage | None:
    """A run of blocks, by what was measured of a block of each class and of what lies before and behind the blocks.

    On CPU ranks a forward has the time of its batch as well: another thread makes it, with the core that computes.
    None for a stage that is no part of another, or where its blocks were not measured.
    """
    whole = stage.attrs.get("part_of")
    if not isinstance(whole, str):
        return None
    counts = {FIRST: int(stage.name == f"{whole}_0"), LAST: int("output" not in stage.attrs)}
    counts[BATCH] = int(not has_gpus(cluster))
    blocks = stage.attrs["blocks"]
    assert isinstance(blocks, tuple)
    counts |= {_name(pair[0]): integer(pair[1]) for pair in blocks if isinstance(pair, tuple)}
    fits = {(part, phase): find_fit(profile, f"{whole}/{part}", phase) for part in counts for phase in PHASES}
    if any(fits[part, "forward"] is None for part in counts if part not in (FIRST, LAST, BATCH)):
        return None
    crowd = crowding(cluster)

    def time(phase: str) -> Formula | None:
        known = [(count, fit) for part, count in counts.items() if count and (fit := fits[part, phase]) is not None]
        if not known or (phase != "forward" and not stage.trained):
            return None
        return _scaled(formula_sum([(n, formula_of(fit.coefficients)) for n, fit in known], "ms"), crowd, 0.0)

    end = find_synchronisation(profile, whole)
    if end is not None and stage.trained:
        share = integer(stage.attrs["params"]) * element_bytes(stage) / max(1, end.bytes)
        stage = replace(stage, attrs=stage.attrs.updated(update=Quantity(end.step_ms * share * crowd, "ms")))
    stage = replace(stage, attrs=stage.attrs.updated(activation=time("activation"), weight=time("weight")))
    return _with(
        stage, forward=time("forward") or Formula((Term(0.0),), "ms"), backward=time("backward"), costs="profile"
    )


def _name(symbol: Value) -> str:
    assert isinstance(symbol, Symbol)
    return symbol.name


def with_measured_clips(module: Module, profile: Profile | None) -> tuple[Cascade, ...]:
    """The cascades; an encoder's whose clips all take one measured time have it as ``per_clip``, the others have none.

    Like the stages' times it is for nodes whose ranks all compute.
    """
    clips = {
        clip.id: {"frames": clip.frames, "height": clip.height, "width": clip.width, "text": clip.text}
        for clip in module.clips
    }
    crowd = crowding(module.cluster) if module.cluster else 1.0
    cascades = []
    for cascade in module.cascades:
        times: set[float | None] = set()
        if profile is not None and cascade.phase in CODING:
            times = {find_clip_time(profile, cascade.stage, clips[number]) for number in cascade.clips}
        ms = times.pop() if len(times) == 1 else None
        cascades.append(cascade.with_attrs(per_clip=None if ms is None else Quantity(ms * crowd, "ms")))
    return tuple(cascades)


def with_timed_steps(stage: Stage, profile: Profile, crowd: float) -> Stage:
    """A model that samples, with the steps that were measured: what batches of predictions take is no formula."""
    runs = find_steps(profile, stage.name)
    rows = tuple((run.degree, run.batch, run.tokens, run.text, Quantity(run.ms * crowd, "ms")) for run in runs)
    return replace(stage, attrs=stage.attrs.updated(timed=rows or None))


def with_measured_links(cluster: Cluster, profile: Profile) -> Cluster:
    """Ranks that share cores share what moves their messages, too."""
    links, crowd = profile.links, crowding(cluster)
    if links is None:
        return cluster
    measured: dict[str, Value | None] = {
        "intra": Quantity(links.intra / crowd, "GB/s"),
        "latency": Quantity(links.latency * crowd, "us"),
    }
    if links.all_reduce is not None:
        measured["all_reduce"] = Quantity(links.all_reduce, "GB/s")
    names = (GATHER, SCATTER, *OVERLAPPED.values())
    fitted = [(op, fit) for op in names if (fit := fit_collective(profile, op)) is not None]
    if fitted:
        measured["collectives"] = tuple(
            (op, Quantity(latency, "us"), Quantity(speed, "GB/s")) for op, (latency, speed) in fitted
        )
    if links.host is not None and cluster.nodes == 1:  # one machine's memory says nothing of a network
        measured["host_link"] = Quantity(links.host, "GB/s")
    if links.inter is not None:
        measured["inter"] = Quantity(links.inter, "GB/s")
    if links.inter_latency is not None:
        measured["inter_latency"] = Quantity(links.inter_latency, "us")
    return replace(cluster, attrs=cluster.attrs.updated(**measured))


def _scaled(formula: Formula, factor: float, constant: float) -> Formula:
    terms = [Term(term.coefficient * factor, term.powers) for term in formula.terms if term.powers]
    total = formula.constant * factor + constant
    return Formula((*terms, Term(total)) if total or not terms else tuple(terms), "ms")


def _with(stage: Stage, *, forward: Formula, backward: Formula | None, costs: str) -> Stage:
    attrs: Attributes = stage.attrs.updated(forward=forward, backward=backward, costs=costs)
    return replace(stage, attrs=attrs)
