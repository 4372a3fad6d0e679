"""What a plan's summary says of densities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arachnec.ir.parser import parse_module
from arachnec.planning.sparse_stages import sparse_summaries

HEADS = Path(__file__).parents[1] / "golden" / "lower" / "sparse_heads.cascade"


def test_one_layer_with_one_head_is_its_own_least_and_most() -> None:
    module = parse_module(HEADS.read_text(encoding="utf-8"))
    (stage,) = module.stages
    attrs = stage.attrs.updated(heads=1, density=(((0,), 0.5, (0.3,)),))
    (summary,) = sparse_summaries(replace(module, stages=(replace(stage, attrs=attrs),)))
    assert (summary.least, summary.density, summary.most) == (0.3, 0.3, 0.3)
