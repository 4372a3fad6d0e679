"""What goes wrong with a clip in a traced graph names the clip; what goes wrong elsewhere stays as it is."""

import pytest
import torch
from torch import fx, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.models.clip_errors import naming

CLIPS = [VideoClip("a", 1, 8, 8, 0), VideoClip("b", 1, 8, 8, 0)]


def collective(x):
    raise RuntimeError("a peer is gone")


fx.wrap("collective")


class Linear(nn.Module):
    def forward(self, x):
        return torch.ops.aten.mm.default(x, x)


class Gathers(nn.Module):
    def forward(self, x):
        return collective(x)


def test_an_operation_of_a_graph_that_refuses_its_input_names_the_clips() -> None:
    with pytest.raises(UserError, match="the model cannot run on clips a, b: RuntimeError"), naming(CLIPS):
        fx.symbolic_trace(Linear())(torch.ones(2, 3))


def test_what_a_graph_calls_keeps_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="a peer is gone"), naming(CLIPS):
        fx.symbolic_trace(Gathers())(torch.ones(2, 3))


def test_what_no_graph_raised_stays_a_bug() -> None:
    with pytest.raises(ZeroDivisionError), naming(CLIPS):
        _ = 1 / 0
