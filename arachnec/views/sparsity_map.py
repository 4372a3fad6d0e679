"""A heat map of sparsity over steps, as SVG: a row for every head, a column for every step, dark where keys are few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, LEFT, TOP, LEGEND = 720, 90, 34, 30
LARGEST = 160  # rows; of more heads a row is the mean of a layer


def sparsity_map(steps: Sequence[int], layers: Mapping[int, Sequence[Sequence[float]]]) -> str:
    """``layers`` has by number, for each of ``steps``, the sparsity of every head: 0 where it attends to all keys."""
    rows = _rows(layers)
    height = max(3.0, min(16.0, 480 / max(1, len(rows))))
    width = (WIDTH - LEFT - 10) / max(1, len(steps))
    parts = [f'<text x="{LEFT}" y="20">sparsity of heads by step: white 0, dark 1</text>']
    bottom = TOP + height * len(rows)
    named: set[int] = set()
    for place, (layer, values) in enumerate(rows):
        top = TOP + place * height
        if layer not in named:
            named.add(layer)
            parts.append(f'<text x="{LEFT - 8}" y="{top + 10:.1f}" text-anchor="end">layer {layer}</text>')
        for column, value in enumerate(values):
            left = LEFT + column * width
            box = f'x="{left:.2f}" y="{top:.2f}" width="{width + 0.3:.2f}" height="{height + 0.3:.2f}"'
            parts.append(f'<rect {box} fill="{_colour(value)}"><title>{value:.3f}</title></rect>')
    for column in sorted({0, len(steps) // 2, len(steps) - 1} & set(range(len(steps)))):
        middle = LEFT + (column + 0.5) * width
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{steps[column]}</text>')
    whole = f'width="{WIDTH}" height="{bottom + LEGEND:.0f}"'
    style = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {whole} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _rows(layers: Mapping[int, Sequence[Sequence[float]]]) -> list[tuple[int, list[float]]]:
    """Layer and sparsity by step, by head."""
    heads = [(layer, [*map(list, zip(*history, strict=True))]) for layer, history in sorted(layers.items())]
    if sum(len(own) for _, own in heads) <= LARGEST:
        return [(layer, row) for layer, own in heads for row in own]
    return [(layer, [sum(step) / len(step) for step in history]) for layer, history in sorted(layers.items())]


def _colour(value: float) -> str:
    """From white by blue to dark."""
    share = min(1.0, max(0.0, value))
    red, green, blue = (round(255 + (end - 255) * share) for end in (8, 48, 107))
    return f"#{red:02x}{green:02x}{blue:02x}"
