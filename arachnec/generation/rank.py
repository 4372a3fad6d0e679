"""One rank's program of requests: encode, denoise, decode, send, receive, free.

In: a lowered module and the requests. Out: files of every request whose last segment ends here. A request's state lies
on all ranks of its segment, bit by bit the same: whoever needs it next is sent it as bytes of a known number. A segment
past the switch, or of the second model before it, hands its input on; the instructions are the same either way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.communicators import sides_of
from arachnec.analysis.receive_prefetch import Prefetched, prefetch_receives
from arachnec.analysis.uses import Values
from arachnec.data.requests import Request
from arachnec.generation.encoded import Encoders
from arachnec.generation.progress import RequestProgress, instruction_limit
from arachnec.generation.rank_models import RankModels
from arachnec.generation.results import Outcome, Results
from arachnec.generation.rounds import Rounds, all_pairs
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Program, integer, integers
from arachnec.ir.parser import parse_module
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import even_split
from arachnec.launch.phases import GROUP_TIMEOUT, Timeouts
from arachnec.lowering.continuation import begins_as
from arachnec.models.sampler_file import decoded
from arachnec.runtime.device_runtime import DeviceRuntime, OnHost
from arachnec.runtime.handoffs import HandoffConnections, Handoffs, HandoffThreads, TensorSpec, handoff_pairs
from arachnec.runtime.rank_resources import family_groups, wanted_groups
from arachnec.runtime.step_progress import Clock, Interval
from arachnec.sampling.forward import BranchPoint, all_branches, branches_of
from arachnec.sampling.loop import Loop, Point, Predict, Sampling, begin, guided, packed, run, state_bytes, unpack
from arachnec.spmd.specialise import Specialisation


def unwatched(progress: RequestProgress) -> None:
    """Nobody minds how long an instruction takes."""


@dataclass
class GenerationRank:
    """What a rank keeps while its program runs. ``requests`` by their number in the module."""

    rank: int
    sampling: Sampling
    module: Module
    requests: tuple[Request, ...]
    results: Results
    device: torch.device
    tell: Callable[[Outcome], None]
    groups: ProcessGroups = field(default_factory=lambda: ProcessGroups(GROUP_TIMEOUT))
    connections: HandoffConnections = field(default_factory=lambda: HandoffConnections(timeout=GROUP_TIMEOUT))
    values: dict[str, OnHost] = field(default_factory=dict)  # by cascade, as they travel
    loops: dict[int, tuple[str, Loop]] = field(default_factory=dict)  # the latest here of each request, and whose it is
    models: RankModels = field(init=False)
    encoders: Encoders = field(init=False)
    started: float = field(init=False)
    progress: RequestProgress = field(init=False)
    measured: list[Interval] = field(default_factory=list)  # of every instruction, once the program has run
    rounds: Rounds | None = None  # where the rest may be planned again
    enter: Callable[[RequestProgress], None] = unwatched  # who watches over how long they take
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        sampler = self.sampling.sampler
        self.models = RankModels(sampler, self.device)
        self.encoders = Encoders(sampler, self.sampling.names, self.device)

    @property
    def program(self) -> Program:
        return self._at_hand.program

    @property
    def cascades(self) -> dict[str, Cascade]:
        return self._at_hand.cascades

    @cached_property
    def _at_hand(self) -> _AtHand:
        return _AtHand.of(self.module, self.rank)

    def connect(self) -> None:
        """Make what the program needs: models, groups, connections. Collective where there are several ranks."""
        if len(self.module.programs) > 1:
            whole = [step.peers for p in self.module.programs for step in p.instructions if step.op == "denoise"]
            more = family_groups(self.module) if self.rounds else ()
            self.groups.ensure(dict.fromkeys([*wanted_groups(self.module), *whole, *more]), device=self.device)
            pairs = all_pairs(range(len(self.module.programs))) if self.rounds else ()
            self.connections.ensure([*handoff_pairs(self.module.programs), *pairs])
        if self.rounds:
            self.models.prepare_all(self.module, self.requests)
        self.models.prepare(self.module, self.program, self.requests)
        self.encoders.build({self.cascades[s.target].stage for s in self.program.instructions if s.op == "encode"})
        if any(step.op == "decode" for step in self.program.instructions):
            _ = self._decoder
        self._warm_scheduler()
        if len(self.module.programs) > 1:
            dist.barrier()
        self.started = time.monotonic()

    def _warm_scheduler(self) -> None:
        """Have the scheduler import what it needs, so that no request's seconds count it."""
        loop = begin(self.sampling, self.requests[0])
        self.sampling.longest_history(loop.request, loop.latents)

    def run(self) -> None:
        """Execute the program. Collective."""
        threads, runtime = HandoffThreads(), DeviceRuntime.of(self.device)
        tags = dict(self._at_hand.tags)
        handoffs = Handoffs(self.connections, threads, tags)
        clock = Clock(self.rank, runtime)
        self.progress = RequestProgress(self.module, self.rank, self.requests, clock, self._limit)
        self.enter(self.progress)
        if self.rounds:
            self.rounds.enter(0)
        at = 0
        while at < len(self.program.instructions):
            step = self.program.instructions[at]
            self.progress.at(at)
            for receive in self._at_hand.prefetched[at]:
                spec = self._spec(receive.target)
                self.values[receive.target] = handoffs.prefetch(receive.target, spec, receive.peers[0])
            self._wait_for_inputs(step, clock)
            with clock.measure(step.op, step.target):
                self._execute(step, handoffs, runtime)
            if step.op == "replan" and self.rounds:
                self._go_on(integer(step.attrs["round"]), self.rounds)
                tags |= self._at_hand.tags
            at += 1
        self.progress.at(at)
        self.measured = [interval for interval in clock.intervals() if interval.op != "replan"]
        handoffs.finish()
        threads.close()

    def _go_on(self, round: int, rounds: Rounds) -> None:
        """Take over the list that follows a round. It begins as this rank's own did."""
        text = rounds.next_program(round)
        if text is not None:
            module = parse_module(text)
            ahead = _AtHand.of(module, self.rank)
            if not begins_as(ahead.program.instructions, self.program.instructions, round):
                raise RuntimeError(f"the program of round {round} does not begin as that of rank {self.rank}")
            self.module, self._at_hand = module, ahead
            self.progress.follow(module)
        rounds.enter(round)

    def _execute(self, step: Instruction, handoffs: Handoffs, runtime: DeviceRuntime) -> None:
        if step.op == "encode":
            cascade = self.cascades[step.target]
            self.values[step.target] = runtime.to_host(self.encoders.encode(cascade.stage, self._requests(cascade)))
        elif step.op == "denoise":
            loops = self._denoise(step)
            if step.target in self._at_hand.sent:
                self.values[step.target] = _packed(loops, runtime)
        elif step.op == "decode":
            ranks = step.peers or (self.rank,)
            for place, loop in enumerate(self._loops(self.cascades[step.target])):
                if ranks[place % len(ranks)] == self.rank:
                    self._deliver(loop)
        elif step.op == "send":
            if step.target not in self.values:  # planned again, it goes where it was not to go
                loops = [self.loops[number][1] for number in self.cascades[step.target].clips]
                self.values[step.target] = _packed(loops, runtime)
            handoffs.send(step.target, self.values[step.target], step.peers[0])
        elif step.op == "free":
            handoffs.let_go(step.target)
            self.values.pop(step.target, None)
            self.loops = {number: own for number, own in self.loops.items() if own[0] != step.target}

    def _wait_for_inputs(self, step: Instruction, clock: Clock) -> None:
        """Nothing of a request runs before it arrives; what it waits for is none of its own time."""
        if step.op not in ("encode", "denoise", "decode"):
            return
        cascade = self.cascades[step.target]
        wait = self.started + max(request.arrival for request in self._requests(cascade)) - time.monotonic()
        if wait > 0:
            with self.progress.arriving():
                time.sleep(wait)
        coming = [self.values[name] for name in cascade.inputs if name in self.values]
        if coming:
            with clock.measure("receive", step.target):
                for value in coming:
                    value.wait()

    def _limit(self, instruction: Instruction) -> float:
        cluster = self.module.cluster
        planned_for_cpu = cluster is not None and cluster.attrs.get("device") == "cpu"
        applies = planned_for_cpu or self.device.type != "cpu"
        return instruction_limit(self.cascades.get(instruction.target), instruction, self.timeouts, applies=applies)

    def _requests(self, cascade: Cascade) -> list[Request]:
        return [self.requests[number] for number in cascade.clips]

    def _spec(self, name: str) -> TensorSpec:
        cascade = self.cascades[name]
        requests = self._requests(cascade)
        if cascade.phase is Phase.ENCODE:
            return TensorSpec((self.encoders.size(cascade.stage, requests),), torch.uint8)
        size = sum(state_bytes(begin(self.sampling, request)) for request in requests)
        return TensorSpec((size,), torch.uint8)

    def _loops(self, cascade: Cascade) -> list[Loop]:
        """The requests of a segment or of a decoder as its input has them, or before their first step."""
        before = next((n for n in cascade.inputs if self.cascades[n].phase is Phase.DENOISE), None)
        if before is None:
            return [begin(self.sampling, self._encoded(cascade, r), self.device) for r in self._requests(cascade)]
        if all(self.loops.get(number, ("",))[0] == before for number in cascade.clips):
            return [self.loops[number][1] for number in cascade.clips]
        state, loops = self.values[before].wait(), []
        for request in self._requests(cascade):
            loop = begin(self.sampling, self._encoded(cascade, request), self.device)
            size = state_bytes(loop)
            unpack(state[:size], loop)
            loops.append(loop)
            state = state[size:]
        return loops

    def _encoded(self, cascade: Cascade, request: Request) -> Request:
        if cascade.phase is not Phase.DENOISE:
            return request
        inputs = [self.cascades[name] for name in cascade.inputs if self.cascades[name].phase is Phase.ENCODE]
        values = {c.stage: (self._requests(c), self.values[c.name].wait()) for c in inputs}
        return self.encoders.encoded(values, request)

    def _denoise(self, step: Instruction) -> list[Loop]:
        """The steps of a segment that are its model's. Collective over its ranks."""
        cascade = self.cascades[step.target]
        ranks = step.peers or (self.rank,)
        last = integers(cascade.attrs.get("steps", (0, 0)))[1]
        loops = self._loops(cascade)
        predict = self._told(loops, self._predict(step, cascade))
        run(loops, predict, last + 1, self._agreed(ranks), cascade.stage)
        for number, loop in zip(cascade.clips, loops, strict=True):
            self.loops[number] = cascade.name, loop
            done = loop.failed or loop.step == len(loop.schedule)
            if done and ranks[0] == self.rank and cascade.name in self._at_hand.ends:
                self._deliver(loop)
            if self.rounds and ranks[0] == self.rank and "switch" in cascade.attrs:
                self.rounds.tell(number, loop.step, loop.switched)
        return loops

    def _told(self, loops: Sequence[Loop], predict: Predict) -> Predict:
        """Predictions of a step, once it is told that the step begins."""

        def predicted(name: str, points: Sequence[Point]) -> list[Tensor]:
            own = next(loop for loop in loops if loop.request is points[0].request)
            self.progress.step(own.step, len(own.schedule))
            return predict(name, points)

        return predicted

    def _predict(self, step: Instruction, cascade: Cascade) -> Predict:
        """Predictions of a step, by this rank and those that share the branches, or the one, that it has."""
        ranks = step.peers or (self.rank,)
        sides = sides_of(replace(step, peers=ranks))
        own, product = next(side for side in sides if self.rank in side[0])
        shard = None
        if len(own) > 1:
            listed = step.attrs.get("shards") or cascade.attrs.get("shards")
            tokens = even_split(cascade.tokens, len(own)) if listed is None else integers(listed)
            shard = self.groups.shard(own, tokens, *product)
        sampler = self.sampling.sampler
        (stage,) = (stage for stage in self.module.stages if stage.name == cascade.stage)
        forwards = self.models.sharing(stage, cascade, self.requests[cascade.clips[0]].clip(), shard)
        branches = branches_of(sampler, forwards, Specialisation.of(stage).clips)
        together = all_branches(sampler, branches)

        def apart(name: str, points: Sequence[Point]) -> list[Tensor]:
            conditional = own == sides[0][0]
            predictions = branches(name, [BranchPoint(point, conditional) for point in points])
            mine = torch.cat(predictions).float().contiguous()
            other = torch.empty_like(mine)
            first, second = (mine, other) if conditional else (other, mine)
            dist.broadcast(first, ranks[0], group=self.groups.get(ranks))
            dist.broadcast(second, sides[1][0][0], group=self.groups.get(ranks))
            pairs = zip(first.chunk(len(points)), second.chunk(len(points)), points, strict=True)
            return [guided(a, b, sampler.scale(name, point.request)) for a, b, point in pairs]

        return together if len(sides) == 1 else apart

    def _agreed(self, ranks: tuple[int, ...]) -> Callable[[float], float]:
        """The distance that the first of the ranks has measured: all of them decide by it."""
        if len(ranks) == 1:
            return float

        def agreed(distance: float) -> float:
            value = torch.tensor([distance], dtype=torch.float64, device=self.device)
            dist.broadcast(value, ranks[0], group=self.groups.get(ranks))
            return float(value)

        return agreed

    @cached_property
    def _decoder(self) -> nn.Module | None:
        build = self.sampling.sampler.decoder
        return None if build is None else build().to(self.device).eval().requires_grad_(False)

    def _deliver(self, loop: Loop) -> None:
        """Write the files of a request, or why there are none."""
        request = loop.request
        self.progress.result_of(request)
        failed = f"its latents are no numbers after step {loop.step}" if loop.failed else None
        seconds, pixels = time.monotonic() - self.started, None if loop.failed else self._pixels(loop.latents)
        if pixels is not None and not torch.isfinite(pixels).all():
            failed = "its pixels are no numbers, though its latents are"
        outcome = Outcome(
            id=str(request.id),
            steps=loop.step,
            switched=loop.switched,
            distances=[distance if math.isfinite(distance) else None for distance in loop.distances],
            fingerprint=self.results.fingerprint(request),
            seconds=seconds,
            failed=failed,
        )
        if failed is None:
            self.results.write(request, outcome, loop.latents, pixels)
        self.tell(outcome)

    @torch.no_grad()
    def _pixels(self, latents: Tensor) -> Tensor | None:
        """What the decoder makes of them; None without one."""
        return None if self._decoder is None else decoded(self.sampling.sampler, self._decoder, latents)


def _packed(loops: Sequence[Loop], runtime: DeviceRuntime) -> OnHost:
    return runtime.to_host(torch.cat([packed(loop) for loop in loops]))


@dataclass(frozen=True)
class _AtHand:
    """What a rank reads of a program."""

    program: Program
    cascades: dict[str, Cascade]
    prefetched: Prefetched
    sent: set[str]
    tags: dict[str, int]  # of messages, by cascade
    ends: set[str]  # the last cascade of every chain: where it is a segment, its latents are all that is asked for

    @classmethod
    def of(cls, module: Module, rank: int) -> _AtHand:
        program = next(program for program in module.programs if program.rank == rank)
        cascades = {cascade.name: cascade for cascade in module.cascades}
        limit = module.cluster.memory if module.cluster else 0.0
        read = {name for cascade in module.cascades for name in cascade.inputs}
        return cls(
            program,
            cascades,
            prefetch_receives(Values(module), program, limit),
            {step.target for step in program.instructions if step.op == "send"},
            {name: number for number, name in enumerate(cascades)},
            {name for name in cascades if name not in read},
        )
