"""Which rank of a stage hands its value on to which rank of the next. In: two cascades of a pipeline. Out: the rank.

After a forward all ranks of a clip have the same. After a backward each has a part that is its own
(docs/sequence_parallel.md), so ranks of stages of one degree go in pairs: every part arrives once. Where the degrees
differ the parts have been added up, and each rank serves as many as there are more of the others.

What blocks make of the tokens is not gathered between stages that share them alike: each rank hands on its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from arachnec.ir.nodes import Cascade, Phase, Stage, integers
from arachnec.ir.parameter_cells import side_by_side
from arachnec.ir.stage_sizes import evaluated, uneven

STAGED = (Phase.FORWARD, Phase.BACKWARD)


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


def handed_gib(
    producer: Cascade, consumer: Cascade, stages: Mapping[str, Stage], named: Mapping[str, Cascade]
) -> float:
    """GiB that each rank of ``consumer`` gets of what ``producer`` hands on, at most; 0 where the stage does not say.

    A backward hands on the gradient of its stage's input, which is as large as the output of the consumer's stage. Of
    clips side by side every rank gets those of its own side, and of ``output_tokens`` its own tokens.
    """
    of = consumer if producer.phase in (Phase.BACKWARD, Phase.WEIGHT) else producer
    size = evaluated(stages[of.stage], "output", of)
    if share_tokens_alike(producer, consumer, named):
        forward = forward_of(producer, named)
        shards = forward.attrs.get("shards")
        even = uneven(forward.tokens, forward.degree)
        most = even if shards is None else max(integers(shards)) / forward.tokens
        size -= evaluated(stages[of.stage], "output_tokens", of) * (1 - most)
    whole = producer.phase is Phase.ENCODE or consumer.phase is Phase.DENOISE
    return size / (1 if whole else consumer.side)
