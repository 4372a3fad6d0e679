"""Which rank of a stage hands its value on to which rank of the next. In: two cascades of a pipeline. Out: the rank.

After a forward all ranks of a clip have the same. After a backward each has a part that is its own
(docs/sequence_parallel.md), so ranks of stages of one degree go in pairs: every part arrives once. Where the degrees
differ the parts have been added up, and each rank serves as many as there are more of the others.

What blocks make of the tokens is not gathered between stages: where both share them alike each rank hands on its own,
else a rank gets its range of them in parts, from every rank that has some of it. All else comes from one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from arachnec.ir.nodes import Cascade, Phase, Stage, integers
from arachnec.ir.parameter_cells import side_by_side
from arachnec.ir.stage_sizes import evaluated

STAGED = (Phase.FORWARD, Phase.BACKWARD)


@dataclass(frozen=True)
class TokenRange:
    """Tokens ``first`` to ``end`` of a micro-batch go from ``source`` to ``target``; ``rest``: all else goes along."""

    source: int
    target: int
    first: int
    end: int
    rest: bool


def between_stages(producer: Cascade, consumer: Cascade) -> bool:
    """Whether a stage hands a value on to another one."""
    return producer.phase in STAGED and producer.phase is consumer.phase and producer.stage != consumer.stage


def source_of(producer: Cascade, consumer: Cascade, target: int) -> int:
    """The rank from which ``target``, a rank of ``consumer``, gets what the stage before or behind hands on."""
    position, width = consumer.ranks.index(target), consumer.degree
    sides = side_by_side(producer.ranks, producer.side)
    mine = sides[min(position // width, len(sides) - 1)]
    return mine[position % width * len(mine) // width]


def forward_of(cascade: Cascade, named: Mapping[str, Cascade]) -> Cascade:
    """The forward of a stage's backward; a forward itself."""
    inputs = (named[name] for name in cascade.inputs if name in named)
    own = (other for other in inputs if other.stage == cascade.stage and other.phase is Phase.FORWARD)
    return cascade if cascade.phase is Phase.FORWARD else next(own, cascade)


def share_tokens_alike(producer: Cascade, consumer: Cascade, named: Mapping[str, Cascade]) -> bool:
    """Whether rank by rank two stages have the same tokens of a micro-batch, each a part of them."""
    if not between_stages(producer, consumer) or producer.degree == 1:
        return False
    one, other = forward_of(producer, named), forward_of(consumer, named)
    return one.degree == other.degree and one.attrs.get("shards") == other.attrs.get("shards")


def in_ranges(producer: Cascade, consumer: Cascade, stages: Mapping[str, Stage], named: Mapping[str, Cascade]) -> bool:
    """Whether a rank gets its tokens in parts, from all that have some: of a stage that shares them otherwise."""
    if not between_stages(producer, consumer) or max(producer.degree, consumer.degree) == 1:
        return False
    told = "output_tokens" in stages[_of(producer, consumer).stage].attrs
    apart = set(producer.ranks).isdisjoint(consumer.ranks)
    return told and apart and not share_tokens_alike(producer, consumer, named)


def ranges_to(
    producer: Cascade, consumer: Cascade, target: int, named: Mapping[str, Cascade]
) -> tuple[TokenRange, ...]:
    """The parts of a rank's tokens, in their order, and whose they are. One of them brings all else along."""
    position = consumer.ranks.index(target)
    sides = side_by_side(producer.ranks, producer.side)
    mine = sides[min(position // consumer.degree, len(sides) - 1)]
    own = _tokens_of(consumer, named)[position % consumer.degree]
    first_source = source_of(producer, consumer, target)
    ranges = []
    for source, (first, end) in zip(mine, _tokens_of(producer, named), strict=True):
        first, end = max(first, own[0]), min(end, own[1])
        if first < end or source == first_source:
            ranges.append(TokenRange(source, target, first, max(first, end), source == first_source))
    return tuple(ranges)


def ranges_from(
    producer: Cascade, consumer: Cascade, source: int, named: Mapping[str, Cascade]
) -> tuple[TokenRange, ...]:
    """What a rank hands on, by the receivers' places."""
    every = (ranges_to(producer, consumer, target, named) for target in consumer.ranks)
    return tuple(part for parts in every for part in parts if part.source == source)


def shards_of(cascade: Cascade, named: Mapping[str, Cascade]) -> tuple[int, ...]:
    """The tokens of each rank of a stage's forward or backward."""
    forward = forward_of(cascade, named)
    if (listed := forward.attrs.get("shards")) is not None:
        return integers(listed)
    share, rest = divmod(forward.tokens, forward.degree)
    return (share + 1,) * rest + (share,) * (forward.degree - rest)


def _tokens_of(cascade: Cascade, named: Mapping[str, Cascade]) -> list[tuple[int, int]]:
    """The first token and the end of each of its ranks."""
    shards = shards_of(cascade, named)
    return [(end - size, end) for size, end in zip(shards, accumulate(shards), strict=True)]


def _of(producer: Cascade, consumer: Cascade) -> Cascade:
    """The one whose stage says how large the value is: a gradient is as large as the output that it belongs to."""
    return consumer if producer.phase in (Phase.BACKWARD, Phase.WEIGHT) else producer


def parts_handed(
    producer: Cascade, consumer: Cascade, stages: Mapping[str, Stage], named: Mapping[str, Cascade]
) -> Iterator[tuple[int, int, float]]:
    """What goes from one stage to another: from which rank, to which, and how many GiB; by the receivers' places."""
    size = handed_gib(producer, consumer, stages, named)
    if not in_ranges(producer, consumer, stages, named):
        yield from ((source_of(producer, consumer, target), target, size) for target in consumer.ranks)
        return
    of = _of(producer, consumer)
    tokens = evaluated(stages[of.stage], "output_tokens", of) / consumer.side
    rest = max(0.0, evaluated(stages[of.stage], "output", of) / consumer.side - tokens)
    for target in consumer.ranks:
        for part in ranges_to(producer, consumer, target, named):
            own = tokens * (part.end - part.first) / of.tokens
            yield part.source, target, own + (rest if part.rest else 0.0)


def handed_gib(
    producer: Cascade, consumer: Cascade, stages: Mapping[str, Stage], named: Mapping[str, Cascade]
) -> float:
    """GiB that each rank of ``consumer`` gets of what ``producer`` hands on, at most; 0 where the stage does not say.

    Of clips side by side every rank gets those of its own side, and of ``output_tokens`` its own tokens.
    """
    of = _of(producer, consumer)
    size = evaluated(stages[of.stage], "output", of)
    if share_tokens_alike(producer, consumer, named) or in_ranges(producer, consumer, stages, named):
        size -= evaluated(stages[of.stage], "output_tokens", of) * (1 - max(shards_of(consumer, named)) / of.tokens)
    whole = producer.phase is Phase.ENCODE or consumer.phase is Phase.DENOISE
    return size / (1 if whole else consumer.side)
