"""The heat map has a cell for every class of length, head and step, named by its value, and means of layers where heads
are many."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

from arachnec.model_state.layer_summary import ClassSummary, LayerSummary
from arachnec.views.sparse_attention import sparsity_map


def layer(number: int, steps: list[int], history: list[list[float]], *classes: ClassSummary) -> LayerSummary:
    return LayerSummary(number, "blocks", True, [], [], steps=steps, history=history, classes=[*classes])


def of_class(tokens: int, history: list[list[float]]) -> ClassSummary:
    return ClassSummary(tokens, [], [], [], history)


def cells(drawing: str) -> list[str]:
    root = ElementTree.fromstring(drawing)
    return [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]


def test_every_head_has_a_row_and_every_step_a_column() -> None:
    steps = [0, 4, 8]
    first = layer(1, steps, [[0.0, 0.5], [0.1, 0.6], [0.2, 1.0]])
    drawing = sparsity_map([first, layer(3, steps, [[0.9], [0.8], [0.7]])])
    wanted = [0.0, 0.1, 0.2, 0.5, 0.6, 1.0, 0.9, 0.8, 0.7]
    assert cells(drawing) == [f"{value:.3f}" for value in wanted]
    assert drawing.count(">layer 1<") == drawing.count(">layer 3<") == 1
    assert "#ffffff" in drawing and "#08306b" in drawing


def test_classes_of_length_have_rows_of_their_own_instead_of_those_of_all_lengths() -> None:
    short, long = of_class(1024, [[0.2, 0.3]]), of_class(16384, [[0.8, 0.9]])
    drawing = sparsity_map([layer(0, [5], [[0.5, 0.6]], short, long), layer(1, [5], [[0.4, 0.4]])])
    assert cells(drawing) == ["0.200", "0.300", "0.800", "0.900", "0.400", "0.400"]
    assert drawing.count(">layer 0, from 1024 tokens<") == drawing.count(">layer 0, from 16384 tokens<") == 1


def test_of_more_heads_than_can_be_seen_a_row_is_a_layer_s_mean() -> None:
    drawing = sparsity_map([layer(number, [0], [[0.0, 1.0] * 20]) for number in range(40)])
    assert cells(drawing) == ["0.500"] * 40


def test_names_of_rows_do_not_lie_upon_each_other() -> None:
    classes = [of_class(1 << power, [[0.0, 1.0]]) for power in range(10, 16)]
    drawing = sparsity_map([layer(number, [0], [[0.0, 1.0]], *classes) for number in range(40)])
    places = [
        float(text.get("y", 0)) for text in ElementTree.fromstring(drawing) if (text.text or "").startswith("layer")
    ]
    assert all(later - earlier >= 11 for earlier, later in pairwise(places)) and len(places) > 40
