"""Rules about sparse attention: densities that are shares of keys, layers that there are, rows of their shape.

That every group of every head is computed once is proved by ``check`` (``arachnec.verification.sparse``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from arachnec.ir.diagnostic import Diagnostic, Mistake, Span, counted
from arachnec.ir.head_density import (
    LENGTH_CLASSES,
    DensityRow,
    LayerDensity,
    density_table,
    layer_densities,
    parts_by_layer,
    sparse_layers,
    total_share,
)
from arachnec.ir.names import ModuleIndex, label
from arachnec.ir.nodes import Cascade, Level, Stage, integer, integers
from arachnec.ir.printer import number, symbol
from arachnec.ir.stage_sizes import layers_of

DIVISIONS = ("groups", "heads")


def wrong_sparsity_error(span: Span | None, node: str, name: str, value: str, expected: str) -> Mistake:
    return Mistake(span, f"{node} says `{name} = {value}`", label=f"expected {expected}")


def wrong_heads_error(span: Span | None, node: str, what: str, expected: str) -> Mistake:
    return Mistake(
        span,
        f"{node} has {what} in `heads`",
        label=f"expected {expected}",
        help="leave `heads` and `groups` out, and `lower` divides the heads",
    )


Problems = Iterator[Diagnostic]
Wrong = tuple[str, str]
"""What was found, and what is expected."""


def densities_are_shares_of_keys(index: ModuleIndex) -> Problems:
    for stage in index.module.stages:
        for attribute in ("density", "measured", "learned"):
            if attribute in stage.attrs and (wrong := _wrong_density(stage, attribute)) is not None:
                found, expected = wrong
                yield Mistake(
                    stage.attrs.span(attribute) or stage.span,
                    f"{label(stage)} has {found} in `{attribute}`",
                    label=f"expected {expected}",
                    help=(
                        "a row is `[layers, share of the stage's pairs of tokens, density of each head]`, and of one "
                        "class of length alone `[..., fewest tokens of the class]`"
                    ),
                )
        yield from _settings(stage)


def _wrong_density(stage: Stage, attribute: str) -> Wrong | None:
    rows = density_table(stage, attribute)
    wrong = _row_that_is_not_there(stage, rows) or next(filter(None, (_not_shares(stage, row) for row in rows)), None)
    if wrong is not None:
        return wrong
    table = layer_densities(stage, attribute)
    lacking = next((layer for layer in table if layer not in layer_densities(stage)), None)
    if lacking is not None and attribute == "measured":
        return f"layer {lacking}", "layers that have a `density`"
    total = total_share(table.values())
    if (wrong := _of_other_heads(rows, table)) is None and total > 1 + 1e-6:
        return f"shares of {number(round(total, 6))} together", "1 or less"
    return wrong


def _row_that_is_not_there(stage: Stage, rows: Sequence[DensityRow]) -> Wrong | None:
    """Rows of layers and classes of length that are none, or are there twice."""
    counts = Counter((layer, row.length) for row in rows for layer in row.layers)
    twice = next((known for known, count in counts.items() if count > 1), None)
    if twice is not None:
        of_class = "" if twice[1] is None else f" for class {twice[1]}"
        return f"layer {twice[0]} twice{of_class}", "every layer in one row"
    known = len(layers_of(stage))
    outside = next((layer for layer, _ in counts if not 0 <= layer < known), None)
    if outside is not None:
        return f"layer {outside}", f"layers from 0 to {known - 1}"
    no_class = next((row.length for row in rows if row.length is not None and row.length not in LENGTH_CLASSES), None)
    if no_class is not None:
        return f"the class {no_class}", f"the fewest tokens of a class: a power of two, to {LENGTH_CLASSES[-1]}"
    return None


def _not_shares(stage: Stage, row: DensityRow) -> Wrong | None:
    heads, layer = stage.attrs.get("heads"), row.layers[0] if row.layers else None
    wrong = next((value for value in row.heads if not 0 < value <= 1), None)
    if wrong is not None:
        return f"{number(wrong)} for a head of layer {layer}", "shares above 0, to 1"
    if not row.heads or (isinstance(heads, int) and len(row.heads) != heads):
        expected = f"one for each of {heads} heads" if isinstance(heads, int) else "one for each head"
        return f"{len(row.heads)} densities for layer {layer}", expected
    return None if row.share > 0 else (f"the share {number(row.share)} for layer {layer}", "a share above 0")


def _of_other_heads(rows: Iterable[DensityRow], table: Mapping[int, LayerDensity]) -> Wrong | None:
    """Rows of a class of length that do not go with those of all lengths."""
    for layer, row in ((layer, own) for own in rows if own.length is not None for layer in own.layers):
        if layer not in table:
            return f"layer {layer} for class {row.length} alone", "a row of it for all lengths too"
        if (row.share, len(row.heads)) != (table[layer].share, len(table[layer].heads)):
            return f"another share or number of heads of layer {layer} for class {row.length}", "those of all lengths"
    return None


def _settings(stage: Stage) -> Problems:
    attrs, node = stage.attrs, label(stage)
    for name in ("query_group", "key_block", "predictors"):
        value = attrs.get(name)
        if isinstance(value, int) and value < (0 if name == "predictors" else 1):
            yield wrong_sparsity_error(attrs.span(name) or stage.span, node, name, str(value), "one token or more")
    division = attrs.get("division", DIVISIONS[0])
    if division not in DIVISIONS:
        span = attrs.span("division") or stage.span
        yield wrong_sparsity_error(span, node, "division", f'"{division}"', '"groups" or "heads"')
    speeds = attrs.get("sparse_speed", (1.0, 1.0, 1.0))
    assert isinstance(speeds, tuple)
    if len(speeds) != 3 or not all(isinstance(speed, int | float) and speed > 0 for speed in speeds):
        span = attrs.span("sparse_speed") or stage.span
        shown = ", ".join(str(speed) for speed in speeds)
        yield wrong_sparsity_error(span, node, "sparse_speed", f"[{shown}]", "three numbers above 0")


def sparse_layers_have_densities(index: ModuleIndex) -> Problems:
    for cascade in index.module.cascades:
        stage = index.stages.get(cascade.stage)
        if stage is None or "sparse" not in cascade.attrs:
            continue
        table = layer_densities(stage)
        wrong = next((layer for layer in sparse_layers(cascade) if layer not in table), None)
        if wrong is not None:
            span = cascade.attrs.span("sparse") or cascade.span
            stage_symbol = symbol(stage.name)
            yield Mistake(
                span,
                f"{label(cascade)} runs layer {wrong} of `{stage_symbol}` sparse, which has no density there",
                label=f"layer {wrong}",
                help=f"leave the layer out of `sparse`, or give `{stage_symbol}` its `density`",
            )


def head_rows_fit_the_degree(index: ModuleIndex) -> Problems:
    if index.module.level < Level.PLACED:
        return
    for cascade in index.module.cascades:
        if "heads" in cascade.attrs:
            yield from _heads(cascade, index.stages.get(cascade.stage))


def _heads(cascade: Cascade, stage: Stage | None) -> Problems:
    node, span = label(cascade), cascade.attrs.span("heads") or cascade.span
    rows = cascade.attrs["heads"]
    assert isinstance(rows, tuple)
    if integer(cascade.attrs.get("groups", 0)) < 1:
        yield wrong_heads_error(span, node, "no number of groups", "`groups`, 1 or more, beside it")
        return
    layers = sorted(layer for row in rows for layer in integers(row[0]))  # type: ignore[index]
    wanted = sorted(sparse_layers(cascade))
    if layers != wanted:
        yield wrong_heads_error(span, node, f"layers {_listed(layers)}", f"those that are `sparse`: {_listed(wanted)}")
        return
    table = layer_densities(stage) if stage is not None else {}
    for row in rows:
        assert isinstance(row, tuple)
        numbers, places, cut = map(integers, row)
        count = len(table[numbers[0]].heads) if numbers and numbers[0] in table else len(places)
        if len(places) != count:
            yield wrong_heads_error(span, node, counted(len(places), "place"), f"one for each of {count} heads")
            return
        if len(cut) % 4:
            yield wrong_heads_error(
                span, node, f"parts of {len(cut)} numbers", "head, place, first group, end: four a part"
            )
            return
        used = [place for place in places if place != -1] + list(cut[1::4])
        outside = next((place for place in used if not 0 <= place < cascade.degree), None)
        if outside is not None:
            yield wrong_heads_error(
                span, node, f"place {outside}", f"0 to {cascade.degree - 1}, for degree {cascade.degree}"
            )
            return
    heads = {layer: len(integers(row[1])) for row in rows for layer in integers(row[0])}  # type: ignore[index]
    groups = integer(cascade.attrs["groups"])
    for layer, parts in parts_by_layer(cascade).items():
        for part in parts:
            if not (0 <= part.head < heads[layer] and 0 <= part.start < part.stop <= groups):
                yield Mistake(
                    span,
                    f"{node} gives groups {part.start} to {part.stop} of head {part.head} in layer {layer} to "
                    f"place {part.place}",
                    label=f"has heads 0 to {heads[layer] - 1} of {groups} groups",
                    help="a part is head, place, first group, and the end behind the last",
                )
                return


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "") if layers else "none"


SPARSE_RULES = (densities_are_shares_of_keys, sparse_layers_have_densities, head_rows_fit_the_degree)
