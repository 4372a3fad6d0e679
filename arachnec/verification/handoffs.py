"""Rule 2, of messages: every send has its receive, first in, first out, as gloo and NCCL match them, of the same bytes.

A program carries the bytes of every message. The simulator and the limits of a phase's time are computed with them,
and ranks that mean messages of other sizes do not understand each other. They are as many as the stages' formulas
and parameters say, or more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.stage_handoffs import between_stages, in_ranges, ranges_to, source_of
from arachnec.analysis.uses import COMPUTE, Values, bucket_of, moved_by, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.nodes import Instruction, Program, Stage, integer
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.stage_sizes import element_bytes, gradient_bytes, gradient_element_bytes, layers_of
from arachnec.verification.memory import RELATIVE, ROUNDING_GIB, Handed


@dataclass(frozen=True)
class Handoff:
    """A send and the receive that it is matched to, by their indices in the lists of their ranks."""

    source: int
    send: int
    target: int
    receive: int


Pairs: TypeAlias = dict[tuple[int, int], list[tuple[int, Instruction]]]


def match_handoffs(values: Values, problems: list[Diagnostic]) -> Iterator[Handoff]:
    """All handoffs of a module, those from one rank to another in their order; what does not match is a problem."""
    sends, receives = by_pair(values)
    for source, target in sorted({*sends, *receives}):
        sent, received = sends[source, target], receives[source, target]
        if [step.target for _, step in sent] != [step.target for _, step in received]:
            unmatched = list(_unmatched(source, target, sent, received))
            problems += unmatched
            if unmatched:
                continue
        for number, ((i, send), (j, receive)) in enumerate(zip(sent, received, strict=True), 1):
            if send.target != receive.target:
                problems.append(
                    Mistake(
                        receive.span,
                        f"handoff number {number} from rank {source} to rank {target} is %{send.target} where it is "
                        f"sent and %{receive.target} where it is received",
                        kind="swapped handoff",
                        label=f"receives %{receive.target} here",
                        help=(
                            f"values arrive in the order they were sent: receive %{send.target} first, or the two are "
                            "silently swapped"
                        ),
                    )
                )
                break
            yield Handoff(source, i, target, j)


def check_sources(values: Values) -> Iterator[Diagnostic]:
    """What goes from stage to stage comes from the ranks that have the receiver's parts of it, from each of them."""
    stages = {stage.name: stage for stage in values.module.stages}
    sources: dict[tuple[str, int], tuple[int, ...]] = {}
    for consumer in values.module.cascades:
        for name in consumer.inputs:
            producer = values.cascades.get(name)
            if producer is None or not between_stages(producer, consumer):
                continue
            if producer.side != consumer.side:
                yield Mistake(
                    consumer.span,
                    f"%{name} has {producer.side} clips side by side, and %{consumer.name}, which reads it, has "
                    f"{consumer.side}",
                    kind="other side",
                    label=f"{consumer.side} side by side",
                    help=(
                        f"a micro-batch has as many clips side by side on every stage: write `side = {producer.side}`"
                    ),
                )
            elif in_ranges(producer, consumer, stages, values.cascades):
                for rank in consumer.ranks:
                    parts = ranges_to(producer, consumer, rank, values.cascades)
                    sources[name, rank] = tuple(part.source for part in parts)
            else:
                sources |= {(name, rank): (source_of(producer, consumer, rank),) for rank in consumer.ranks}
    for program in values.module.programs if sources else ():
        yield from _sources_on(values, program, sources)


