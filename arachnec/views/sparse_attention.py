"""Sparse attention shown: which layers of a plan select keys and why others do not, and a run's densities as a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arachnec.ir.diagnostic import counted
from arachnec.ir.head_density import layer_densities
from arachnec.ir.nodes import Module, Stage
from arachnec.model_state.layer_summary import LayerSummary
from arachnec.planning.sparse_stages import SparseSummary, sparse_summaries
from arachnec.views.colours import svg_style
from arachnec.views.format import ranges
from arachnec.views.timeline_svg import opening


def sparse_sentences(module: Module) -> list[str]:
    """Nothing for a module that no ``sparsify`` went over."""
    sentences = []
    for summary in sparse_summaries(module):
        sentences += of_stage(summary)
    for stage in module.stages:
        sentences += _reasons(stage)
    return sentences


def of_stage(summary: SparseSummary) -> list[str]:
    name, layers = f"@{summary.stage.name}", list(layer_densities(summary.stage))
    heads = f"from {_percent(summary.least)} to {_percent(summary.most)} by head"
    if summary.least == summary.most:
        heads = "the same for every head"
    which = (
        "all layers" if summary.sparse == summary.layers else f"{counted(summary.sparse, 'layer')} ({ranges(layers)})"
    )
    sentences = [
        f"In {name} {which} may attend to chosen keys: predicted {_percent(summary.density)} of the keys, {heads}."
    ]
    if summary.classes:
        by_class = ", ".join(
            f"{_percent(x)} from {counted(tokens, 'token')} on" for tokens, x in summary.classes.items()
        )
        sentences.append(f"By class of length, means of all heads: {by_class}.")
    if summary.measured is not None:
        sentences.append(
            f"A run measured {counted(summary.measured, 'layer')} as sparse by then, and the plan is made for what it "
            "measured; the others attend to all keys and their predictors learn."
        )
    total = len(summary.chosen) + len(summary.dense)
    if summary.chosen:
        shortest = min(cascade.tokens for cascade in summary.chosen)
        does = "does" if total == 1 else "do"
        cascades = f"{len(summary.chosen)} of {counted(total, 'cascade')} {does}"
        sentences.append(f"{cascades}, from {counted(shortest, 'token')} a clip on.")
    if summary.dense:
        longest = max(cascade.tokens for cascade in summary.dense)
        stays = "stays" if total == 1 else "stay"
        cascades = f"{len(summary.dense)} of {counted(total, 'cascade')} {stays} dense"
        sentences.append(
            f"{cascades}, up to {counted(longest, 'token')} a clip: choosing keys and learning which would take longer "
            "than it saves."
        )
    if summary.imbalance > 1:
        how = "cut between query groups" if summary.stage.attrs.get("division") != "heads" else "kept whole"
        sentences.append(
            f"Heads are {how}: of the ranks of a clip the heaviest computes {summary.imbalance:.3f} times the mean, in "
            "the worst layer."
        )
    return sentences


def _reasons(stage: Stage) -> list[str]:
    rows = stage.attrs.get("dense", ())
    assert isinstance(rows, tuple)
    return [f"`{row[0]}` of @{stage.name} attends to all keys: {row[1]}." for row in rows if isinstance(row, tuple)]


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"


WIDTH, LEFT, TOP, LEGEND = 720, 150, 34, 30
LINE = 11  # between two names
ROWS = 160  # of more heads a row is the mean of a layer's, for each class


def sparsity_map(layers: Sequence[LayerSummary]) -> str:
    """Of each class of length that was measured, for each of the layers' steps, the sparsity of every head: 0 where it
    attends to all keys. Of a layer without classes those of all lengths."""
    rows = _rows({name: history for layer in layers for name, history in _histories(layer)})
    steps = layers[0].steps
    height = max(3.0, min(16.0, 480 / max(1, len(rows))))
    width = (WIDTH - LEFT - 10) / max(1, len(steps))
    parts = [f'<text class="text" x="{LEFT}" y="20">sparsity of heads by step: white 0, dark 1</text>']
    bottom = TOP + height * len(rows)
    named: set[str] = set()
    free = 0.0  # from here on there is no name yet
    for place, (name, values) in enumerate(rows):
        top = TOP + place * height
        if name not in named and top >= free:
            free = top + LINE
            parts.append(f'<text class="text" x="{LEFT - 8}" y="{top + 10:.1f}" text-anchor="end">{name}</text>')
        named.add(name)
        for column, value in enumerate(values):
            left = LEFT + column * width
            box = f'x="{left:.2f}" y="{top:.2f}" width="{width + 0.3:.2f}" height="{height + 0.3:.2f}"'
            parts.append(f'<rect {box} fill="{_colour(value)}"><title>{value:.3f}</title></rect>')
    for column in sorted({0, len(steps) // 2, len(steps) - 1} & set(range(len(steps)))):
        middle = LEFT + (column + 0.5) * width
        parts.append(
            f'<text class="text" x="{middle:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{steps[column]}</text>'
        )
    return "\n".join([*opening(WIDTH, bottom + LEGEND, svg_style()), *parts, "</svg>"]) + "\n"


def _histories(layer: LayerSummary) -> list[tuple[str, Sequence[Sequence[float]]]]:
    """By name of a layer and class, sparsities of heads by step."""
    if not layer.classes:
        return [(f"layer {layer.layer}", layer.history)]
    return [(f"layer {layer.layer}, from {own.tokens} tokens", own.history) for own in layer.classes]


def _rows(histories: Mapping[str, Sequence[Sequence[float]]]) -> list[tuple[str, list[float]]]:
    """Name and sparsity by step, by head."""
    heads = [(name, [*map(list, zip(*history, strict=True))]) for name, history in histories.items()]
    if sum(len(own) for _, own in heads) <= ROWS:
        return [(name, row) for name, own in heads for row in own]
    return [(name, [sum(step) / len(step) for step in history]) for name, history in histories.items()]


def _colour(value: float) -> str:
    """From white by blue to dark."""
    share = min(1.0, max(0.0, value))
    red, green, blue = (round(255 + (end - 255) * share) for end in (8, 48, 107))
    return f"#{red:02x}{green:02x}{blue:02x}"
