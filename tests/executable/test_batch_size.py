"""Real clips want a word on how many make a global batch; the message proposes a number."""

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.data.clip import VideoClip
from arachnec.data.manifest import Batch, Manifest
from arachnec.executable.batches import require_batch
from arachnec.ir.diagnostic import UserError, render_all

CLIP = VideoClip("a", 81, 480, 832, 20, path=Path("cat.mp4"))
MANIFEST = Manifest(((CLIP,) * 100,), Path("clips.jsonl"))


@pytest.mark.parametrize("batch", [4, "all"])
def test_a_number_and_all_are_words(batch: Batch) -> None:
    assert require_batch(MANIFEST, batch, parse_cluster("2:cpu")) is MANIFEST


def test_clips_of_sizes_alone_and_grouped_ones_need_none() -> None:
    sizes = Manifest(((replace(CLIP, path=None),),), Path("clips.jsonl"))
    grouped = replace(MANIFEST, grouped=True)
    for manifest in (sizes, grouped):
        assert require_batch(manifest, None, parse_cluster("2:cpu")) is manifest


@pytest.mark.parametrize(
    ("frames", "cluster", "proposed"),
    [
        (81, "2x8:h100-80g", "--batch 16: a clip for each device"),
        (1, "4x64:h100-80g", "--batch 100: a clip for each device"),  # no more than there are
        (1600, "2x8:h100-80g", "--batch 5: a clip for every 3 devices"),
    ],
)
def test_a_number_is_proposed_by_devices_and_memory(frames: int, cluster: str, proposed: str) -> None:
    clips = replace(MANIFEST, iterations=((replace(CLIP, frames=frames),) * 100,))
    with pytest.raises(UserError) as raised:
        require_batch(clips, None, parse_cluster(cluster))
    text = render_all(raised.value.diagnostics)
    assert "`clips.jsonl` lists 100 clips, and nothing says how many of them make a global batch" in text
    assert proposed in text and "--batch all" in text


def test_outputs_of_encoders_are_real_clips() -> None:
    cached = Manifest(((replace(CLIP, path=None, cached={"vae": Path("a.safetensors")}),),), Path("clips.jsonl"))
    with pytest.raises(UserError, match="nothing says how many"):
        require_batch(cached, None, parse_cluster("2:cpu"))
