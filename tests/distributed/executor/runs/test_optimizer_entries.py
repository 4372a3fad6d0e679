"""What an optimizer remembers is of another length on one rank than on the others, and the checkpoint is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.executor_cases import Work, clip, executable, train_on

BATCHES = [[clip("a", 3), clip("b", 5)], [clip("c", 2), clip("d", 2)]]
WORKS = [Work((0,), (0,), 0), Work((1,), (1,), 0)]
OPTIMIZER = """

class Noting(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.note = "x" * 10 ** (1 + 3 * rank)


def optimizer(parameters):
    return Noting(parameters, lr=0.1)
"""


def test_every_tensor_is_in_the_checkpoint(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", BATCHES, WORKS, 2, more=OPTIMIZER)
    whole = [step["loss"] for step in train_on(2, folder, steps=4)["steps"]]
    begun = train_on(2, folder, steps=2, checkpoint=tmp_path / "kept")["steps"]
    resumed = train_on(2, folder, steps=4, checkpoint=tmp_path / "kept", resume=True)["steps"]
    assert [step["loss"] for step in (*begun, *resumed)] == pytest.approx(whole, rel=1e-6)
