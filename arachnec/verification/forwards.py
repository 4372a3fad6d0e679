"""Rule 2, inside a cascade: its ranks split it alike, as the cascade says.

The executor takes the split of a forward from the instruction. Ranks that disagree on it exchange messages of other
sizes, or wait for partners that are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.printer import value_text
from arachnec.ir.values import Value
from arachnec.kernels.attention.attention_backend import PREFERENCE

SPLIT = ("ulysses", "ring", "shards", "side", "recompute")
SAMPLED = ("steps", "branches", "switch", "ulysses", "ring", "shards", "side", "unconditional")  # of a denoise


@dataclass(frozen=True)
class SplitUnlikeCascade(Diagnostic):
    title = "rank {rank} runs `{instruction}` with {attribute} = {value}, and %{cascade} has {right}"
    label = "{attribute} is {value}"
    help = "all ranks of a cascade split it alike: {remedy}"
    rank: int
    instruction: str
    attribute: str
    value: str
    cascade: str
    right: str
    remedy: str


def several_kernels_error(span: Span | None, rank: int, instruction: str, value: str, right: str) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} runs `{instruction}` with attention {value}, and others with {right}",
        label=f"{value} here",
        help="all ranks of a cascade run its attention with one kernel family",
    )


def unknown_kernels_error(span: Span | None, rank: int, instruction: str, value: str, known: str) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} runs `{instruction}` with attention {value}, which no kernel family is called",
        label=f"attention is {value}",
        help=f"write one of {known}, or leave `attention` out",
    )


def check_forwards(values: Values) -> Iterator[Diagnostic]:
    families: dict[str, Value | None] = {
        cascade.name: cascade.attrs["attention"] for cascade in values.module.cascades if "attention" in cascade.attrs
    }
    for program in values.module.programs:
        for step in program.instructions:
            if step.op not in ("forward", "denoise"):
                continue
            cascade = values.cascades[step.target]
            for name in SPLIT if step.op == "forward" else SAMPLED:
                value, right = step.attrs.get(name), cascade.attrs.get(name)  # absent is a choice of its own
                if value == right:
                    continue
                remedy = f"write `{name} = {_shown(right)}`" if right is not None else f"leave `{name}` out"
                texts = _shown(value), cascade.name, _shown(right), remedy
                yield SplitUnlikeCascade(step.span, program.rank, written(step), name, *texts)
            family = step.attrs.get("attention")
            if family is not None and family not in PREFERENCE:
                span = step.attrs.span("attention") or step.span
                yield unknown_kernels_error(span, program.rank, written(step), _shown(family), ", ".join(PREFERENCE))
            if families.setdefault(cascade.name, family) != family:
                yield several_kernels_error(
                    step.span, program.rank, written(step), _shown(family), _shown(families[cascade.name])
                )


def _shown(value: Value | None) -> str:
    return "none" if value is None else value_text(value)
