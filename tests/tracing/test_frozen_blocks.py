"""Blocks that nothing is kept of, since no gradient passes them."""

from __future__ import annotations

from types import SimpleNamespace

from arachnec.passes.trace import trace_model
from arachnec.planning.stage_cuts import parts_of
from tests.tracing.test_trace import CLIPS, Model, sample


class FirstFrozen(Model):
    """All in front of the second block is frozen, so no gradient passes the first: autograd keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.text, self.blocks[0]):
            part.requires_grad_(False)


def test_a_frozen_first_block_trains_on_and_saves_nothing_by_being_recomputed() -> None:
    traced = trace_model(SimpleNamespace(build=FirstFrozen, sample=sample, encoders=None, loss=None), CLIPS)
    (frozen, nothing), (trained, some) = traced.stages[0].attrs["spared"]
    assert (frozen, trained) == (1, 2)
    for tokens, text in ((1, 8), (64, 40), (1344, 120)):
        assert nothing(B=1, S=tokens, T=text) == 0 < some(B=1, S=tokens, T=text)
    planned, _ = parts_of(traced.stages[0], (2,))
    (_, nothing), _ = planned.attrs["spared"]
    assert nothing(B=1, S=64, T=8) == 0
