"""Costed modules of a transformer and encoders, for the tests of what schedules and places them."""

from __future__ import annotations

from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Clip, Level, Module, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.partition import cascades

BS2, BS = (("B", 1), ("S", 2)), (("B", 1), ("S", 1))


def formula(unit: str, *terms: tuple[float, tuple[tuple[str, int], ...]]) -> Formula:
    """The sum of coefficients times powers of symbols: ``formula("ms", (1e-2, BS), (3.0, ()))``."""
    return Formula(tuple(Term(value, powers) for value, powers in terms), unit)


def module(cluster: str, tokens: list[int], encoders: int = 0, saved: float = 1e-3, recomputes: bool = True) -> Module:
    """A clip of each of these lengths, trained by one cascade and encoded by ``encoders`` others.

    A backward needs ``saved`` GiB a token, and a tenth of it where the transformer can recompute.
    """
    dit = Stage(
        "dit",
        True,
        Attributes.of(
            params=10**9,
            heads=12,
            attentions=30,
            forward=formula("ms", (1e-6, BS2), (1e-2, BS), (3.0, ())),
            backward=formula("ms", (2e-6, BS2), (2e-2, BS), (6.0, ())),
            traffic=formula("GiB", (3e-5, BS)),
            saved=formula("GiB", (saved, BS)),
            saved_recompute=formula("GiB", (saved / 10, BS)) if recomputes else None,
            state=Quantity(2.0, "GiB"),
            costs="device specs",
        ),
    )
    output, forward = formula("GiB", (1e-7, BS)), formula("ms", (1e-3, BS), (1.0, ()))
    vaes = [
        Stage(f"vae{i}", False, Attributes.of(output=output, forward=forward, costs="device specs"))
        for i in range(encoders)
    ]
    clips = tuple(Clip(i, 1, 16, 16, 16, count) for i, count in enumerate(tokens))
    stages = (*vaes, dit)
    nodes = cascades([(clip,) for clip in clips], stages)
    return Module("m", Level.COSTED, parse_cluster(cluster), clips, stages, cascades=nodes)
