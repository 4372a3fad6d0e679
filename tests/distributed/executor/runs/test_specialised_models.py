"""Models that one graph cannot serve, on ranks: they compute what one process computes, at every step down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.executable.folder import write_executable
from arachnec.ir.diagnostic import UserError
from arachnec.ir.values import Value
from arachnec.ir.verify import check_module
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import (
    MODEL,
    Work,
    assert_same_gradients,
    clip,
    lowered,
    plain_loop,
    traced,
    train_on,
)

CLIPS = (clip("a", 3), clip("b", 5), clip("c", 3))

# The block is told how many frames there are, and attends over the frames of each place.
GRID = """

class Block(Block):
    def forward(self, x, time, frames):
        x = super().forward(x, time)
        y = x.unflatten(1, (frames, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return x + y.transpose(1, 2).flatten(1, 2)


class Tiny(Tiny):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(12, 3, 24) for _ in range(2)])

    def forward(self, x, time, frames):
        t = self.time(time[:, None].to(x.dtype))
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, t, frames)
        return self.head(x)


def build():
    return Tiny()


_sample = sample


def sample(clip, generator):
    arguments, target = _sample(clip, generator)
    return {**arguments, "frames": clip.frames}, target
"""

# The block goes through its clips one by one, and leaves out the masked places of each.
LOOP = """

class Block(Block):
    def forward(self, x, time):
        rows = [super(Block, self).forward(x[i : i + 1], time[i : i + 1]) for i in range(len(x))]
        kept = [nn.functional.silu(y[:, torch.nonzero(time[i] < 9).flatten()]) for i, y in enumerate(rows)]
        return torch.cat([nn.functional.pad(y, (0, x.shape[2] - y.shape[2])) + z.mean() for y, z in zip(rows, kept)])


class Tiny(Tiny):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(12, 3, 24) for _ in range(2)])


def build():
    return Tiny()
"""

# What the block does depends on its values.
BRANCH = """

class Block(Block):
    def forward(self, x, time):
        return super().forward(x, time) * (2 if x.mean() > 0 else 3)


class Tiny(Tiny):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(12, 3, 24) for _ in range(2)])


def build():
    return Tiny()
"""


# Takes one clip alone, and its blocks read a grid as numbers.
ALONE = """

class Block(Block):
    def forward(self, x, time, grid):
        return super().forward(x, time) + torch.linspace(0, 1, math.prod(grid.tolist()[0]))[None, :, None]


class Tiny(Tiny):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(12, 3, 24) for _ in range(2)])

    def forward(self, x, time, grid):
        t = self.time(time.expand(time.size(0), 1)).to(x.dtype)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, t, grid)
        return self.head(x)


def build():
    return Tiny()


_sample = sample


def sample(clip, generator):
    arguments, target = _sample(clip, generator)
    return {**arguments, "grid": torch.tensor([[clip.frames, clip.height // 8, clip.width // 8]])}, target


import math
"""


def compiled(folder: Path, more: str, works: list[Work], world: int, **says: Value) -> Path:
    """An executable whose trained stage says how its graphs are."""
    source = folder / "source.py"
    source.write_text(MODEL + more)
    module = traced(world, [CLIPS])
    layers = tuple((f"blocks.{i}", 100) for i in range(2))
    stages = tuple(replace(stage, attrs=stage.attrs.updated(layers=layers, **says)) for stage in module.stages)
    module = replace(module, stages=stages)
    program = lowered(module, works)
    check_module(program)
    return write_executable(
        folder, program=program, traced=module, pipeline="default", model_file=load_model_file(source), clips=CLIPS
    )


@pytest.mark.parametrize(
    ("more", "works", "says"),
    [
        pytest.param(
            GRID,
            [Work((0, 2), (0, 1), 0.0), Work((1,), (1,), 1.0, attrs=(("recompute", 2),))],
            {"graphs": "shapes"},
            id="a-graph-for-each-shape",
        ),
        pytest.param(
            LOOP,
            [Work((0,), (0, 1), 0.0), Work((1,), (0, 1), 1.0), Work((2,), (0,), 2.0)],
            {"most_clips": 1},
            id="a-graph-of-one-clip",
        ),
        pytest.param(
            BRANCH,
            [Work((0, 2), (0,), 0.0, attrs=(("recompute", 1),)), Work((1,), (1,), 0.0)],
            {"graphs": "none", "degrees": (1,)},
            id="whole-on-one-rank",
        ),
        pytest.param(
            ALONE,
            [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0), Work((2,), (0,), 1.0)],
            {"graphs": "none", "degrees": (1,), "most_clips": 1},
            id="one-clip-whole-on-one-rank",
        ),
    ],
)
def test_a_model_that_one_graph_cannot_serve_has_the_loss_and_gradients_of_a_plain_loop(
    tmp_path: Path, more: str, works: list[Work], says: dict[str, Value]
) -> None:
    folder = compiled(tmp_path, more, works, 2, **says)
    report = train_on(2, folder, save_gradients=tmp_path / "g.safetensors")
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(report["steps"][0]["loss"] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(tmp_path / "g.safetensors", gradients)


def test_a_program_with_more_clips_in_a_forward_than_the_graph_takes_is_refused(tmp_path: Path) -> None:
    works = [Work((0, 2), (0, 1), 0.0), Work((1,), (1, 0), 1.0)]
    with pytest.raises(UserError, match="has 2 clips in a forward, stage `@dit` takes 1"):
        compiled(tmp_path, LOOP, works, 2, most_clips=1)
