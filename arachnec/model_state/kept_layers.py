"""What a checkpoint keeps of a run's sparse layers, read back. In: tensors as ``SparsePredictors.tensors`` names them,
filled by now. Out: what is known of the layers; or one message, where that is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from arachnec.checkpoint.class_states import CLASSES, ClassState, classes_of
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import Heads
from arachnec.model_state.sparsity_history import HISTORY, SparsityHistory


def damaged_layers_error(folder: str, what: str, reason: str) -> UserError:
    return user_error(
        f"the checkpoint {folder} is damaged: {what} {reason}",
        help=(
            "delete this folder, and --resume goes on from the checkpoint before it; or begin anew in "
            "another --checkpoint folder"
        ),
    )


@dataclass(frozen=True)
class KeptLayer:
    """By head of clips of all lengths, and by class of length. ``sparse`` in the next step. An earlier version kept no
    ``spread``, and one no ``classes``."""

    sparsities: Heads
    densities: Heads
    sparse: bool
    spread: Heads | None
    classes: Mapping[int, ClassState] | None


def kept_layers(tensors: Mapping[str, Tensor], names: Mapping[int, str], folder: str) -> dict[int, KeptLayer]:
    """By number of the layers with these ``names``. Raises ``UserError`` for what no run can have measured."""
    known = {}
    for number, name in names.items():
        try:
            known[number] = _layer(tensors, name)
        except ValueError as wrong:
            raise damaged_layers_error(folder, f"the state of sparse layer `{name}`", str(wrong)) from None
    return known


def kept_history(tensors: Mapping[str, Tensor], names: Mapping[int, str], folder: str) -> SparsityHistory:
    """Of the layers with these ``names``; an earlier version kept none. Raises ``UserError`` where it has no steps."""
    if f"{HISTORY}steps" not in tensors:
        return SparsityHistory()
    rows = {number: tensors[f"{HISTORY}layer/{name}"] for number, name in names.items()}
    by_class = {n: tensors[f"{HISTORY}by-class/{name}"] for n, name in names.items() if f"{CLASSES}{name}" in tensors}
    try:
        return SparsityHistory.of(tensors[f"{HISTORY}steps"], rows, by_class)
    except ValueError as wrong:
        raise damaged_layers_error(folder, "the history of sparse layers", str(wrong)) from None


def _layer(tensors: Mapping[str, Tensor], name: str) -> KeptLayer:
    *values, sparse = tensors[f"predictor/layer/{name}"].tolist()
    heads = len(values) // 2
    sparsities, densities = tuple(values[:heads]), tuple(values[heads:])
    spread = tensors.get(f"{HISTORY}spread/{name}")
    table = tensors.get(f"{CLASSES}{name}")
    classes = None if table is None else classes_of(table, heads)
    known = (*sparsities, *densities, *(() if spread is None else spread.tolist()))
    if not all(map(math.isfinite, known)):
        raise ValueError("is not finite")
    if sparse not in (0.0, 1.0):
        raise ValueError("does not say whether it is sparse")
    _demand_shares(densities, "")
    for length, own in (classes or {}).items():
        _demand_shares(own.densities, f" in the class of {length} tokens")
    return KeptLayer(sparsities, densities, bool(sparse), None if spread is None else tuple(spread.tolist()), classes)


def _demand_shares(densities: Heads, where: str) -> None:
    if not all(0 < share <= 1 for share in densities):
        raise ValueError(f"has a density that is no share of the keys{where}")
