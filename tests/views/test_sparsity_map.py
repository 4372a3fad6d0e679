"""The heat map has a cell for every head and step, named by its value, and means of layers where heads are many."""

import xml.etree.ElementTree as ElementTree

from arachnec.views.sparsity_map import sparsity_map


def cells(drawing: str) -> list[str]:
    root = ElementTree.fromstring(drawing)
    return [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]


def test_every_head_has_a_row_and_every_step_a_column() -> None:
    drawing = sparsity_map([0, 4, 8], {1: [[0.0, 0.5], [0.1, 0.6], [0.2, 1.0]], 3: [[0.9], [0.8], [0.7]]})
    wanted = [0.0, 0.1, 0.2, 0.5, 0.6, 1.0, 0.9, 0.8, 0.7]
    assert cells(drawing) == [f"{value:.3f}" for value in wanted]
    assert drawing.count(">layer 1<") == drawing.count(">layer 3<") == 1
    assert "#ffffff" in drawing and "#08306b" in drawing


def test_of_more_heads_than_can_be_seen_a_row_is_a_layer_s_mean() -> None:
    drawing = sparsity_map([0], {layer: [[0.0, 1.0] * 20] for layer in range(40)})
    assert cells(drawing) == ["0.500"] * 40
