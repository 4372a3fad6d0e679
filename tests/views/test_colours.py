"""Colours: text stands out from everything it is drawn on, length is seen as lightness, and classes hold all clips."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.nodes import Clip, Level, Module
from arachnec.views.colours import MOST_LENGTHS, PALETTE, Lengths, contrast, luminance, palette

ON_GROUND = ("text", "quiet", "accent", "limit", "focus")
GROUNDS = ("ground", "panel", "row", "other-row")


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert contrast("#ffffff", "#777777") == contrast("#777777", "#ffffff")
    assert luminance("#ff0000") == pytest.approx(0.2126)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("count", range(1, MOST_LENGTHS + 1))
def test_text_stands_out_by_4_5_from_grounds_and_fills_and_fills_by_3_from_the_ground(count: int, dark: bool) -> None:
    theme = palette(count, len(PALETTE))[dark]
    for ground in GROUNDS:
        assert all(contrast(theme[name], theme[ground]) >= 4.5 for name in ON_GROUND)
    fills = [name.removesuffix("-ink") for name in theme if name.endswith("-ink")]
    assert len(fills) == count + len(PALETTE) + 1
    assert all(contrast(theme[f"{fill}-ink"], theme[fill]) >= 4.5 for fill in fills)
    assert all(contrast(theme[f"length-{number}"], theme["ground"]) >= 3 for number in range(count))


@pytest.mark.parametrize("dark", [False, True])
def test_longer_clips_stand_out_more_whatever_colours_the_eye_sees(dark: bool) -> None:
    theme = palette(MOST_LENGTHS, 0)[dark]
    steps = [contrast(theme[f"length-{number}"], theme["ground"]) for number in range(MOST_LENGTHS)]
    assert all(longer > 1.1 * shorter for shorter, longer in pairwise(steps))


@given(st.lists(st.integers(1, 500_000), min_size=1, max_size=60))
def test_every_length_is_in_one_class_and_classes_ascend(tokens: list[int]) -> None:
    clips = tuple(Clip(number, 1, 8, 8, 0, length) for number, length in enumerate(tokens))
    lengths = Lengths.of(Module("m", Level.TRACED, None, clips))
    assert 1 <= len(lengths.classes) == len(lengths.labels) <= MOST_LENGTHS
    for length in tokens:
        least, most = lengths.classes[lengths.index(length)]
        assert least <= length <= most
    assert all(most < least for (_, most), (least, _) in pairwise(lengths.classes))
    if len(set(tokens)) <= MOST_LENGTHS:
        assert all(least == most for least, most in lengths.classes)
