"""The colours of pages and drawings, light and dark, and the textures that tell operations apart without colour.

Both themes are CSS variables, so that one drawing follows the reader's ``prefers-color-scheme``. Text stands on
``--ground``, ``--panel`` or a row; on a fill it is drawn in that fill's ``-ink``. Contrasts are those of WCAG 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arachnec.ir.nodes import Module

Rgb = tuple[int, int, int]
MOST_LENGTHS = 8  # colours of clip lengths: more are hard to find again in the legend

LIGHT = {
    "ground": "#ffffff",
    "text": "#1b1f24",
    "quiet": "#57606a",
    "line": "#d0d7de",
    "row": "#f3f4f6",
    "other-row": "#fafbfc",
    "panel": "#f6f8fa",
    "accent": "#b4006e",
    "focus": "#0969da",
    "limit": "#c01a26",
    "band": "#0072b233",
    "one": "#0072b2",
    "sync": "#8a8f98",
}
DARK = {
    "ground": "#0f1318",
    "text": "#e6e9ed",
    "quiet": "#9aa4af",
    "line": "#343b44",
    "row": "#171c22",
    "other-row": "#12161b",
    "panel": "#171c22",
    "accent": "#ff7ac6",
    "focus": "#58a6ff",
    "limit": "#ff7b72",
    "band": "#56b4e933",
    "one": "#56b4e9",
    "sync": "#777f8a",
}

# Okabe and Ito's colours, which the colour-blind can tell apart; the first is for the stage that takes most time.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")

# Viridis (matplotlib), every eighth of it: lightness grows evenly along it, for the colour-blind, too.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# From short clips to long ones: the part of viridis that stands out from the ground, most of all where clips are long.
LIGHT_LENGTHS, DARK_LENGTHS = (0.58, 0.0), (0.36, 1.0)

TEXTURE_SIZE = 8  # px of a tile
# Lines in the ground's colour over a fill, as an SVG path in a tile. What is not here is solid.
TEXTURES = {
    "forward": "M-2,2 L2,-2 M-2,10 L10,-2 M6,10 L10,6",
    "weight": "M0,2 L8,2 M0,6 L8,6",
    "encode": "M2,2 L2.1,2 M6,6 L6.1,6",
    "decode": "M-2,6 L2,10 M-2,-2 L10,10 M6,-2 L10,2",
    "norm": "M2,0 L2,8 M6,0 L6,8",
    "step": "M2,0 L2,8 M6,0 L6,8",
    "learn": "M2,0 L2,8 M6,0 L6,8",
}


@dataclass(frozen=True)
class Lengths:
    """The clip lengths of a plan in classes, the shortest first: ``(least, most)`` tokens each."""

    classes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, module: Module) -> Lengths:
        """A class for each length; of more than ``MOST_LENGTHS``, of equal size in the logarithm of tokens."""
        tokens = sorted({clip.tokens for clip in module.clips})
        if len(tokens) <= MOST_LENGTHS:
            return cls(tuple((length, length) for length in tokens))
        ratio = (tokens[-1] / max(1, tokens[0])) ** (1 / MOST_LENGTHS)
        edges = [max(1, tokens[0]) * ratio**number for number in range(1, MOST_LENGTHS)]
        by_class: dict[int, list[int]] = {}
        for length in tokens:
            by_class.setdefault(sum(length >= edge for edge in edges), []).append(length)
        return cls(tuple((lengths[0], lengths[-1]) for lengths in by_class.values()))

    def index(self, tokens: int) -> int:
        """The class of a clip; of a length between two classes the shorter one's."""
        return max(0, sum(least <= tokens for least, _ in self.classes) - 1)

    @property
    def labels(self) -> list[str]:
        """``1,560``, ``1,560 to 2,304``, in tokens."""
        return [f"{least:,}" if least == most else f"{least:,} to {most:,}" for least, most in self.classes]


def palette(lengths: int, stages: int) -> tuple[dict[str, str], dict[str, str]]:
    """The light and the dark theme with a fill and its ink for every class of length and every stage."""
    light, dark = dict(LIGHT), dict(DARK)
    for theme, ends in ((light, LIGHT_LENGTHS), (dark, DARK_LENGTHS)):
        fills = {f"length-{i}": ramp(ends, i, lengths) for i in range(lengths)}
        fills |= {f"stage-{i}": PALETTE[i % len(PALETTE)] for i in range(stages)}
        fills["sync"] = theme["sync"]
        theme |= fills | {f"{name}-ink": ink(fill) for name, fill in fills.items()}
    return light, dark


def theme_css(lengths: int = 0, stages: int = 0) -> str:
    """Both themes as CSS."""
    light, dark = (_variables(theme) for theme in palette(lengths, stages))
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _variables(theme: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in theme.items())


def stage_numbers(loads: Mapping[str, float]) -> dict[str, int]:
    """The number of every stage's colour; ``loads`` are the ms of each, that with most is first."""
    return {name: number for number, name in enumerate(sorted(loads, key=lambda name: -loads[name]))}


def ramp(ends: tuple[float, float], number: int, count: int) -> str:
    """Colour ``number`` of ``count`` between two places of viridis; of one, the last."""
    share = number / (count - 1) if count > 1 else 1.0
    at = (ends[0] + (ends[1] - ends[0]) * share) * (len(VIRIDIS) - 1)
    first = min(int(at), len(VIRIDIS) - 2)
    low, high = rgb(VIRIDIS[first]), rgb(VIRIDIS[first + 1])
    mixed = (round(a + (b - a) * (at - first)) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(fill: str) -> str:
    """Black or white, whichever stands out more: one of them always does by at least 4.58."""
    return max(("#ffffff", "#000000"), key=lambda colour: contrast(colour, fill))


def contrast(one: str, other: str) -> float:
    """From 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``."""
    parts = [part / 255 for part in rgb(colour)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rgb(colour: str) -> Rgb:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def svg_style(lengths: int = 0, stages: int = 0) -> str:
    """A class for every fill, ink and line, as a drawing's ``style`` element: without CSS variables, which not every
    program that shows drawings knows."""
    light, dark = (_classes(theme) for theme in palette(lengths, stages))
    return f"<style>\n{light}\n@media (prefers-color-scheme: dark){{{dark}}}\n</style>"


def _classes(theme: Mapping[str, str]) -> str:
    lines = ("ground", "line", "quiet", "limit")
    fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in theme.items())
    edges = "".join(f".{name}-line{{stroke:{theme[name]};fill:none}}" for name in lines)
    return f"{fills}{edges}.box{{stroke:{theme['ground']};stroke-width:0.5}}"


def svg_textures(ops: Sequence[str]) -> str:
    """The patterns of these operations, ``url(#forward)``."""
    patterns = [
        f'<pattern id="{op}" width="{TEXTURE_SIZE}" height="{TEXTURE_SIZE}" patternUnits="userSpaceOnUse">'
        f'<path class="ground-line" stroke-width="1.5" stroke-linecap="round" d="{TEXTURES[op]}"/></pattern>'
        for op in ops
        if op in TEXTURES
    ]
    return f"<defs>{''.join(patterns)}</defs>"
