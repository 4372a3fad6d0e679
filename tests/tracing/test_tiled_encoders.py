"""A VAE that encodes tiles costs what all its tiles cost, though each size of them is run but once."""

from unittest.mock import patch

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.tracing import shell
from arachnec.tracing.sample import encoded_shape


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.runs = nn.Conv3d(3, 16, 3, padding=1), nn.Conv3d(16, 2, 3, padding=1), 0

    def forward(self, pixels: Tensor) -> Tensor:
        self.runs += 1
        latents: Tensor = self.narrow(self.wide(pixels).relu())
        return latents


class Tiling(nn.Module):
    use_tiling = True

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, pixels: Tensor) -> Tensor:
        rows = [[self.encoder(tile) for tile in row.split(16, 4)] for row in pixels.split(16, 3)]
        return torch.cat([torch.cat(row, 4) for row in rows], 3)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vae = Tiling()

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        return torch.empty(1, 3, clip.frames, clip.height, clip.width, device=device)

    def forward(self, loaded: Tensor) -> Tensor:
        latents: Tensor = self.vae(loaded)
        return latents


def test_tiles_of_one_size_are_run_once_and_counted_as_often_as_there_are() -> None:
    clip = VideoClip(0, 5, 72, 88, 1)  # tiles of 16 x 16, 8 x 16, 16 x 8 and 8 x 8
    with torch.device("meta"):
        video = Video()
    measured = shell.measure_encoder(video, clip)
    assert video.vae.encoder.runs == 4
    with patch.object(shell, "tiling_vae", return_value=None):
        assert shell.measure_encoder(video, clip) == measured
    assert video.vae.encoder.runs == 4 + 5 * 6


def test_shapes_of_tiles_are_kept_for_the_next_clip() -> None:
    with torch.device("meta"):
        video = Video()
    for height, runs in ((72, 4), (88, 4), (84, 6)):
        assert encoded_shape(video, VideoClip(0, 5, height, 88, 1)).shape == (1, 2, 5, height, 88)
        assert video.vae.encoder.runs == runs
