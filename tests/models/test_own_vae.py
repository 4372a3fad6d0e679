"""The encoder of docs/your_model.md, as it stands there, on a video."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import av
import numpy
import pytest
import torch

from arachnec.data.clip import VideoClip

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"
FRAMES, HEIGHT, WIDTH = 9, 16, 32


@pytest.fixture(scope="module")
def own_encoders() -> dict[str, Any]:
    """What ``encoders()`` of the page's example gives."""
    (code,) = (
        text for text in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if "OwnVae" in text
    )
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    encoders: dict[str, Any] = names["encoders"]()
    return encoders


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> VideoClip:
    """Frame n of the file is of grey 20 n."""
    path = tmp_path_factory.mktemp("video") / "grey.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "bgr0"
        for number in range(12):
            pixels = numpy.full((HEIGHT, WIDTH, 3), 20 * number, dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return VideoClip("grey", FRAMES, HEIGHT, WIDTH, 4, path=path, start=2)


def test_a_vae_of_ones_own_reads_videos_and_says_shapes_without_them(
    own_encoders: dict[str, Any], clip: VideoClip
) -> None:
    vae = own_encoders["vae"]
    loaded, announced = vae.load(clip, "cpu"), vae.load(clip, "meta")
    assert (loaded.shape, loaded.dtype) == (announced.shape, announced.dtype) == ((1, 3, 9, 16, 32), torch.uint8)
    assert loaded[0, 0, :, 0, 0].tolist() == [20 * number for number in range(2, 11)]
    latents = vae(loaded)
    assert latents.shape == vae(announced).shape == (1, 3, 3, 2, 4)
    assert latents[0, 0, 0, 0, 0].item() == pytest.approx((40 + 60 + 80 + 100) / 4 / 127.5 - 1)
