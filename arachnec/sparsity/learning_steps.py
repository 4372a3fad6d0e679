"""In which steps a layer's predictor learns and is measured: by the step, the layer and whether it runs sparse alone.

So it is the same in every plan and on every cluster. Layers take turns, so that steps take equally long.
docs/sparse_attention.md, "When it learns".
"""

from __future__ import annotations

FIRST = 256  # steps, in each of which a layer that is dense learns
SPARSE_EVERY = 8  # steps, of a layer that is sparse
DENSE_EVERY = 16  # steps behind the first, of one that is dense: what it gains is not known, so it may cost little


def learns(layer: int, step: int, sparse: bool, sparse_every: int = SPARSE_EVERY) -> bool:
    """Whether a layer, by its number in the model, learns in a step. A benchmark asks for other ``sparse_every``."""
    if not sparse and step < FIRST:
        return True
    return (step + layer) % (sparse_every if sparse else DENSE_EVERY) == 0
