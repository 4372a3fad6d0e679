"""How rows are cut into tiles, groups and runs, and that the kernels compile for a device that is not here."""

import itertools
import random
import shutil
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from arachnec.kernels.rowwise import norm_launch, row_launch
from arachnec.kernels.rowwise.norm_plain import Vectors
from arachnec.kernels.rowwise.rope_launch import head_tile
from arachnec.kernels.rowwise.row_groups import RowGroups, group_vectors
from arachnec.kernels.rowwise.row_launch import tile_of
from benchmarks.kernels.compile_estimate import Recorder

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.parametrize(("size", "tile"), [(5120, 1024), (1536, 512), (3072, 1024), (8192, 2048), (6144, 2048)])
def test_usual_hidden_sizes_have_no_idle_lane(size: int, tile: int) -> None:
    assert tile_of(size) == tile and size % tile == 0


def test_no_hidden_size_idles_more_than_a_fifth_of_its_lanes() -> None:
    idle = {size: -(-size // tile_of(size)) * tile_of(size) - size for size in range(64, 8193)}
    assert all(5 * lanes <= size + lanes for size, lanes in idle.items())


def test_heads_of_usual_models_have_no_idle_lane() -> None:
    for heads, size in ((12, 128), (24, 128), (40, 128), (48, 64), (32, 128)):
        count, pairs = head_tile(heads, size)
        assert heads % count == 0 and 2 * pairs == size and heads // count <= 8


def test_rows_past_8192_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8192"):
        tile_of(8193)


@pytest.mark.parametrize("slots", [1, 7, 264])
def test_programs_cover_every_run_of_any_packed_sequence(slots: int) -> None:
    draw = random.Random(slots)
    for _ in range(200):
        lengths = [draw.choice([0, 1, 5, 400, 32760]) for _ in range(draw.randint(1, 40))]
        groups = RowGroups(sum(lengths), len(lengths), torch.zeros(len(lengths) + 1))
        run = groups.run(slots)
        assert sum(-(-length // run) for length in lengths) <= groups.programs(run)


@pytest.mark.parametrize(("rows", "count"), [(32760, 1), (131040, 4), (40950, 5), (12, 12)])
def test_equal_groups_fit_the_slots_whenever_they_can(rows: int, count: int) -> None:
    groups = RowGroups(rows, count)
    assert groups.programs(groups.run(264)) <= 264


def test_segments_do_not_mix_kinds() -> None:
    x = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="not of one kind"):
        group_vectors(x, (torch.randn(2, 1, 4), torch.randn(2, 5, 4)), None)


def test_packed_sums_are_those_of_the_segments() -> None:
    lengths = [1, 5, 0, 7]
    groups = RowGroups(13, 4, torch.tensor([0, *itertools.accumulate(lengths)]))
    values = torch.randn(13, 3)
    expected = torch.stack([part.sum(0) for part in values.split(lengths)])
    torch.testing.assert_close(groups.sum(values), expected)
    torch.testing.assert_close(
        groups.sum(groups.spread(torch.ones(4, 3)))[:, 0], torch.tensor(lengths, dtype=torch.float32)
    )


@pytest.mark.skipif(not (TOOL.exists() or shutil.which("cuobjdump")), reason="triton without its CUDA tools")
@pytest.mark.parametrize(("hidden", "gated"), [(1536, True), (5120, False)])
def test_as_many_programs_fit_a_multiprocessor_as_the_launch_counts_on(
    hidden: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    forward, backward = Recorder(norm_launch.norm_forward), Recorder(norm_launch.norm_backward)
    monkeypatch.setattr(norm_launch, "norm_forward", forward)
    monkeypatch.setattr(norm_launch, "norm_backward", backward)
    monkeypatch.setattr(row_launch, "column_sums", Recorder(row_launch.column_sums))
    groups = RowGroups(32760, 4, meta(5, dtype=torch.int32))
    wide = [meta(4, hidden, dtype=torch.float32) for _ in range(3)]
    vectors = Vectors(None, None, wide[0], wide[1], wide[2] if gated else None)
    x = meta(32760, hidden)
    side = x if gated else None
    h, y, mean, rstd = norm_launch.forward(x, side, vectors, groups, True, 1e-6)
    norm_launch.backward(y, side, h, mean, rstd, side, vectors, groups, True, True)
    launch = norm_launch.backward_launch(h, side, side, 3 if gated else 2)
    for estimate in (*forward.estimates(), *backward.estimates()):
        assert estimate.spilled <= 32
    assert backward.estimates()[0].resident >= launch.slots // row_launch.Device().multiprocessors
