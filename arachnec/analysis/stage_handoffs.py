"""Which rank of a stage hands its value on to which rank of the next. In: two cascades of a pipeline. Out: the rank.

After a forward all ranks of a clip have the same. After a backward each has a part that is its own
(docs/sequence_parallel.md), so ranks of stages of one degree go in pairs: every part arrives once. Where the degrees
differ the parts have been added up, and each rank serves as many as there are more of the others.
"""

from __future__ import annotations

from arachnec.ir.nodes import Cascade, Phase
from arachnec.ir.parameter_cells import side_by_side

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
