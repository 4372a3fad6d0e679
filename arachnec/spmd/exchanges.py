"""What factorised attention sends. In: a captured model and its blocks' rewrites. Out: the stage's attributes.

Tokens are dealt out over frames, then over places: inside blocks (``ShardedBlock.exchanges``), and between blocks that
take views of each other's outputs. What moves is proportional to the tokens, so one recording tells it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from arachnec.ir.values import Value
from arachnec.spmd.rewrite import Note, ShardedBlock
from arachnec.tracing.captured import CapturedBlock, CapturedModel, Origin
from arachnec.tracing.cost import GIB, polynomial
from arachnec.tracing.dims import B, S


def exchange_attributes(captured: CapturedModel, shared: Sequence[ShardedBlock]) -> dict[str, Value | None]:
    """``halo``: the tokens that are dealt out anew in a forward, and ``exchanges``, how often; ``attentions`` and
    ``traffic`` of those alone that remain distributed. Nothing for a model without exchanges."""
    blocks = [shared[call.block] for call in captured.calls] if shared else []
    between = [_output_bytes(captured, origin) for origin in captured.handed] if shared else []
    dealt = [note for block in blocks for note in block.exchanges]
    if not (dealt or between):
        return {}
    attentions = [note for block in blocks for note in block.attentions]
    first = captured.blocks[0]
    clips = first.examples[0][B]
    tokens = clips * (first.fixed.get(S) or captured.tokens)

    def formula(sizes: Sequence[float]) -> Value:
        return polynomial(sum(sizes) / tokens * B * S, "GiB", GIB)

    return {
        "halo": formula([*between, *(_bytes(note, first) for note in dealt)]),
        "exchanges": len(between) + len(dealt),
        "attentions": len(attentions) or None,
        "traffic": formula([_bytes(note, first) for note in attentions]) if attentions else None,
    }


def _bytes(note: Note, block: CapturedBlock) -> float:
    return float(note.bytes.subs(block.examples[0]))


def _output_bytes(captured: CapturedModel, origin: Origin) -> float:
    block = captured.blocks[captured.calls[origin.call].block]
    outputs = block.exported.graph.output_node().args[0]
    assert isinstance(outputs, tuple)
    node = outputs[origin.output]
    assert isinstance(node, fx.Node)
    sizes = (float(size.subs(block.examples[0])) for size in block.output_dims[origin.output])
    return float(math.prod(sizes) * node.meta["val"].dtype.itemsize)