def _sources_on(
    values: Values, program: Program, sources: Mapping[tuple[str, int], tuple[int, ...]]
) -> Iterator[Diagnostic]:
    got: defaultdict[str, set[int]] = defaultdict(set)
    for step in program.instructions:
        own = sources.get((step.target, program.rank))
        if step.op == "receive" and own is not None:
            if step.peers[0] not in own:
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}`, and its part of %{step.target} is on rank {own[0]}",
                    kind="wrong source",
                    label="another rank's part",
                    help=(
                        f"every rank of a stage hands on what is its own: write `receive %{step.target} from {own[0]}`"
                    ),
                )
            got[step.target].add(step.peers[0])
        for name in values.reads(step) if step.op in COMPUTE else ():
            parts = sources.get((name, program.rank), ())
            if got[name] and (missing := set(parts) - got[name]):
                source = min(missing)
                yield Mistake(
                    step.span,
                    f"rank {program.rank} has `{written(step)}`, and its tokens of %{name} on rank "
                    f"{source} are not there yet",
                    kind="part missing",
                    label=f"reads what rank {source} has, too",
                    help=f"write `receive %{name} from {source}` before it, once",
                )


def by_pair(values: Values) -> tuple[Pairs, Pairs]:
    """Sends and receives from one rank to another, in the order of their lists, with their indices there."""
    sends: Pairs = defaultdict(list)
    receives: Pairs = defaultdict(list)
    for program in values.module.programs:
        for index, instruction in enumerate(program.instructions):
            if instruction.op == "send":
                sends[program.rank, instruction.peers[0]].append((index, instruction))
            elif instruction.op == "receive":
                receives[instruction.peers[0], program.rank].append((index, instruction))
    return sends, receives


def _unmatched(
    source: int, target: int, sent: list[tuple[int, Instruction]], received: list[tuple[int, Instruction]]
) -> Iterator[Diagnostic]:
    surplus = Counter(i.target for _, i in sent)
    surplus.subtract(i.target for _, i in received)
    for name, more in surplus.items():
        if more > 0:
            last = [i for _, i in sent if i.target == name][-1]
            yield Mistake(
                last.span,
                f"rank {source} has `{written(last)}`, and rank {target} never receives it",
                kind="unmatched send",
                label="no receive for it",
                help=f"give rank {target} a `receive %{name} from {source}`, or drop the send",
            )
        if more < 0:
            last = [i for _, i in received if i.target == name][-1]
            yield Mistake(
                last.span,
                f"rank {target} has `{written(last)}`, and rank {source} never sends it",
                kind="unmatched receive",
                label="no send for it",
                help=f"give rank {source} a `send %{name} to {target}`, or drop the receive",
            )


GIB = 2**30


def _unequal_bytes(rank: int, step: Instruction, other: int, expected: int) -> Mistake:
    size = bytes_of(step)
    return Mistake(
        _at(step),
        f"rank {rank} has `{written(step)}` of {size} bytes, and on rank {other} it has {expected}",
        kind="unequal bytes",
        label=f"bytes = {size}",
        help=f"one message has one size: write `bytes = {expected}`",
    )


def check_message_sizes(values: Values, handed: Mapping[Handed, float]) -> Iterator[Diagnostic]:
    """``handed`` is what ``handed_sizes`` of the module is."""
    sends, receives = by_pair(values)
    for (source, target), received in receives.items():
        for (_, send), (_, receive) in zip(sends.get((source, target), ()), received, strict=False):
            if bytes_of(send) != bytes_of(receive) and send.target == receive.target:  # else they are matched wrongly
                yield _unequal_bytes(target, receive, source, bytes_of(send))
    yield from _of_collectives(values)
    yield from _too_few(values, handed)


def bytes_of(step: Instruction) -> int:
    return integer(step.attrs["bytes"])


def _of_collectives(values: Values) -> Iterator[Diagnostic]:
    first: dict[Hashable, tuple[int, Instruction]] = {}
    for program in values.module.programs:
        times: dict[Hashable, Iterator[int]] = defaultdict(count)
        for step in program.instructions:
            if step.op not in ("reduce", "gather"):
                continue
            key = step.op, step.target, step.peers, moved_by(step)
            rank, other = first.setdefault((*key, next(times[key])), (program.rank, step))
            if other is not step and bytes_of(other) != bytes_of(step):
                yield _unequal_bytes(program.rank, step, rank, bytes_of(other))


def _too_few(values: Values, handed: Mapping[Handed, float]) -> Iterator[Diagnostic]:
    module = values.module
    stages = {stage.name: stage for stage in module.stages}
    stated = {node.stage: integer(node.attrs["bytes"]) for node in module.reductions if "bytes" in node.attrs}
    collected: dict[Hashable, float] = {}  # the ranks of a group have the same
    for program in module.programs:
        for step in program.instructions:
            if step.op == "receive":
                stage = values.cascades[step.target].stage
                places = ((step.target, program.rank, source) for source in (step.peers[0], None))
                right = (max(handed.get(place, 0.0) for place in places) - ROUNDING_GIB) * GIB
            elif step.op in ("reduce", "gather") and step.target not in stated and "tied" not in step.attrs:
                stage, key = step.target, (step.op, step.target, moved_by(step))
                if key not in collected:
                    collected[key] = _collected(step, stages[stage])
                right = collected[key]
            else:
                continue
            if bytes_of(step) < right * (1 - RELATIVE) - 1:
                size, least = bytes_of(step), round(right)
                yield Mistake(
                    _at(step),
                    f"rank {program.rank} has `{written(step)}` of {size} bytes, and @{stage} says {least}",
                    kind="too few bytes",
                    label=f"bytes = {size}",
                    help=(f"that follows from the stage's formulas and parameters: write at least `bytes = {least}`"),
                )


def _collected(step: Instruction, stage: Stage) -> float:
    """Bytes of a rank's share in a reduce, or in a gather of updated parameters."""
    cell = cell_of(stage) or 1
    if step.op == "gather":
        sizes = layer_sizes(stage)
        return sum(sizes[layer].trained for layer in layers_listed(step, "layers")) * element_bytes(stage) / cell
    bucket = bucket_of(step)
    if bucket is None:
        return gradient_bytes(stage) / cell
    blocks = [parameters * gradient_element_bytes(stage) for _, parameters in layers_of(stage)]
    rest = max(0.0, gradient_bytes(stage) - sum(blocks)) if bucket[1] else 0.0
    return (sum(blocks[layer] for layer in bucket[0] if layer in range(len(blocks))) + rest) / cell


def _at(step: Instruction) -> Span | None:
    return step.attrs.span("bytes") or step.span
