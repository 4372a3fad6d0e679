"""Times, ranks and titles as a person reads them, and the terminal they are printed to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from arachnec.cluster.topology import named
from arachnec.ir.diagnostic import counted
from arachnec.ir.limits import MOST_NAMES
from arachnec.ir.nodes import Cascade, Module, Phase, Stage
from arachnec.ir.stage_sizes import formula_in


def ms(value: float) -> str:
    """Milliseconds: ``3.1 ms``, ``4.95 s``; what rounding leaves of nothing is 0."""
    if abs(value) < 1e-6:
        return "0 ms"
    if value < 1e3:
        return f"{value:.3g} ms"
    return f"{value / 1e3:.4g} s"


def ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(ranks))


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of every run of consecutive numbers."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def title_of(module: Module) -> str:
    """Model, clips and cluster: ``WanTransformer3DModel, 12 clips on 2 x 8 x h100-80g, iteration 0``.

    The model is the class of what is trained; a module that does not know it is called by its own name.
    """
    models = [str(stage.attrs["source"]) for stage in module.stages if stage.trained and "source" in stage.attrs]
    cluster = "" if module.cluster is None else f" on {named(module.cluster)}"
    words = [", ".join(models) or module.name, f"{counted(len(module.clips), 'clip')}{cluster}"]
    return ", ".join([*words, module.name.replace("_", " ")] if models else words)


def reads_text_alone(stage: Stage) -> bool:
    """Whether a stage's work grows with captions, and with nothing of the video."""
    work = formula_in(stage, "flops")
    return work is not None and "S" not in {name for term in work.terms for name, _ in term.powers}


def size_of(cascade: Cascade, stage: Stage) -> str:
    """``1 x 32760``, clips and tokens of each; of a text encoder ``1 x 226 text``."""
    if cascade.phase is Phase.ENCODE and reads_text_alone(stage):
        return f"{cascade.batch} x {cascade.text} text"
    return f"{cascade.batch} x {cascade.tokens}"


def clip_names(names: Mapping[int, str], clips: Sequence[int], most: int = MOST_NAMES) -> str:
    """``cat, dog and 3 more``: clips by the names of their numbers. Of those without a file ``clips 0, 4``."""
    shown = [names.get(clip, str(clip)) for clip in clips[:most]]
    noun = ("clips " if len(clips) > 1 else "clip ") if shown and all(name.isdecimal() for name in shown) else ""
    more = f" and {len(clips) - most} more" if len(clips) > most else ""
    return noun + ", ".join(shown) + more


def names_of(module: Module) -> dict[int, str]:
    """The name of every clip, by its number in the module."""
    return {clip.id: str(clip.attrs.get("name", clip.id)) for clip in module.clips}


def terminal() -> Console:
    """The person's terminal; where there is none, lines wide enough for the tables.

    Text is printed as it is: what stands in brackets, in a path or a name, is no markup.
    """
    console = PlainConsole(markup=False, emoji=False)
    return console if console.is_terminal else PlainConsole(width=120, markup=False, emoji=False)


class PlainConsole(Console):
    """Names in a file must not steer the terminal: of their control characters none is printed."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
