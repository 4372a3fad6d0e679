"""Errors of a module that parsed: one Diagnostic per rule of the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic

# attributes


@dataclass(frozen=True)
class UnknownAttribute(Diagnostic):
    title: ClassVar[str] = "{node} has no attribute `{name}`"
    label: ClassVar[str] = "no such attribute"
    help: ClassVar[str] = "{remedy}"
    node: str
    name: str
    remedy: str


@dataclass(frozen=True)
class EarlyAttribute(Diagnostic):
    title: ClassVar[str] = "{node} cannot have `{name}` yet: the module is {level}"
    label: ClassVar[str] = "only from level {since} on"
    help: ClassVar[str] = 'remove it, or say `level = "{since}"`'
    node: str
    name: str
    level: str
    since: str


@dataclass(frozen=True)
class MissingAttribute(Diagnostic):
    title: ClassVar[str] = "{node} lacks the attribute `{name}`"
    label: ClassVar[str] = "a {level} module needs it"
    help: ClassVar[str] = "`{name}` is {kind}: {meaning}"
    node: str
    name: str
    level: str
    kind: str
    meaning: str


@dataclass(frozen=True)
class WrongType(Diagnostic):
    title: ClassVar[str] = "`{name}` of {node} is {found}"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "`{name}`: {meaning}"
    node: str
    name: str
    found: str
    expected: str
    meaning: str


@dataclass(frozen=True)
class WrongUnit(Diagnostic):
    title: ClassVar[str] = "`{name}` of {node} is in {found}, not in {unit}"
    label: ClassVar[str] = "expected {unit}"
    help: ClassVar[str] = "{remedy}"
    node: str
    name: str
    found: str
    unit: str
    remedy: str


@dataclass(frozen=True)
class UnknownVariable(Diagnostic):
    title: ClassVar[str] = "the formula `{name}` of {node} speaks of `{variable}`"
    label: ClassVar[str] = "no such variable"
    help: ClassVar[str] = "variables are B (clips in the micro-batch), S (tokens of a clip), T (text tokens of a clip)"
    node: str
    name: str
    variable: str


@dataclass(frozen=True)
class OutOfBounds(Diagnostic):
    title: ClassVar[str] = "`{name}` of {node} has {found}"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "`{name}`: {meaning}"
    node: str
    name: str
    found: str
    expected: str
    meaning: str


# names


@dataclass(frozen=True)
class DuplicateName(Diagnostic):
    title: ClassVar[str] = "there are two of {node}"
    label: ClassVar[str] = "the second"
    help: ClassVar[str] = "give each its own name"
    node: str


@dataclass(frozen=True)
class UnknownReference(Diagnostic):
    title: ClassVar[str] = "{node} speaks of {what}, which is not in the module"
    label: ClassVar[str] = "there is no {what}"
    help: ClassVar[str] = "{remedy}"
    node: str
    what: str
    remedy: str


@dataclass(frozen=True)
class UsedBeforeMade(Diagnostic):
    title: ClassVar[str] = "{node} reads `%{input}`, which stands after it"
    label: ClassVar[str] = "reads `%{input}`"
    help: ClassVar[str] = "move `%{input}` above: inputs come before their use"
    node: str
    input: str


@dataclass(frozen=True)
class Cycle(Diagnostic):
    title: ClassVar[str] = "{node} waits for itself: {path}"
    label: ClassVar[str] = "in a cycle"
    help: ClassVar[str] = "remove one of these inputs"
    node: str
    path: str


@dataclass(frozen=True)
class EarlyNode(Diagnostic):
    title: ClassVar[str] = "{node} cannot stand in a {level} module"
    label: ClassVar[str] = "only from level {since} on"
    help: ClassVar[str] = 'remove it, or say `level = "{since}"`'
    node: str
    level: str
    since: str


@dataclass(frozen=True)
class MissingNode(Diagnostic):
    title: ClassVar[str] = "the module has no {what}"
    label: ClassVar[str] = "a {level} module needs it"
    help: ClassVar[str] = "write `{example}`"
    what: str
    level: str
    example: str


# cascades


@dataclass(frozen=True)
class BadSize(Diagnostic):
    title: ClassVar[str] = "{node} has {what} = {value}"
    label: ClassVar[str] = "expected {least} or more"
    node: str
    what: str
    value: int
    least: int


@dataclass(frozen=True)
class WrongMix(Diagnostic):
    title: ClassVar[str] = "`mixed` lists {listed} nodes, the cluster has {nodes}"
    label: ClassVar[str] = "the first number of each row counts nodes"
    help: ClassVar[str] = "list every node once, in order"
    listed: int
    nodes: int


@dataclass(frozen=True)
class TooManyClips(Diagnostic):
    title: ClassVar[str] = "{node} has {clips} clips in a forward, stage `{stage}` takes {most}"
    help: ClassVar[str] = "partition the clips again; the model's graph was captured for that many"
    node: str
    clips: int
    stage: str
    most: int


@dataclass(frozen=True)
class UnknownGraphs(Diagnostic):
    title: ClassVar[str] = "{stage} has graphs = {graphs}"
    help: ClassVar[str] = 'write "shapes", "none", or nothing: one graph for all shapes'
    stage: str
    graphs: str


@dataclass(frozen=True)
class WrongBatch(Diagnostic):
    title: ClassVar[str] = "{node} lists {clips} clips and says {batch}"
    label: ClassVar[str] = "`{batch} x` should be `{clips} x`"
    node: str
    clips: int
    batch: int


@dataclass(frozen=True)
class FrozenStage(Diagnostic):
    title: ClassVar[str] = "{node} would train stage `@{stage}`, which is frozen"
    label: ClassVar[str] = "needs gradients"
    help: ClassVar[str] = "use `encode` or `forward`, or write `stage @{stage} trained`"
    node: str
    stage: str


@dataclass(frozen=True)
class NoCost(Diagnostic):
    title: ClassVar[str] = "nothing says how long {node} takes"
    label: ClassVar[str] = "no `times`, and stage `@{stage}` has no `{name}`"
    help: ClassVar[str] = "give the stage `{name}`, a formula in ms, or the cascade `times`"
    node: str
    stage: str
    name: str


@dataclass(frozen=True)
class TooManyRanks(Diagnostic):
    title: ClassVar[str] = "the cluster has {nodes} nodes of {gpus}, more than {most} GPUs"
    label: ClassVar[str] = "more than is planned for"
    nodes: int
    gpus: int
    most: int


@dataclass(frozen=True)
class IllegalDegree(Diagnostic):
    title: ClassVar[str] = "{node} has degree {degree}"
    label: ClassVar[str] = "{reason}"
    node: str
    degree: int
    reason: str


@dataclass(frozen=True)
class WrongRankCount(Diagnostic):
    title: ClassVar[str] = "{node} has degree {degree} and {ranks}"
    label: ClassVar[str] = "one rank for each of its degree"
    node: str
    degree: int
    ranks: str


@dataclass(frozen=True)
class WrongSide(Diagnostic):
    title: ClassVar[str] = "{node} runs {side} clips side by side and has {batch}"
    label: ClassVar[str] = "does not divide its clips"
    help: ClassVar[str] = "clips side by side are equally many on all ranks: write a divisor of {batch}"
    node: str
    side: int
    batch: int


@dataclass(frozen=True)
class WrongUnconditional(Diagnostic):
    title: ClassVar[str] = "{node} says unconditional = {value}, {reason}"
    label: ClassVar[str] = "the ranks of its unconditional branch"
    help: ClassVar[str] = (
        "write `[ulysses, ring]` of the unconditional branch where both branches lie side by side, `side = 2`, and "
        "share tokens evenly; or leave it out"
    )
    node: str
    value: str
    reason: str


@dataclass(frozen=True)
class WrongRecompute(Diagnostic):
    title: ClassVar[str] = "{node} recomputes {count} of the {blocks} blocks of `{stage}`"
    label: ClassVar[str] = "not a number of its blocks"
    help: ClassVar[str] = "write 0 to {blocks}, or `true` for all of them"
    node: str
    count: int
    blocks: int
    stage: str


@dataclass(frozen=True)
class UnknownBlocks(Diagnostic):
    title: ClassVar[str] = "{node} recomputes {count} blocks of `{stage}`, which does not say how many it has"
    label: ClassVar[str] = "no part of its blocks can be named"
    help: ClassVar[str] = "write `true` for all of them, or say of `{stage}` what its `layers` are"
    node: str
    count: int
    stage: str


@dataclass(frozen=True)
class WrongSpared(Diagnostic):
    title: ClassVar[str] = "{node} says of {count} layers what recomputing them saves, and has {layers}"
    label: ClassVar[str] = "runs of {count} layers together"
    help: ClassVar[str] = "every layer is in one run, in the order of `layers`"
    node: str
    count: int
    layers: int


@dataclass(frozen=True)
class WrongCell(Diagnostic):
    title: ClassVar[str] = "{node} is dealt out over cells of {cell} ranks, and there are {nodes} x {gpus}"
    label: ClassVar[str] = "cells of {cell}"
    help: ClassVar[str] = "a cell divides the ranks of a machine, or holds whole machines and divides all ranks"
    node: str
    cell: int
    nodes: int
    gpus: int


@dataclass(frozen=True)
class WrongHost(Diagnostic):
    title: ClassVar[str] = "{node} has {listed} in host memory"
    label: ClassVar[str] = "no such list"
    help: ClassVar[str] = (
        '`host` is ["optimizer"], ["optimizer", "parameters"] or ["optimizer", "parameters", "inputs"]; '
        "with parameters the stage has a `cell`, of one rank or more"
    )
    node: str
    listed: str


@dataclass(frozen=True)
class PartOfACell(Diagnostic):
    title: ClassVar[str] = "{node} takes ranks {ranks}, which are no whole cells of {cell}"
    label: ClassVar[str] = "no whole cells"
    help: ClassVar[str] = (
        "the members of a cell hold the parameters of `{stage}` together, so they run its cascades together: "
        "name ranks {cell} by {cell}, from a multiple of {cell} on"
    )
    node: str
    ranks: str
    cell: int
    stage: str


@dataclass(frozen=True)
class RankOutside(Diagnostic):
    title: ClassVar[str] = "{node} names rank {rank}, and the cluster ends at rank {last}"
    label: ClassVar[str] = "no such rank"
    help: ClassVar[str] = "the cluster has {nodes} x {gpus} ranks, 0 to {last}"
    node: str
    rank: int
    last: int
    nodes: int
    gpus: int


@dataclass(frozen=True)
class NoRanks(Diagnostic):
    title: ClassVar[str] = "{node} names no ranks"
    label: ClassVar[str] = "an empty list"
    help: ClassVar[str] = "name the ranks that take part, or leave `ranks` out"
    node: str


@dataclass(frozen=True)
class RepeatedRank(Diagnostic):
    title: ClassVar[str] = "{node} names rank {rank} twice"
    label: ClassVar[str] = "each rank once"
    node: str
    rank: int


@dataclass(frozen=True)
class EndsBeforeStart(Diagnostic):
    title: ClassVar[str] = "{node} ends at {end} ms and starts at {start} ms"
    label: ClassVar[str] = "ends before it starts"
    node: str
    start: str
    end: str


@dataclass(frozen=True)
class StartsTooEarly(Diagnostic):
    title: ClassVar[str] = "{node} starts at {start} ms, before its input `%{input}` ends at {end} ms"
    label: ClassVar[str] = "starts too early"
    help: ClassVar[str] = "start it at {end} ms or later"
    node: str
    start: str
    input: str
    end: str


@dataclass(frozen=True)
class WrongMakespan(Diagnostic):
    title: ClassVar[str] = "the makespan is {makespan} ms, and {node} ends at {end} ms"
    label: ClassVar[str] = "ends after the makespan"
    node: str
    makespan: str
    end: str


@dataclass(frozen=True)
class TwoAtOnce(Diagnostic):
    title: ClassVar[str] = "rank {rank} is in {node} and in `%{other}` at once, at {time} ms"
    label: ClassVar[str] = "starts while `%{other}` runs"
    help: ClassVar[str] = "start it later, or on other ranks"
    rank: int
    node: str
    other: str
    time: str


@dataclass(frozen=True)
class WrongProduct(Diagnostic):
    title: ClassVar[str] = "{node} has ulysses {ulysses} x ring {ring}, and degree {degree}"
    label: ClassVar[str] = "the product is the degree"
    node: str
    ulysses: int
    ring: int
    degree: int


@dataclass(frozen=True)
class WrongShards(Diagnostic):
    title: ClassVar[str] = "{node} has shards {what}"
    label: ClassVar[str] = "expected {expected}"
    node: str
    what: str
    expected: str


@dataclass(frozen=True)
class NotReduced(Diagnostic):
    title: ClassVar[str] = "stage `@{stage}` is trained, and has {count} `{what}`"
    label: ClassVar[str] = "expected exactly one"
    help: ClassVar[str] = "write `{what} @{stage}` once, after the cascades"
    stage: str
    count: str
    what: str


# graphs


@dataclass(frozen=True)
class UnknownFusedOp(Diagnostic):
    title: ClassVar[str] = "{node} fuses `%{op}`, which its graph does not have"
    label: ClassVar[str] = "no operation `%{op}`"
    help: ClassVar[str] = "{remedy}"
    node: str
    op: str
    remedy: str


@dataclass(frozen=True)
class FusedTwice(Diagnostic):
    title: ClassVar[str] = "{node} fuses `%{op}`, which is in `@{other}`"
    label: ClassVar[str] = "the second region with `%{op}`"
    help: ClassVar[str] = "an operation runs once: leave it out of one of them"
    node: str
    op: str
    other: str


@dataclass(frozen=True)
class FusedCycle(Diagnostic):
    title: ClassVar[str] = "{node} waits for itself: something outside it reads what it makes, and it reads that"
    label: ClassVar[str] = "neither can run first"
    help: ClassVar[str] = "split the region where its value leaves it"
    node: str


@dataclass(frozen=True)
class UnknownOperand(Diagnostic):
    title: ClassVar[str] = "{node} reads `%{operand}`, which nothing before it makes"
    label: ClassVar[str] = "no `%{operand}` above"
    help: ClassVar[str] = "{remedy}"
    node: str
    operand: str
    remedy: str
