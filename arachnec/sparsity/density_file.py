"""A sparsity file: the densities that a run measured, as JSON. In: a path. Out: a density for every layer and head.

::

    {"model": "WanTransformer3DModel", "layers": [{"layer": 0, "heads": [0.05, 0.31]},
                                                  {"layer": 1, "heads": [0.4, 0.2]}]}

A density is the share of keys that a query of the head attends to. Layers that are not listed stay dense. A layer may
list those of clips of some classes of length apart, each by its fewest tokens, ``{"tokens": 16384, "heads": [...]}``
under ``classes``; the others have those of ``heads``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import LENGTH_CLASSES, ByLength
from arachnec.ir.limits import LARGEST_DATA

EXAMPLE = '{"model": "CLASS", "layers": [{"layer": 0, "heads": [0.05, 0.31]}]}'


def of_another_model_error(path: str, what: str) -> UserError:
    return user_error(
        f"the sparsity file `{path}` is of another model: {what}",
        help="measure this model's own densities, or give one for all heads: `sparsify{density=0.1}`",
    )


class _Class(msgspec.Struct, forbid_unknown_fields=True):
    tokens: int
    heads: list[float]


class _Layer(msgspec.Struct, forbid_unknown_fields=True):
    layer: int
    heads: list[float]
    classes: list[_Class] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    layers: list[_Layer]


@dataclass(frozen=True)
class Densities:
    """What a sparsity file says."""

    path: str
    model: str
    layers: Mapping[int, ByLength]

    def demand_of(self, model: str, layers: int, heads: int) -> None:
        """Raises UserError where this is not of a model of so many layers and heads."""
        if self.model != model:
            raise of_another_model_error(self.path, f"of `{self.model}`, and this is `{model}`")
        outside = next((layer for layer in self.layers if not 0 <= layer < layers), None)
        if outside is not None:
            raise of_another_model_error(self.path, f"it has layer {outside}, and this one has 0 to {layers - 1}")
        for layer, densities in self.layers.items():
            if len(densities.heads) != heads:
                what = f"layer {layer} has {len(densities.heads)} heads there, and {heads} here"
                raise of_another_model_error(self.path, what)


def read_densities(path: str | Path) -> Densities:
    """Raises UserError for a file that is not there, is no such JSON, lists a layer or a class twice, or has a density
    that is no share of the keys."""
    file = Path(path)

    def refusal(reason: str) -> UserError:
        return user_error(f"the sparsity file `{path}` cannot be read: {reason}", help=f"a file looks like {EXAMPLE}")

    if not file.is_file():
        raise refusal("there is no such file")
    if file.stat().st_size > LARGEST_DATA:
        raise refusal(f"it is larger than {LARGEST_DATA >> 20} MiB")
    try:
        told = msgspec.json.decode(file.read_bytes(), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(str(error)) from None
    layers: dict[int, ByLength] = {}
    for row in told.layers:
        wrong = f"layer {row.layer} is listed twice" if row.layer in layers else _wrong_in(row)
        if wrong is not None:
            raise refusal(wrong)
        classes = sorted((own.tokens, tuple(own.heads)) for own in row.classes)
        layers[row.layer] = ByLength(tuple(row.heads), tuple(classes))
    return Densities(str(path), told.model, layers)


def _wrong_in(row: _Layer) -> str | None:
    if not row.heads:
        return f"layer {row.layer} lists no heads; leave out a layer that stays dense"
    seen: set[int] = set()
    for own in row.classes:
        if own.tokens not in LENGTH_CLASSES:
            return (
                f"layer {row.layer} has a class of {own.tokens} tokens; a class is named by the fewest tokens of its "
                f"clips, a power of two to {LENGTH_CLASSES[-1]}"
            )
        if own.tokens in seen:
            return f"layer {row.layer} lists the class {own.tokens} twice"
        if len(own.heads) != len(row.heads):
            return f"layer {row.layer} has {len(row.heads)} heads, and {len(own.heads)} in the class {own.tokens}"
        seen.add(own.tokens)
    told = [("", row.heads), *((f", class {own.tokens},", own.heads) for own in row.classes)]
    for where, heads in told:
        for head, density in enumerate(heads):
            if not 0 < density <= 1:
                known = f"head {head} of layer {row.layer}{where} has the density {density:.15g}"
                return f"{known}, which is not above 0 and to 1"
    return None
