"""What stages, gradient all-reduces and this machine's links take, measured on as many ranks as training uses.

All measurements take turns, one of each a round, so that a machine whose speed drifts slows all of them alike; a
measurement is the median over the rounds. ``profiling.in_turns`` takes the most telling first, in a budget of seconds.
Ranks measure at the same time, as many as have a core of their own, so that what they take from each other is in the
numbers. One rank of ``arachnec profile``:
``python -m arachnec.profiling.profiler MODEL DATA DEVICE AT_ONCE OUTPUT SECONDS DTYPE COLUMNS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import batch_loss, batch_of, encode, in_training_precision, trained_parameters
from arachnec.backends.torch_distributed.reporting.events import emit
from arachnec.backends.torch_distributed.reporting.report import Note
from arachnec.backends.torch_distributed.weights.encoder_setup import DividedEncoders
from arachnec.backends.torch_distributed.weights.shared_weights import shared_encoders, shared_model
from arachnec.cost.communication import encoder_volumes, volumes
from arachnec.cost.profile import BATCH, Measurement, Synchronisation
from arachnec.cost.sparse_profile import AttentionTime
from arachnec.cost.strategy import Attention
from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_beforehand
from arachnec.data.manifest import read_manifest
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cascade, Instruction, Phase, Stage, integers
from arachnec.ir.stage_sizes import count_in, layers_of, token_bytes
from arachnec.ir.tables import FIGURES
from arachnec.ir.values import Formula, Symbol
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split
from arachnec.kernels.attention.subgroups import subgroups
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.lowering.programs import head_size
from arachnec.model_state.gradients import GradientSynchronisation
from arachnec.model_state.kept_gradients import drop_gradients
from arachnec.model_state.optimizer import Optimizer
from arachnec.models.caption_tokens import CaptionCounter
from arachnec.models.encoders import running_encoders
from arachnec.models.file import ModelFile, load_model_file
from arachnec.profiling.in_turns import (
    Budget,
    Point,
    Turn,
    choose_points,
    deciding_sizes,
    in_turns,
    more_points,
    sizes_of,
    spread,
)
from arachnec.profiling.layer_collectives import Call, LayerCollectives, largest_block
from arachnec.profiling.links import HandoffTimes, measure_links, now
from arachnec.profiling.local import Measured
from arachnec.profiling.parts import Layers, timed_parts
from arachnec.profiling.sparse_kernels import measure_sparse, sparse_grids
from arachnec.runtime.agreement import gather, share_text
from arachnec.sparsity.clip_grid import token_grid
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.spatial.peers import Group
from arachnec.tracing.cost import dtype_of
from arachnec.tracing.graph import dtype_name
from arachnec.tracing.sample import meta_encoders

TRAINED = "dit"
TRAINING = Training(lr=0.0)  # the step takes its time and changes nothing
SHARED_SHAPES = 4  # clip shapes measured on several ranks
DIVIDED_SHAPES = 2  # of an encoder


@dataclass(frozen=True)
class Job:
    """One measurement: ``run`` gives the ms of each phase. Only ``ranks`` take part, in groups of ``degree``."""

    stage: str
    phases: tuple[str, ...]
    ranks: int  # the first so many
    run: Callable[[], tuple[float, ...]]
    point: Point | None = None
    degree: int = 1

    @property
    def doing(self) -> str:
        phases = " and ".join(dict.fromkeys(phase.rpartition(":")[2] for phase in self.phases))
        if self.point is None:
            return f"{self.stage}, {phases}"
        clips = f"{len(self.point.clips)} x {self.point.tokens} tokens"
        return f"{self.stage}, {phases} of {clips}" + (f" on {self.degree} ranks" if self.degree > 1 else "")


class _Traced(msgspec.Struct, frozen=True):
    """What rank 0 tells the others: S of every clip, path and class of every block, and which encoders are divided."""

    tokens: list[int]
    layers: tuple[tuple[str, str], ...]
    divided: list[str]  # encoders that can share a clip
    heads: int  # of the model's attention, 0 where that is not known
    head_size: int


@dataclass
class Profiler:
    """Measures a model on all ranks of the default group; every method is collective.

    ``at_once`` ranks have a core, or a device, each.
    """

    model_file: ModelFile
    clips: Sequence[VideoClip]
    device: torch.device
    at_once: int
    encoders: dict[str, nn.Module] = field(init=False)
    model: nn.Module = field(init=False)
    parameters: dict[str, Tensor] = field(init=False)
    sequence: SequenceModel | None = field(init=False)  # the same model with blocks that can be shared
    optimizer: Optimizer = field(init=False)
    tokens: list[int] = field(init=False)  # S of every clip
    jobs: list[Job] = field(init=False, default_factory=list)
    _deciding: dict[str, tuple[str, ...]] = field(init=False)  # the sizes of a clip that decide an encoder's time
    _further: int = field(init=False)  # the last so many jobs are more of the encoders, where the budget allows
    _layers: Layers | None = field(init=False)  # None where the model cannot be cut into stages
    _encodings: dict[str | int, dict[str, Tensor]] = field(init=False, default_factory=dict)  # of clips to train on
    _stages: Mapping[str, Stage] = field(init=False, default_factory=dict)  # on rank 0 only
    _beside: list[LayerCollectives | HandoffTimes] = field(init=False)  # of a model with blocks
    _divided: list[str] = field(init=False)  # encoders of which several ranks can run one clip
    _heads: tuple[int, int] = field(init=False)  # of the model's attention, and their size; 0 where not known
    _together: DividedEncoders = field(init=False, default_factory=DividedEncoders)
    _groups: ProcessGroups = field(init=False, default_factory=ProcessGroups)
    _times: list[list[tuple[float, ...]]] = field(init=False)  # of each job

    def __post_init__(self) -> None:
        self.tokens = tokens = self._trace()
        points = choose_points(self.clips, tokens)
        running = meta_encoders(self.model_file).keys() - encoded_beforehand(self.clips)
        self.encoders = shared_encoders(running_encoders(self.model_file, running), TRAINING, self.device)
        self._deciding = {name: deciding_sizes(encoder, self.clips) for name, encoder in self.encoders.items()}
        self.model = shared_model(self.model_file, TRAINING, self.device)
        self.parameters = trained_parameters(self.model)
        self._beside = self._beside_blocks()
        alone = self.at_once < 2
        self.sequence = None if alone else shared_blocks(self.model, self.model_file, self.clips)
        self.jobs += [self._encoder_job(name, point) for name in self.encoders for point in points]
        further = [
            self._encoder_job(name, point)
            for name in self.encoders
            for point in more_points(self.clips, tokens, self._deciding[name], points)
        ]
        # the longest first: what they take matters most to a plan
        further.sort(key=lambda job: job.point.tokens if job.point else 0, reverse=True)
        for point in points:  # a micro-batch's parts right behind the whole of it, as pipelines run equal ones in a row
            self.jobs += self._whole_jobs(point)
        if self.sequence is not None:
            self.jobs += self._shared_jobs(points, self.sequence)
        self.jobs += self._divided_jobs(points)
        self.jobs += self._last_jobs()
        self.jobs += further
        self._further = len(further)
        self.forget()

    def measure(
        self,
        budget: Budget,
        reporter: Reporter = unreported,
        keep: Callable[[Measured], None] = lambda measured: None,
    ) -> Measured:
        """What the budget allows; ``keep`` is given what was found so far, without the links, again and again."""
        first_extra = len(self.jobs) - self._further
        turns = [
            Turn((job.stage, job.phases, job.degree), job.point, job.doing, number >= first_extra)
            for number, job in enumerate(self.jobs)
        ]

        def so_far(times: list[list[tuple[float, ...]]]) -> None:
            self._times = times
            keep(self.measured(links=False))

        drop_gradients(self.parameters)
        self._times = in_turns(turns, lambda index: self._run(self.jobs[index]), budget, reporter, so_far)
        return self.measured()

    def attention(self) -> tuple[int, list[AttentionTime]]:
        """The size of a head, and what heads take dense and over chosen keys, on clips like the longest; on all ranks
        that have a core at a time. Nothing for clips too short for it."""
        heads, size = self._heads
        clip, tokens = max(zip(self.clips, self.tokens, strict=True), key=lambda row: row[1])
        grid = token_grid(tokens, clip.frames, clip.height, clip.width)
        dtype = next(iter(self.parameters.values())).dtype
        rows: list[AttentionTime] = []
        for part in sparse_grids(grid, self.device) if size else ():
            dist.barrier()
            if dist.get_rank() < self.at_once:
                rows += measure_sparse(part, heads, size, dtype, self.device)
        return size, rows

    def round(self) -> None:
        """Measure everything once, but for the further jobs."""
        drop_gradients(self.parameters)
        for job, times in zip(self.jobs[: len(self.jobs) - self._further], self._times, strict=False):
            times.append(self._run(job))

    def _run(self, job: Job) -> tuple[float, ...]:
        """ms of each phase; zeros on ranks that take no part."""
        dist.barrier()
        return job.run() if dist.get_rank() < job.ranks else (0.0,) * len(job.phases)

    def forget(self) -> None:
        """Leave out the rounds so far, which warmed up."""
        self._times = [[] for _ in self.jobs]

    def measured(self, *, links: bool = True) -> Measured:
        """The median over the rounds so far of each job's mean over its ranks; nothing of a job that was not run."""
        measurements: dict[tuple[str, str], list[Measurement]] = {}
        ends: dict[str, float] = {}
        for job, times in of_all_ranks(self.jobs, self._times):
            means = times.mean(0)  # rounds, phases
            for phase, ms in zip(job.phases, means.quantile(0.5, dim=0).tolist(), strict=True):
                if job.point is None:
                    ends[phase] = ms
                elif ms > 0:  # no time: a part that has nothing to do
                    part, _, phase = phase.rpartition(":")
                    stage = f"{job.stage}/{part}" if part else job.stage
                    measurements.setdefault((stage, phase), []).append(self._measurement(job, phase, ms))
        size = sum(value.numel() * value.element_size() for value in self.parameters.values())
        world = dist.get_world_size()
        end = Synchronisation(TRAINED, world, size, ends.get("reduce", 0.0), ends["step"])
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        measured_links = measure_links(self.device) if world > 1 and links else None
        collectives = [row for moving in self._beside for row in moving.measurements(ends)]
        stages = [(*key, rows) for key, rows in measurements.items()]
        return Measured(name, stages, measured_links, [end], collectives, dtype=dtype_name(dtype_of(self.model)))

    def _trace(self) -> list[int]:
        """S of every clip; traced on rank 0, since the ranks share the machine's cores."""
        text = None
        if dist.get_rank() == 0:
            from arachnec.passes.trace import trace_model

            traced = trace_model(self.model_file, self.clips)
            self._stages = {stage.name: stage for stage in traced.stages}
            tokens = [traced.tokens(clip) for clip in self.clips]
            divided = [stage.name for stage in traced.stages if "divides" in stage.attrs]
            layers, size = _layers(self._stages[TRAINED]), head_size(self._stages[TRAINED]) or 0
            heads = count_in(self._stages[TRAINED], "heads") if size else 0
            text = msgspec.json.encode(_Traced(tokens, layers, divided, heads, size)).decode()
        facts = msgspec.json.decode(share_text(text), type=_Traced)
        self._layers = Layers(facts.layers) if facts.layers else None
        self._divided, self._heads = facts.divided, (facts.heads, facts.head_size)
        return facts.tokens

    def _encoder_job(self, name: str, point: Point) -> Job:
        run = partial(self._timed, partial(encode, self.encoders[name], point.clips, self.device))
        return Job(name, ("forward",), self.at_once, run, point)

    def _whole_jobs(self, point: Point) -> Iterator[Job]:
        """A micro-batch on one rank, and its parts where the model can be cut."""
        yield Job(TRAINED, ("forward", "backward"), self.at_once, partial(self._train, point, None), point)
        if self._layers is not None:
            phases = (f"{BATCH}:forward", *self._layers.phases)
            yield Job(TRAINED, phases, self.at_once, partial(self._parts, point, self._layers), point)

    def _divided_jobs(self, points: Sequence[Point]) -> Iterator[Job]:
        """One clip's encoder on all ranks that have a core each."""
        ranks = tuple(range(self.at_once))
        if len(ranks) < 2 or not self._divided:
            return
        self._groups.ensure([ranks])
        for name in self._divided:
            for point in spread([point for point in points if len(point.clips) == 1], DIVIDED_SHAPES):
                run = partial(self._timed, partial(self._encode_together, name, point, ranks))
                yield Job(name, ("forward",), len(ranks), run, point, len(ranks))

    def _encode_together(self, name: str, point: Point, ranks: tuple[int, ...]) -> None:
        encoder = self.encoders[name]
        load = encoder.load
        assert callable(load)
        peers = Group(ranks, dist.get_rank(), self._groups.get(ranks))
        self._together.encode(self.model_file, name, encoder, load(point.clips[0], self.device), peers)

    def _shared_jobs(self, points: Sequence[Point], sequence: SequenceModel) -> Iterator[Job]:
        """Cascades on 2, 4, ... ranks, side by side."""
        for degree, count, groups, mine in side_by_side(self.at_once):
            self._groups.ensure(group for ranks in groups for group in subgroups(ranks, degree, 1))
            for point in spread([point for point in points if len(point.clips) == 1], SHARED_SHAPES):
                shard = self._groups.shard(mine, even_split(point.tokens, degree), degree, 1) if mine else None
                run = partial(self._train, point, shard, sequence)
                yield Job(TRAINED, ("forward", "backward"), count, run, point, degree)

    def _last_jobs(self) -> Iterator[Job]:
        """The all-reduce of the gradients over all ranks, and the step; gradients are there from the jobs before."""
        world = dist.get_world_size()
        if world > 1:
            self._groups.ensure([tuple(range(world))])
            everyone = tuple(range(world))
            yield Job(TRAINED, ("reduce",), world, partial(self._timed, partial(self._reduce, everyone)))
            for moving in self._beside:
                yield Job(TRAINED, moving.phases, world, moving.run)
        self.optimizer = Optimizer(self.parameters, TRAINING)
        yield Job(TRAINED, ("step",), self.at_once, partial(self._timed, self.optimizer.step))

    def _beside_blocks(self) -> list[LayerCollectives | HandoffTimes]:
        """What moves beside blocks. Their copies are of blocks that nothing was put into yet."""
        paths = [path for path, _ in self._layers.classes] if self._layers is not None else []
        block, everyone = largest_block(self.model, paths), tuple(range(dist.get_world_size()))
        if block is None or len(everyone) < 2:
            return []
        self._groups.ensure([everyone])
        group, tick = self._groups.get(everyone), partial(now, self.device)
        assert group is not None, "this rank is one of all"
        by_size = sorted(zip(self.clips, self.tokens, strict=True), key=lambda row: row[1])
        short, middle = (
            Call.of(block, partial(self._train, Point((clip,), tokens), None))
            for clip, tokens in (by_size[0], by_size[len(by_size) // 2])
        )
        return [
            LayerCollectives.of(block, middle, group, tick),
            HandoffTimes.of(block, short, self.device, tick),
        ]

    def _train(
        self, point: Point, shard: SequenceShard | None, sequence: SequenceModel | None = None
    ) -> tuple[float, ...]:
        encoded, on_cpu = self._encoded(point), self.device.type == "cpu"
        with sequence.use(shard) if sequence else nullcontext():
            started = now(self.device)
            batch = batch_of(self.model_file, point.clips, encoded, TRAINING, 0, self.device)
            if not on_cpu:  # a thread beside makes it, which takes no time of the device's
                started = now(self.device)
            loss = batch_loss(self.model, self.model_file, *batch)
            middle = now(self.device)
            loss.backward()  # type: ignore[no-untyped-call]
            return (middle - started) * 1e3, (now(self.device) - middle) * 1e3

    def _parts(self, point: Point, layers: Layers) -> tuple[float, ...]:
        encoded = self._encoded(point)
        started = now(self.device)
        kwargs, target = batch_of(self.model_file, point.clips, encoded, TRAINING, 0, self.device)
        batch = (now(self.device) - started) * 1e3
        loss = partial(batch_loss, self.model, self.model_file, kwargs, target)
        return batch, *timed_parts(self.model, layers, loss, partial(now, self.device))

    def _encoded(self, point: Point) -> dict[str, Tensor]:
        first = point.clips[0]
        if first.id not in self._encodings:
            self._encodings[first.id] = {n: encode(e, [first], self.device) for n, e in self.encoders.items()}
        return {name: torch.cat([value] * len(point.clips)) for name, value in self._encodings[first.id].items()}

    def _timed(self, work: Callable[[], object]) -> tuple[float, ...]:
        """ms of this work."""
        started = now(self.device)
        work()
        return ((now(self.device) - started) * 1e3,)

    def _reduce(self, everyone: tuple[int, ...]) -> None:
        reducer = GradientSynchronisation(self.parameters, {}, self._groups)
        reducer.start(Instruction("reduce", TRAINED, everyone))
        reducer.wait()

    def _measurement(self, job: Job, phase: str, ms: float) -> Measurement:
        assert job.point is not None
        batch, tokens, text = len(job.point.clips), job.point.tokens, job.point.clips[0].text_tokens
        if job.stage in self._deciding:
            sizes = sizes_of(job.point.clips[0], self._deciding[job.stage])
            if job.degree == 1 or not self._stages:
                return Measurement(batch, tokens, text, job.degree, ms, sizes=sizes)
            clip = Cascade("0", Phase.ENCODE, job.stage, (), batch, tokens, text)
            sent = encoder_volumes(clip, self._stages[job.stage], Attention(job.degree, 1))
            return Measurement(batch, tokens, text, job.degree, ms, sent.messages, sent.moved, sizes)
        return shared_measurement(self._stages.get(job.stage), phase, batch, tokens, text, job.degree, ms)


def shared_blocks(model: nn.Module, source: ModelFile, clips: Sequence[VideoClip]) -> SequenceModel | None:
    """The model with blocks that ranks can share; None where they cannot."""
    from arachnec.tracing.blocks import capture_blocks
    from arachnec.tracing.sample import example_calls

    try:
        return install(model, capture_blocks(model, example_calls(model, source, clips), verify=False))
    except UserError:
        return None


def side_by_side(ranks: int) -> Iterator[tuple[int, int, list[tuple[int, ...]], tuple[int, ...] | None]]:
    """Degrees of 2, 4, ... up to so many ranks: each with how many ranks take part, their groups, and this rank's."""
    for degree in (2**i for i in range(1, ranks.bit_length())):
        count, rank = ranks // degree * degree, dist.get_rank()
        groups = [tuple(range(first, first + degree)) for first in range(0, count, degree)]
        yield degree, count, groups, groups[rank // degree] if rank < count else None


def of_all_ranks(jobs: Sequence[Job], times: Sequence[Sequence[tuple[float, ...]]]) -> list[tuple[Job, Tensor]]:
    """What the ranks of each job that was run measured: [ranks, rounds, numbers of a round]. Collective."""
    run = [(job, torch.tensor(rows, dtype=torch.float64)) for job, rows in zip(jobs, times, strict=True) if rows]
    flat = torch.cat([rows.flatten() for _, rows in run])
    everyone = torch.split(torch.stack(gather(flat)), [rows.numel() for _, rows in run], dim=1)
    pairs = zip(run, everyone, strict=True)
    return [(job, torch.unflatten(told, 1, rows.shape)[: job.ranks]) for (job, rows), told in pairs]


def shared_measurement(
    stage: Stage | None, phase: str, batch: int, tokens: int, text: int, degree: int, ms: float, ring: int = 1
) -> Measurement:
    """A forward or backward of a traced stage, with what its ranks sent each other; without the stage that is left
    out."""
    if degree == 1 or stage is None:
        return Measurement(batch, tokens, text, degree, ms)
    attrs = stage.attrs
    heads, attentions, traffic = attrs.get("heads"), attrs.get("attentions"), attrs.get("traffic")
    dealt, exchanges = attrs.get("halo"), attrs.get("exchanges")
    sent = volumes(
        ulysses=degree // ring,
        ring=ring,
        heads=heads if isinstance(heads, int) else degree,
        attentions=attentions if isinstance(attentions, int) else 0,
        traffic=traffic(B=batch, S=tokens, T=text) if isinstance(traffic, Formula) else 0.0,
        forward=float(phase == "forward"),
        backward=float(phase == "backward"),
        output=token_bytes(stage, batch * tokens),
        exchanged=dealt(B=batch, S=tokens, T=text) if isinstance(dealt, Formula) else 0.0,
        exchanges=exchanges if isinstance(exchanges, int) else 0,
    )
    return Measurement(batch, tokens, text, degree, ms, sent.messages, sent.moved)


def _layers(stage: Stage) -> tuple[tuple[str, str], ...]:
    """Path and class of every block of a stage that could be cut; none of another."""
    if any(name not in stage.attrs for name in FIGURES):
        return ()
    names, classes = stage.attrs["blocks"], integers(stage.attrs["classes"])
    assert isinstance(names, tuple)
    symbols = [pair[0] for pair in names if isinstance(pair, tuple)]
    of_class = [symbol.name for symbol in symbols if isinstance(symbol, Symbol)]
    return tuple((path, of_class[kind]) for (path, _), kind in zip(layers_of(stage), classes, strict=True))


def report(doing: str) -> None:
    """To the launcher, from rank 0."""
    emit(Note(doing))


def write_measured(output: Path, measured: Measured) -> None:
    """From rank 0, whole or not at all: a launcher that is interrupted reads what is there."""
    if dist.get_rank() == 0:
        written = output.with_suffix(".part")
        written.write_bytes(msgspec.json.encode(measured))
        written.replace(output)


def main(
    model: str, data: str, planned_device: str, at_once: str, output: str, seconds: str, dtype: str, columns: str
) -> None:
    def work(device: torch.device) -> None:
        report("tracing")
        model_file = in_training_precision(load_model_file(model), msgspec.structs.replace(TRAINING, dtype=dtype))
        clips = CaptionCounter(model_file).manifest(read_manifest(data, columns=columns)).clips
        profiler = Profiler(model_file, clips, device, int(at_once))
        keep, budget = partial(write_measured, Path(output)), Budget(float(seconds))
        measured = profiler.measure(budget, report, keep)
        keep(measured)
        if budget.left() > 0:
            report("measuring attention")
            size, attention = profiler.attention()
            keep(msgspec.structs.replace(measured, head_size=size, attention=attention))

    as_rank(work, cpu=planned_device == "cpu")


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
