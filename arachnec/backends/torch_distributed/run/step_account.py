"""What a step came to on all ranks: put together, told, written to the audit log, and held against what a run bears.

All ranks know the norm alike, so all of them skip the step, and count, together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from arachnec.backends.torch_distributed.batches.set_aside import notes_of_clips, tell_left_out
from arachnec.backends.torch_distributed.executor.iteration import Iteration, Run
from arachnec.backends.torch_distributed.executor.shared_clips import demand_equal_batches, difference
from arachnec.backends.torch_distributed.plans.step_plans import Planned
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.reporting.logs import AuditLine, AuditLog, ValidationLine
from arachnec.backends.torch_distributed.reporting.report import ClipNote
from arachnec.cluster.topology import slowdowns_of
from arachnec.ir.diagnostic import user_error
from arachnec.optimizers.schedules import is_rate
from arachnec.runtime.agreement import gather
from arachnec.runtime.replanning import SlowRanks
from arachnec.runtime.step_progress import Interval


def cause_of_skip(notes: Sequence[ClipNote], norm: float) -> str:
    """Why a step is skipped, in words."""
    if not notes:
        kind = "not a number" if math.isnan(norm) else "infinite"
        return f"the norm of the gradient is {kind}, though the loss of every clip is finite"
    clips = ", ".join(f"{note.clip} (rank {', '.join(map(str, note.ranks))})" for note in notes)
    return f"the loss of {'clip' if len(notes) == 1 else 'clips'} {clips} is not finite"


@dataclass(frozen=True)
class Measured:
    """Of one batch on this rank, in ms: its steps, and what of planning was not hidden."""

    intervals: Sequence[Interval]
    elapsed: float
    exposed_planning: float


@dataclass
class StepAccount:
    """Of one run, on every rank. ``most_skipped`` steps in a row end it; one rank has the ``audit`` log; an optimizer
    step has ``batches`` batches."""

    most_skipped: int
    audit: AuditLog | None
    batches: int
    stopped_by: int = 0  # the signal that asked some rank to end
    _skipped: int = 0  # steps in a row
    _slow: SlowRanks = field(default_factory=SlowRanks)
    _seen: list[AuditLine] = field(default_factory=list)  # of the batches of a step that has not ended
    _names: dict[str | int, str] = field(default_factory=dict)  # of their clips

    def report(
        self,
        context: RankContext,
        own: Iteration,
        planned: Planned,
        run: Run,
        measured: Measured,
        *,
        asked: int = 0,
    ) -> report.StepReport:
        """Put together what all ranks measured of one batch; ``asked`` is the signal that asked this one to end.
        Collective. Raises ``UserError`` where too many steps were
        skipped, or no clip is left."""
        busy = report.busy_ms(measured.intervals)
        norm = 0.0 if run.norm is None else float(run.norm)
        peaks = report.peaks_gib(context.runtime)
        copies = context.host_copies
        moved = (0, 0) if copies is None else copies.counted()
        rate = [context.optimizer.first_group, context.optimizer.rate]
        mine = [run.loss, measured.elapsed, busy, peaks[0], norm, peaks[1], *moved, asked]
        mine += [difference(own.compares, run.digests, context.rank), *rate]
        everyone = torch.stack(gather(torch.tensor(mine, dtype=torch.float64)))
        demand_equal_rates(own.step, everyone[:, 10:].tolist())
        if float(everyone[:, 9].sum()):
            demand_equal_batches(own.step, own.compares, run.digests, own.clips)
        self.stopped_by = int(everyone[:, 8].max())
        loss, norm = float(everyone[:, 0].sum()), float(everyone[:, 4].max())
        aside, clips = _left_out(context, own, run), len(own.module.clips)
        if not own.share.clips:
            loss *= clips / max(1, clips - len(aside))
        finite = math.isfinite(loss) and math.isfinite(norm)
        notes = [] if finite else notes_of_clips(run.not_finite(own, context.rank))
        self._names |= {clip.id: clip.name for clip in own.clips.values()}
        unused = {note.clip for note in aside}
        names = [own.clips[clip.id].id for clip in own.module.clips]
        trained = [name for name in names if name not in unused]
        self._seen.append(AuditLine(own.step, trained, False, notes, aside, loss if finite else None))
        self._watch_ranks(planned, everyone[:, 2].tolist())
        if own.share.ends:  # a loss that is not finite makes the sum of all gradients so
            self._end_step(own.step // self.batches, finite, norm)
        step_ms = float(everyone[:, 1].max())
        return report.StepReport(
            step=own.step,
            iteration=planned.number,
            loss=loss if math.isfinite(loss) else None,
            gradient_norm=norm if math.isfinite(norm) else None,
            step_ms=step_ms,
            planned_ms=planned.times.ends,
            imbalance=report.imbalance(everyone[:, 2].tolist()),
            tokens_per_s=sum(clip.tokens for clip in own.module.clips) / step_ms * 1e3,
            exposed_planning_ms=measured.exposed_planning,
            peak_memory_gib=float(everyone[:, 3].max()),
            cascades=len(own.module.cascades),
            peak_reserved_gib=float(everyone[:, 5].max()),
            from_host=int(everyone[:, 6].sum()),
            to_host=int(everyone[:, 7].sum()),
            skipped=own.share.ends and not finite,
            not_finite=notes,
            lr=context.optimizer.rate,
            set_aside=aside,
        )

    def add_validation(self, step: int, loss: float | None) -> None:
        """Note the validation loss behind an optimizer step."""
        if self.audit is not None:
            self.audit.add_validation(ValidationLine((step + 1) * self.batches - 1, loss))

    def sync(self, step: int) -> None:
        """Have on the disk the lines of an optimizer step, which a checkpoint is about to count as done."""
        if self.audit is not None:
            for batch in range(step * self.batches, (step + 1) * self.batches):
                self.audit.sync(batch)

    def _end_step(self, step: int, finite: bool, norm: float) -> None:
        """Keep account of a step and its batches, and say whether it was skipped."""
        self._skipped = 0 if finite else self._skipped + 1
        notes = [note for line in self._seen for note in line.not_finite]
        if self.audit is not None:
            loss = loss_of_step(self._seen)
            for line in self._seen:
                self.audit.add(msgspec.structs.replace(line, skipped=not finite, loss=loss))
        self._seen.clear()
        if not finite:
            told = [msgspec.structs.replace(note, clip=self._names.get(note.clip, note.clip)) for note in notes]
            self._tell_skipped(step, cause_of_skip(told, norm))
        self._names.clear()

    @property
    def slowed(self) -> Mapping[int, float]:
        """Ranks that plans are to count as so many times slower, from now on."""
        return self._slow.planned

    def _watch_ranks(self, planned: Planned, busy: Sequence[float]) -> None:
        assert planned.module.cluster is not None
        expected = [planned.times.busy.get(rank, 0.0) for rank in range(len(busy))]
        self._slow = self._slow.after(expected, busy, slowdowns_of(planned.module.cluster))

    def _tell_skipped(self, step: int, cause: str) -> None:
        if self._skipped >= self.most_skipped:
            raise user_error(
                f"training has diverged: steps {step - self._skipped + 1} to {step} were skipped. In the last, {cause}",
                help=(
                    "check that sample() and loss() give finite numbers, lower --lr, and go on from a checkpoint with "
                    "--resume; --max-skipped lets more steps in a row be skipped"
                ),
            )
        events.emit(report.Note(f"step {step} is skipped, no parameter has changed: {cause}"))


def demand_equal_rates(step: int, rates: Sequence[Sequence[float]]) -> None:
    """Raises ``UserError`` where ranks update a group of parameters at different rates, or at none. ``rates`` are by
    rank: the number of a group, -1 where a rank has no parameters, and its rate."""
    first: dict[float, tuple[int, float]] = {}
    for rank, (group, rate) in enumerate(rates):
        if group >= 0 and not is_rate(rate):
            raise user_error(
                f"in step {step} the learning rate is {rate:g}",
                help="set rates that are numbers of at least 0; this step is in no checkpoint",
            )
        other, expected = first.setdefault(group, (rank, rate))
        if group >= 0 and not math.isclose(rate, expected, rel_tol=1e-6):
            raise user_error(
                f"in step {step} the learning rate is {rate:g} on rank {rank} and {expected:g} on rank {other}",
                help="the copies of the model drift apart: set the same rates and schedule on every rank",
            )


def loss_of_step(batches: Sequence[AuditLine]) -> float | None:
    """The mean over the clips of an optimizer step's batches; of several, each one's loss is its share of it."""
    losses = [line.loss for line in batches if line.loss is not None]
    if len(losses) < len(batches):
        return None
    trained, aside = (sum(map(len, lists)) for lists in zip(*((b.trained, b.set_aside) for b in batches), strict=True))
    return sum(losses) * ((trained + aside) / max(1, trained) if len(batches) > 1 else 1)


def _left_out(context: RankContext, own: Iteration, run: Run) -> list[report.ClipNote]:
    """The clips of the batch that were set aside. Raises ``UserError`` where that are all."""
    notes = tell_left_out(f"step {own.step}", run.left_out, context.loads.unreadable, own.clips.values())
    if notes and round(run.left_out.total()) >= len(own.module.clips):
        first = notes[0]
        name = next((clip.name for clip in own.clips.values() if clip.id == first.clip), first.clip)
        raise user_error(
            f"no clip of step {own.step} can be used: clip {name}: {first.reason}",
            help="check the paths of the manifest, and that this host can read them",
        )
    return notes
