"""Dense or sparse: which way attention of a clip is faster, from measured speeds. Plain numbers.

The choice depends on the model, the clip's length and the densities alone. So no plan changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.kernels.sparse.token_cubes import CELL


@dataclass(frozen=True)
class PathSpeed:
    """Nanoseconds of forward and backward of one head, by least squares over lengths and densities.

    ``head_size`` is that of the heads measured: pairs and tokens cost in proportion to it.
    """

    dense_pair: float  # a query and a key
    dense_token: float
    sparse_pair: float  # one that is computed
    cell_pair: float  # of the predictor's table
    sparse_token: float  # order, gathered keys, features
    sparse_call: float
    head_size: int = 64

    def dense(self, tokens: int, head_size: int) -> float:
        return (self.dense_pair * tokens**2 + self.dense_token * tokens) * head_size / self.head_size

    def sparse(self, tokens: int, head_size: int, density: float, cell: int = CELL) -> float:
        pairs = (self.sparse_pair * density * tokens**2 + self.sparse_token * tokens) * head_size / self.head_size
        return pairs + self.cell_pair * (tokens / cell) ** 2 + self.sparse_call


CPU = PathSpeed(7.6, 630.0, 9.0, 0.0, 3200.0, 7.2e5)  # benchmarks/results/sparse_cpu_speed.json


def sparse_pays(tokens: int, head_size: int, densities: Sequence[float], speed: PathSpeed = CPU) -> bool:
    """Whether the sparse way takes less time than the dense one for heads of these densities."""
    sparse = sum(speed.sparse(tokens, head_size, density) for density in densities)
    return sparse < len(densities) * speed.dense(tokens, head_size)
