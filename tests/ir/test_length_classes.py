"""A class of length follows from a clip's tokens, and a row of densities for it stands beside that of all lengths."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.head_density import LENGTH_CLASSES, ByLength, LayerDensity, density_rows, layer_densities, length_class
from arachnec.ir.nodes import Level, Module, Stage
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes

shares = st.floats(0.001, 1.0)
heads = st.tuples(shares, shares)
classes = st.dictionaries(st.sampled_from(LENGTH_CLASSES), heads, max_size=4).map(lambda of: tuple(sorted(of.items())))
layers = st.dictionaries(st.integers(0, 5), st.builds(LayerDensity, st.just(0.125), heads, classes), min_size=1)


@given(st.integers(1, 10**8))
def test_a_class_is_named_by_its_fewest_tokens_and_the_last_has_all_longer_clips(tokens: int) -> None:
    own = length_class(tokens)
    assert own in LENGTH_CLASSES and own <= tokens
    assert tokens < 2 * own or own == LENGTH_CLASSES[-1]
    assert length_class(own) == own


def test_a_class_without_values_has_those_of_all_lengths() -> None:
    known = ByLength((0.5, 0.25), ((1024, (0.4, 0.2)), (4096, (0.3, 0.1))))
    assert [known.at(tokens) for tokens in (1024, 2047)] == [(0.4, 0.2)] * 2
    assert [known.at(tokens) for tokens in (1023, 2048, 10**9)] == [(0.5, 0.25)] * 3
    density = LayerDensity.of(0.5, known).at(5000)
    assert density == LayerDensity(0.5, (0.3, 0.1)) and density.at(1024) == density


@given(layers)
def test_rows_and_their_text_say_what_every_layer_has_for_every_class(table: dict[int, LayerDensity]) -> None:
    stage = Stage("dit", True, Attributes.of(density=density_rows(table)))
    assert layer_densities(stage) == table
    module = Module("m", Level.TRACED, stages=(stage,))
    (read,) = parse_module(print_module(module)).stages
    assert layer_densities(read) == table


def test_layers_without_classes_have_the_rows_that_they_had() -> None:
    own = LayerDensity(0.5, (0.1, 0.2))
    assert density_rows({0: own, 1: own}) == (((0, 1), 0.5, (0.1, 0.2)),)
    other = replace(own, classes=((64, (0.3, 0.4)),))
    assert density_rows({0: own, 1: other}) == (((0, 1), 0.5, (0.1, 0.2)), ((1,), 0.5, (0.3, 0.4), 64))
