"""What one step of a sampler's models takes, on as many ranks as sampling uses.

A measurement is a whole step of some requests: arguments, forwards of all branches together, guidance, scheduler. Its
batch is the number of predictions, as a plan counts them. Turns are those of ``profiling.in_turns``. All ranks run at
once. Where they share cores, how long one of them takes depends on when the others had these: then a step takes from
the first rank's start to the last one's end, and the measurement is what that is with a core for each. One rank of
``arachnec profile``: ``python -m arachnec.profiling.sampler_profiler SAMPLER DATA DEVICE AT_ONCE OUTPUT SECONDS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.cascade_step import encode
from arachnec.cost.profile import Measurement
from arachnec.cost.strategy import widest_ulysses
from arachnec.data.requests import Request, read_requests
from arachnec.data.switch import ONE_MODEL
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Stage
from arachnec.ir.stage_sizes import count_in
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split
from arachnec.kernels.attention.subgroups import subgroups
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.models.sampler_file import DECODER, FromLatents, SamplerFile, latents_of, load_sampler_file
from arachnec.profiling.in_turns import SHAPES, Budget, Point, Turn, deciding_sizes, in_turns, sizes_of, spread
from arachnec.profiling.links import measure_links, now
from arachnec.profiling.local import Measured
from arachnec.profiling.profiler import (
    SHARED_SHAPES,
    TRAINED,
    Job,
    of_all_ranks,
    report,
    shared_blocks,
    shared_measurement,
    side_by_side,
    write_measured,
)
from arachnec.runtime.agreement import gather, share_text
from arachnec.sampling.forward import all_branches, branches_of
from arachnec.sampling.loop import Loop, Sampling, begin, run
from arachnec.spmd.sharded_model import SequenceModel


class _Traced(msgspec.Struct, frozen=True):
    """What rank 0 tells the others: S of every request, and the heads of every model's attention, 0 where unknown."""

    tokens: list[int]
    heads: dict[str, int]
    text: int | None  # tokens that captions are padded to


LEAST_MS = 30.0  # of a measurement: shorter steps are taken several times, up to ``MOST_STEPS``
MOST_STEPS = 8


