"""Errors of a module that parsed: one Diagnostic per rule of the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic

# attributes


@dataclass(frozen=True)
class UnknownAttribute(Diagnostic):
    title = "{node} has no attribute `{name}`"
    label = "no such attribute"
    help = "{remedy}"
    node: str
    name: str
    remedy: str


@dataclass(frozen=True)
class EarlyAttribute(Diagnostic):
    title = "{node} cannot have `{name}` yet: the module is {level}"
    label = "only from level {since} on"
    help = 'remove it, or say `level = "{since}"`'
    node: str
    name: str
    level: str
    since: str


@dataclass(frozen=True)
class MissingAttribute(Diagnostic):
    title = "{node} lacks the attribute `{name}`"
    label = "a {level} module needs it"
    help = "`{name}` is {kind}: {meaning}"
    node: str
    name: str
    level: str
    kind: str
    meaning: str


@dataclass(frozen=True)
class WrongType(Diagnostic):
    title = "`{name}` of {node} is {found}"
    label = "expected {expected}"
    help = "`{name}`: {meaning}"
    node: str
    name: str
    found: str
    expected: str
    meaning: str


@dataclass(frozen=True)
class WrongUnit(Diagnostic):
    title = "`{name}` of {node} is in {found}, not in {unit}"
    label = "expected {unit}"
    help = "{remedy}"
    node: str
    name: str
    found: str
    unit: str
    remedy: str


@dataclass(frozen=True)
class UnknownVariable(Diagnostic):
    title = "the formula `{name}` of {node} speaks of `{variable}`"
    label = "no such variable"
    help = "variables are B (clips in the micro-batch), S (tokens of a clip), T (text tokens of a clip)"
    node: str
    name: str
    variable: str


@dataclass(frozen=True)
class OutOfBounds(Diagnostic):
    title = "`{name}` of {node} has {found}"
    label = "expected {expected}"
    help = "`{name}`: {meaning}"
    node: str
    name: str
    found: str
    expected: str
    meaning: str


# names


@dataclass(frozen=True)
class DuplicateName(Diagnostic):
    title = "there are two of {node}"
    label = "the second"
    help = "give each its own name"
    node: str


@dataclass(frozen=True)
class UnknownReference(Diagnostic):
    title = "{node} speaks of {what}, which is not in the module"
    label = "there is no {what}"
    help = "{remedy}"
    node: str
    what: str
    remedy: str


@dataclass(frozen=True)
class UsedBeforeMade(Diagnostic):
    title = "{node} reads `%{input}`, which stands after it"
    label = "reads `%{input}`"
    help = "move `%{input}` above: inputs come before their use"
    node: str
    input: str


@dataclass(frozen=True)
class Cycle(Diagnostic):
    title = "{node} waits for itself: {path}"
    label = "in a cycle"
    help = "remove one of these inputs"
    node: str
    path: str


@dataclass(frozen=True)
class EarlyNode(Diagnostic):
    title = "{node} cannot stand in a {level} module"
    label = "only from level {since} on"
    help = 'remove it, or say `level = "{since}"`'
    node: str
    level: str
    since: str


@dataclass(frozen=True)
class MissingNode(Diagnostic):
    title = "the module has no {what}"
    label = "a {level} module needs it"
    help = "write `{example}`"
    what: str
    level: str
    example: str


# cascades


@dataclass(frozen=True)
class BadSize(Diagnostic):
    title = "{node} has {what} = {value}"
    label = "expected {least} or more"
    node: str
    what: str
    value: int
    least: int


@dataclass(frozen=True)
class WrongMix(Diagnostic):
    title = "`mixed` lists {listed} nodes, the cluster has {nodes}"
    label = "the first number of each row counts nodes"
    help = "list every node once, in order"
    listed: int
    nodes: int


@dataclass(frozen=True)
class TooManyClips(Diagnostic):
    title = "{node} has {clips} clips in a forward, stage `{stage}` takes {most}"
    help = "partition the clips again; the model's graph was captured for that many"
    node: str
    clips: int
    stage: str
    most: int


@dataclass(frozen=True)
class UnknownGraphs(Diagnostic):
    title = "{stage} has graphs = {graphs}"
    help = 'write "shapes", "none", or nothing: one graph for all shapes'
    stage: str
    graphs: str


@dataclass(frozen=True)
class WrongBatch(Diagnostic):
    title = "{node} lists {clips} clips and says {batch}"
    label = "`{batch} x` should be `{clips} x`"
    node: str
    clips: int
    batch: int


@dataclass(frozen=True)
class FrozenStage(Diagnostic):
    title = "{node} would train stage `@{stage}`, which is frozen"
    label = "needs gradients"
    help = "use `encode` or `forward`, or write `stage @{stage} trained`"
    node: str
    stage: str


@dataclass(frozen=True)
class NoCost(Diagnostic):
    title = "nothing says how long {node} takes"
    label = "no `times`, and stage `@{stage}` has no `{name}`"
    help = "give the stage `{name}`, a formula in ms, or the cascade `times`"
    node: str
    stage: str
    name: str


@dataclass(frozen=True)
class TooManyRanks(Diagnostic):
    title = "the cluster has {nodes} nodes of {gpus}, more than {most} GPUs"
    label = "more than is planned for"
    nodes: int
    gpus: int
    most: int


@dataclass(frozen=True)
class IllegalDegree(Diagnostic):
    title = "{node} has degree {degree}"
    label = "{reason}"
    node: str
    degree: int
    reason: str


@dataclass(frozen=True)
class WrongRankCount(Diagnostic):
    title = "{node} has degree {degree} and {ranks}"
    label = "one rank for each of its degree"
    node: str
    degree: int
    ranks: str


@dataclass(frozen=True)
class WrongSide(Diagnostic):
    title = "{node} runs {side} clips side by side and has {batch}"
    label = "does not divide its clips"
    help = "clips side by side are equally many on all ranks: write a divisor of {batch}"
    node: str
    side: int
    batch: int


@dataclass(frozen=True)
class WrongUnconditional(Diagnostic):
    title = "{node} says unconditional = {value}, {reason}"
    label = "the ranks of its unconditional branch"
    help = (
        "write `[ulysses, ring]` of the unconditional branch where both branches lie side by side, `side = 2`, and "
        "share tokens evenly; or leave it out"
    )
    node: str
    value: str
    reason: str


@dataclass(frozen=True)
class WrongRecompute(Diagnostic):
    title = "{node} recomputes {count} of the {blocks} blocks of `{stage}`"
    label = "not a number of its blocks"
    help = "write 0 to {blocks}, or `true` for all of them"
    node: str
    count: int
    blocks: int
    stage: str


@dataclass(frozen=True)
class UnknownBlocks(Diagnostic):
    title = "{node} recomputes {count} blocks of `{stage}`, which does not say how many it has"
    label = "no part of its blocks can be named"
    help = "write `true` for all of them, or say of `{stage}` what its `layers` are"
    node: str
    count: int
    stage: str


@dataclass(frozen=True)
class WrongSpared(Diagnostic):
    title = "{node} says of {count} layers what recomputing them saves, and has {layers}"
    label = "runs of {count} layers together"
    help = "every layer is in one run, in the order of `layers`"
    node: str
    count: int
    layers: int


@dataclass(frozen=True)
class WrongCell(Diagnostic):
    title = "{node} is dealt out over cells of {cell} ranks, and there are {nodes} x {gpus}"
    label = "cells of {cell}"
    help = "a cell divides the ranks of a machine, or holds whole machines and divides all ranks"
    node: str
    cell: int
    nodes: int
    gpus: int


@dataclass(frozen=True)
class WrongHost(Diagnostic):
    title = "{node} has {listed} in host memory"
    label = "no such list"
    help = (
        '`host` is ["optimizer"], ["optimizer", "parameters"] or ["optimizer", "parameters", "inputs"]; '
        "with parameters the stage has a `cell`, of one rank or more"
    )
    node: str
    listed: str


@dataclass(frozen=True)
class PartOfACell(Diagnostic):
    title = "{node} takes ranks {ranks}, which are no whole cells of {cell}"
    label = "no whole cells"
    help = (
        "the members of a cell hold the parameters of `{stage}` together, so they run its cascades together: "
        "name ranks {cell} by {cell}, from a multiple of {cell} on"
    )
    node: str
    ranks: str
    cell: int
    stage: str


@dataclass(frozen=True)
class RankOutside(Diagnostic):
    title = "{node} names rank {rank}, and the cluster ends at rank {last}"
    label = "no such rank"
    help = "the cluster has {nodes} x {gpus} ranks, 0 to {last}"
    node: str
    rank: int
    last: int
    nodes: int
    gpus: int


@dataclass(frozen=True)
class NoRanks(Diagnostic):
    title = "{node} names no ranks"
    label = "an empty list"
    help = "name the ranks that take part, or leave `ranks` out"
    node: str


@dataclass(frozen=True)
class RepeatedRank(Diagnostic):
    title = "{node} names rank {rank} twice"
    label = "each rank once"
    node: str
    rank: int


@dataclass(frozen=True)
class EndsBeforeStart(Diagnostic):
    title = "{node} ends at {end} ms and starts at {start} ms"
    label = "ends before it starts"
    node: str
    start: str
    end: str


@dataclass(frozen=True)
class StartsTooEarly(Diagnostic):
    title = "{node} starts at {start} ms, before its input `%{input}` ends at {end} ms"
    label = "starts too early"
    help = "start it at {end} ms or later"
    node: str
    start: str
    input: str
    end: str


@dataclass(frozen=True)
class WrongMakespan(Diagnostic):
    title = "the makespan is {makespan} ms, and {node} ends at {end} ms"
    label = "ends after the makespan"
    node: str
    makespan: str
    end: str


@dataclass(frozen=True)
class TwoAtOnce(Diagnostic):
    title = "rank {rank} is in {node} and in `%{other}` at once, at {time} ms"
    label = "starts while `%{other}` runs"
    help = "start it later, or on other ranks"
    rank: int
    node: str
    other: str
    time: str


@dataclass(frozen=True)
class WrongProduct(Diagnostic):
    title = "{node} has ulysses {ulysses} x ring {ring}, and degree {degree}"
    label = "the product is the degree"
    node: str
    ulysses: int
    ring: int
    degree: int


@dataclass(frozen=True)
class WrongShards(Diagnostic):
    title = "{node} has shards {what}"
    label = "expected {expected}"
    node: str
    what: str
    expected: str


@dataclass(frozen=True)
class NotReduced(Diagnostic):
    title = "stage `@{stage}` is trained, and has {count} `{what}`"
    label = "expected exactly one"
    help = "write `{what} @{stage}` once, after the cascades"
    stage: str
    count: str
    what: str


# graphs


@dataclass(frozen=True)
class UnknownFusedOp(Diagnostic):
    title = "{node} fuses `%{op}`, which its graph does not have"
    label = "no operation `%{op}`"
    help = "{remedy}"
    node: str
    op: str
    remedy: str


@dataclass(frozen=True)
class FusedTwice(Diagnostic):
    title = "{node} fuses `%{op}`, which is in `@{other}`"
    label = "the second region with `%{op}`"
    help = "an operation runs once: leave it out of one of them"
    node: str
    op: str
    other: str


@dataclass(frozen=True)
class FusedCycle(Diagnostic):
    title = "{node} waits for itself: something outside it reads what it makes, and it reads that"
    label = "neither can run first"
    help = "split the region where its value leaves it"
    node: str


@dataclass(frozen=True)
class UnknownOperand(Diagnostic):
    title = "{node} reads `%{operand}`, which nothing before it makes"
    label = "no `%{operand}` above"
    help = "{remedy}"
    node: str
    operand: str
    remedy: str
