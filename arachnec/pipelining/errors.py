"""What can be wrong with a pipeline schedule or with what was asked of one: each its own error."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class NotPositive(Diagnostic):
    title = "a pipeline schedule with {what} = {given}"
    help = "give a whole number of at least 1"
    what: str
    given: int


@dataclass(frozen=True)
class NoText(Diagnostic):
    title = "{path} is no text"
    help = "give {what}, in UTF-8"
    path: str
    what: str


@dataclass(frozen=True)
class UnevenRounds(Diagnostic):
    title = "{micro_batches} micro-batches cannot be interleaved on {ranks} ranks"
    help = "interleaving goes in rounds of equal size: give {fitting} micro-batches, or use 1f1b"
    micro_batches: int
    ranks: int
    fitting: int


@dataclass(frozen=True)
class UnknownWarmUpPolicy(Diagnostic):
    title = "unknown warm-up policy `{given}`"
    help = "policies are A (stages behind and this one) and B (twice as many, for slow links)"
    given: str


@dataclass(frozen=True)
class MemoryHoldsNoMicroBatch(Diagnostic):
    title = "the memory of rank {rank} holds no micro-batch"
    help = "use smaller micro-batches, more stages, or recompute more blocks"
    rank: int


@dataclass(frozen=True)
class LimitsForOtherRanks(Diagnostic):
    title = "memory limits for {given} ranks, but there are {ranks}"
    help = "give one limit for every rank"
    given: int
    ranks: int


@dataclass(frozen=True)
class UnknownAction(Diagnostic):
    title = "`{word}` is no action of a pipeline schedule"
    label = "not an action"
    help = "write stage, kind and micro-batch, as in `2F0`; kinds are F, B, I and W"
    word: str


@dataclass(frozen=True)
class EmptySchedule(Diagnostic):
    title = "the schedule has no action"
    help = "write one row of actions for every rank, as in `0F0,0B0`"


@dataclass(frozen=True)
class ScheduleTooLarge(Diagnostic):
    title = "the schedule has {given} {what}, more than {most}"
    help = "a schedule has one row for every rank and one cell for every action"
    what: str
    given: int
    most: int


@dataclass(frozen=True)
class RepeatedAction(Diagnostic):
    title = "`{action}` stands twice"
    label = "stands before this on {first}"
    help = "every stage runs forward and backward of a micro-batch once: remove one"
    action: str
    first: str


@dataclass(frozen=True)
class MissingAction(Diagnostic):
    title = "stage {stage} has no {phase} of micro-batch {micro_batch}"
    label = "the row of rank {rank} lacks it"
    help = "add `{action}` to the row of rank {rank}"
    stage: int
    phase: str
    micro_batch: int
    rank: int
    action: str


@dataclass(frozen=True)
class RankWithoutActions(Diagnostic):
    title = "rank {rank} has no action"
    label = "an empty row"
    help = "give the rank a stage, or remove its row"
    rank: int


@dataclass(frozen=True)
class MissingStage(Diagnostic):
    title = "no rank runs stage {stage}, though there are {stages}"
    help = "stages count from 0 without a gap: add a row with its actions"
    stage: int
    stages: int


@dataclass(frozen=True)
class BackwardTwice(Diagnostic):
    title = "stage {stage} has both a whole and a split backward of micro-batch {micro_batch}"
    label = "the split half; the whole one is on {first}"
    help = "keep B, or both I and W"
    stage: int
    micro_batch: int
    first: str


@dataclass(frozen=True)
class StageOnTwoRanks(Diagnostic):
    title = "stage {stage} is on rank {first} and on rank {second}"
    label = "rank {first} runs this stage"
    help = "the parameters of a stage are on one rank: move its actions to one row"
    stage: int
    first: int
    second: int


@dataclass(frozen=True)
class ActionTooEarly(Diagnostic):
    title = "rank {rank} runs `{action}` before `{needed}`"
    label = "needs what `{needed}` leaves"
    help = "on one rank, write `{needed}` first"
    rank: int
    action: str
    needed: str


@dataclass(frozen=True)
class DeadlockedSchedule(Diagnostic):
    title = "the schedule deadlocks: {waits}"
    label = "never runs"
    help = "move `{awaited}` before `{holder}` on rank {rank}"
    waits: str
    awaited: str
    holder: str
    rank: int


@dataclass(frozen=True)
class ScheduleForOthers(Diagnostic):
    title = "the schedule is for {given} {what}, but there are {expected}"
    help = "give a schedule for {expected} {what}, or change the number of {what} to {given}"
    what: str
    given: int
    expected: int


@dataclass(frozen=True)
class TimesForOthers(Diagnostic):
    title = "{what} are given for {given}, but the schedule has {expected}"
    help = "give one number for every stage and micro-batch, and for every cut and micro-batch"
    what: str
    given: str
    expected: str


@dataclass(frozen=True)
class FitsNowhere(Diagnostic):
    title = "no pipeline of {layers} layers fits into the memory of {ranks} ranks"
    help = "use more ranks, smaller micro-batches, or recompute more blocks"
    layers: int
    ranks: int


@dataclass(frozen=True)
class MoreRanksThanLayers(Diagnostic):
    title = "a pipeline of {ranks} ranks for {layers} layers"
    help = "every rank needs a layer: give at most {layers} ranks"
    ranks: int
    layers: int


@dataclass(frozen=True)
class GroupExceedsMemory(Diagnostic):
    title = "groups of {k} micro-batches save {needed} bytes on rank {rank}, which may hold {limit}"
    help = "use a smaller k, smaller micro-batches, or recompute more blocks"
    k: int
    rank: int
    needed: str
    limit: str