@dataclass
class SamplerProfiler:
    """Measures every model of a sampler file on all ranks of the default group; every method is collective.

    ``at_once`` ranks have a core each.
    """

    sampler: SamplerFile
    requests: Sequence[Request]
    device: torch.device
    at_once: int
    jobs: list[Job] = field(init=False, default_factory=list)
    _models: dict[str, torch.nn.Module] = field(init=False)
    _encoders: dict[str, torch.nn.Module] = field(init=False)
    _coders: dict[str, torch.nn.Module] = field(init=False)  # encoders and decoder
    _stages: dict[tuple[str, str], Stage] = field(init=False, default_factory=dict)  # on rank 0 only
    _heads: dict[str, int] = field(init=False)
    _text: int | None = field(init=False)  # tokens that the sampler file pads captions to
    _groups: ProcessGroups = field(init=False, default_factory=ProcessGroups)
    _loops: dict[object, list[Loop]] = field(init=False, default_factory=dict)
    _prompts: dict[object, list[dict[str, torch.Tensor]]] = field(init=False, default_factory=dict)  # encoded, negative
    _steps: dict[int, int] = field(init=False, default_factory=dict)  # of every job, one after another

    def __post_init__(self) -> None:
        names = self.sampler.names()
        traced = self._trace(names)
        tokens, self._heads, self._text = traced.tokens, traced.heads, traced.text
        torch.manual_seed(0)
        encoders = self.sampler.encoders() if self.sampler.encoders is not None else {}
        self._encoders = {name: e.to(self.device).eval().requires_grad_(False) for name, e in encoders.items()}
        self._coders = dict(self._encoders)
        if self.sampler.decoder is not None:
            decoder = self.sampler.decoder().to(self.device).eval().requires_grad_(False)
            self._coders[DECODER] = FromLatents(
                self.sampler, decoder, latents_of(self.sampler, [r.clip() for r in self.requests])
            )
        self._models = {name: self.sampler.build(name).to(self.device).eval().requires_grad_(False) for name in names}
        of_shape = {request.shape: (request, count) for request, count in zip(self.requests, tokens, strict=True)}
        rows = sorted(of_shape.values(), key=lambda row: (row[1], row[0].text_tokens))
        points = [Point((request.clip(),), count) for request, count in rows]
        asked = {point.clips[0].shape: of_shape[point.clips[0].shape][0] for point in points}
        for name in self._coders:
            self.jobs += [
                Job(name, ("forward",), self.ranks, partial(self._encode, name, point), point) for point in points
            ]
        steps = list({(*p.clips[0].shape[:3], self._text or p.clips[0].text_tokens): p for p in points}.values())
        for name in names:
            alone = spread(steps, SHAPES)
            # pairs of requests at every size: whether a batch saves time or costs some is the machine's to say
            ways = ((1, 1.0), (1, 2.0), (2, 2.0))
            self.jobs += [
                self._step_job(name, asked[point.clips[0].shape], point.tokens, count, guidance)
                for point in alone
                for count, guidance in ways
            ]
            if self.ranks > 1:
                self.jobs += self._shared_jobs(name, spread(steps, SHARED_SHAPES), asked)

    @cached_property
    def ranks(self) -> int:
        return dist.get_world_size()

    def measure(
        self,
        budget: Budget,
        reporter: Reporter = unreported,
        keep: Callable[[Measured], None] = lambda measured: None,
    ) -> Measured:
        """What the budget allows; ``keep`` is given what was found so far, without the links, again and again."""
        turns = [Turn((job.stage, job.degree), job.point, job.doing) for job in self.jobs]
        times = in_turns(turns, self._run, budget, reporter, lambda times: keep(self._measured(times, links=False)))
        return self._measured(times, links=True)

    def _measured(self, times: Sequence[Sequence[tuple[float, float, int]]], *, links: bool) -> Measured:
        """Of start and end, ms, and steps of every job on this rank; nothing of a job that was not run."""
        rows: dict[tuple[str, str], list[Measurement]] = {}
        for job, runs in of_all_ranks(self.jobs, times):
            crowding = max(1.0, job.ranks / self.at_once)  # how many ranks share a core
            ms = (_ms(runs, crowding) / runs[0, :, 2]).quantile(0.5).item()
            rows.setdefault((job.stage, "forward"), []).append(self._measurement(job, ms))
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        measured_links = measure_links(self.device) if links and dist.get_world_size() > 1 else None
        return Measured(name, [(*key, runs) for key, runs in rows.items()], measured_links, [])

    def _run(self, index: int) -> tuple[float, float, int]:
        """Start and end of a job on this rank, ms, and how many steps it took: after the first time, several short."""
        job, steps = self.jobs[index], self._steps.get(index, 1)
        dist.barrier()
        started = now(self.device)
        for _ in range(steps if dist.get_rank() < job.ranks else 0):
            job.run()
        took = now(self.device) - started
        if index not in self._steps:
            slowest = max(float(value) for value in gather(torch.tensor([took * 1e3], dtype=torch.float64)))
            self._steps[index] = max(1, min(MOST_STEPS, round(LEAST_MS / max(slowest, 1e-3))))
        return started * 1e3, (started + took) * 1e3, steps

    def _trace(self, names: Sequence[str]) -> _Traced:
        """Traced on rank 0, since the ranks share the machine's cores."""
        text = None
        if dist.get_rank() == 0:
            from arachnec.passes.trace import trace_model
            from arachnec.tracing.sample_reads import padded_text

            clips = [request.clip() for request in self.requests]
            tokens: list[int] = []
            for name in names:
                traced = trace_model(self.sampler.model_file(name), clips, gradients=False)
                self._stages |= {(name, stage.name): stage for stage in traced.stages}
                tokens = tokens or [traced.tokens(clip) for clip in clips]
            heads = {name: count_in(self._stages[name, TRAINED], "heads") for name in names}
            lengths = {padded_text(self.sampler.model_file(name), clips) for name in names}
            padded = lengths.pop() if len(lengths) == 1 else None
            text = msgspec.json.encode(_Traced(tokens, heads, padded)).decode()
        return msgspec.json.decode(share_text(text), type=_Traced)

    def _step_job(self, name: str, request: Request, tokens: int, count: int, scale: float) -> Job:
        """A step of ``count`` equal requests, with a scale of guidance above 1 of both branches."""
        guided = replace(request, guidance=scale)
        predictions = count * self.sampler.branches(name, guided)
        point = Point((request.clip(),) * predictions, tokens)
        run = partial(self._step, name, guided, count, None, None)
        return Job(name, ("forward",), self.ranks, run, point)

    def _shared_jobs(
        self, name: str, points: Sequence[Point], asked: Mapping[tuple[int, int, int, int], Request]
    ) -> Iterator[Job]:
        """Steps on 2, 4, ... ranks, side by side; none of a model whose blocks cannot be shared."""
        clips = [request.clip() for request in self.requests]
        sequence = shared_blocks(self._models[name], self.sampler.model_file(name), clips)
        if sequence is None:
            return
        for degree, count, groups, mine in side_by_side(self.ranks):
            grid = widest_ulysses(degree, self._heads[name])
            self._groups.ensure(group for ranks in groups for group in subgroups(ranks, grid.ulysses, grid.ring))
            for point in points:
                shares = even_split(point.tokens, degree)
                shard = self._groups.shard(mine, shares, grid.ulysses, grid.ring) if mine else None
                both = (replace(asked[point.clips[0].shape], guidance=scale) for scale in (1.0, 2.0))
                for predictions, request in {self.sampler.branches(name, r): r for r in both}.items():
                    several = Point((point.clips[0],) * predictions, point.tokens)
                    run = partial(self._step, name, request, 1, sequence, shard)
                    yield Job(name, ("forward",), count, run, several, degree)

    def _step(
        self, name: str, request: Request, count: int, sequence: SequenceModel | None, shard: SequenceShard | None
    ) -> tuple[float, ...]:
        """The next step of these requests, which begin anew where they have ended."""
        key = name, request.id, request.guidance, count, shard is not None
        loops = self._loops.get(key)
        if loops is None or loops[0].ended:
            sampling = Sampling(self.sampler, (name,), ONE_MODEL)
            own = replace(self._encoded(request), steps=max(2, request.steps))
            loops = self._loops[key] = [begin(sampling, own, self.device) for _ in range(count)]
        predict = all_branches(self.sampler, branches_of(self.sampler, self._models.__getitem__))
        with sequence.use(shard) if sequence else nullcontext():
            run(loops, predict, loops[0].step + 1)
        return ()

    def _encoded(self, request: Request) -> Request:
        """With what the encoders make of it, once for all its steps."""
        if request.id not in self._prompts:
            self._prompts[request.id] = [
                {
                    name: encode(encoder, [request.clip(conditional)], self.device)
                    for name, encoder in self._encoders.items()
                }
                for conditional in (True, False)
            ]
        own, negative = self._prompts[request.id]
        return replace(request, encoded=own, negative_encoded=negative)

    def _encode(self, name: str, point: Point) -> tuple[float, ...]:
        encode(self._coders[name], point.clips, self.device)
        return ()

    def _measurement(self, job: Job, ms: float) -> Measurement:
        assert job.point is not None
        clip, batch, tokens = job.point.clips[0], len(job.point.clips), job.point.tokens
        if job.stage in self._coders:
            clips = [request.clip() for request in self.requests]
            sizes = sizes_of(clip, deciding_sizes(self._coders[job.stage], clips))
            return Measurement(batch, tokens, clip.text_tokens, job.degree, ms, sizes=sizes)
        stage, ring = self._stages.get((job.stage, TRAINED)), widest_ulysses(job.degree, self._heads[job.stage]).ring
        text = self._text or clip.text_tokens
        return shared_measurement(stage, "forward", batch, tokens, text, job.degree, ms, ring)


def _ms(times: torch.Tensor, crowding: float) -> torch.Tensor:
    """Of every round, from starts and ends of ranks ``[ranks, rounds, 2 or more]`` of which so many share a core."""
    if crowding == 1:
        return (times[..., 1] - times[..., 0]).mean(0)
    return (times[..., 1].amax(0) - times[..., 0].amin(0)) / crowding  # processes of one machine, one clock


def main(sampler: str, data: str, planned_device: str, at_once: str, output: str, seconds: str) -> None:
    def work(device: torch.device) -> None:
        report("tracing")
        profiler = SamplerProfiler(load_sampler_file(sampler), read_requests(data), device, int(at_once))
        keep = partial(write_measured, Path(output))
        keep(profiler.measure(Budget(float(seconds)), report, keep))

    as_rank(work, cpu=planned_device == "cpu")


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
