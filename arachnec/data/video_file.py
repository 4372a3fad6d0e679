"""Writing video files with PyAV (FFmpeg)."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FRAME_RATE = 16  # frames a second; what Wan's videos are shown at


def write_video(path: Path, pixels: Tensor, rate: int = FRAME_RATE) -> None:
    """An mp4 file (H.264) of ``[3, frames, height, width]`` on [-1, 1]. Odd sizes lose their last row or column."""
    import av

    frames, height, width = pixels.shape[1:]
    shown = pixels[..., : height - height % 2, : width - width % 2]
    images = ((shown.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate))
        stream.height, stream.width, stream.pix_fmt = images.shape[1], images.shape[2], "yuv420p"
        stream.codec_context.thread_count = 1
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(images[number], format="rgb24")))
        container.mux(stream.encode())
