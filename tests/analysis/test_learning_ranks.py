"""What sparse layers learn is all-reduced over the ranks of each stage and over all: each group has a communicator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arachnec.analysis.communicators import HOST_HANDOFFS, resident
from arachnec.analysis.stage_ranks import learning_ranks
from arachnec.analysis.uses import Values
from arachnec.ir.parser import parse_module
from arachnec.runtime.rank_resources import wanted_gradient_groups

PARTS = Path(__file__).parents[1] / "golden" / "stages" / "sparse_parts.expect"


def test_every_group_of_learn_is_opened_and_counted() -> None:
    module = parse_module(PARTS.read_text(encoding="utf-8"))
    assert module.cluster is not None
    everyone = tuple(range(module.cluster.world))
    groups = learning_ranks(module, module.cluster)
    assert groups[-1] == everyone and len(groups) > 1 and set(groups) <= set(wanted_gradient_groups(module))
    gpus = replace(module.cluster, attrs=module.cluster.attrs.updated(device="h100-80g"))
    for program in module.programs:
        counted = resident(Values(replace(module, cluster=gpus)), program, HOST_HANDOFFS)
        own = {ranks for ranks in groups if program.rank in ranks}
        assert {("all-reduce", frozenset(ranks)) for ranks in own} <= counted
