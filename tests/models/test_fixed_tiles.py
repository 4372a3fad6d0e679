"""VAEs that encode in tiles of one size alone; a run with one of them and with another, up to files for Diffusers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import av
import numpy
import pytest
import torch

from arachnec import cli
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.models.encoders import VideoEncoder
from tests.distributed.executor_cases import RUNS
from tests.slow import SLOW
from tests.warm_python import warm_python

diffusers: Any = pytest.importorskip("diffusers")
MODEL = """
import torch
from diffusers import AutoencoderKL{name}, {name}Transformer3DModel
from torch.nn.functional import mse_loss

from arachnec.models.encoders import VideoEncoder

FOLDER = {folder!r}


def build():
    config = {name}Transformer3DModel.load_config(FOLDER, subfolder="transformer")
    return {name}Transformer3DModel.from_config(config)


def encoders():
    config = AutoencoderKL{name}.load_config(FOLDER, subfolder="vae")
    return {{"vae": VideoEncoder(AutoencoderKL{name}.from_config(config))}}


def sample(clip, generator):
    latents = clip.encoded["vae"]
    noise = torch.randn(latents.shape, generator=generator)
    time = torch.rand(1, generator=generator)
    arguments = {{
        "hidden_states": (1 - time) * latents + time * noise,
        "encoder_hidden_states": torch.randn((1, 8, 32), generator=generator),
        "timestep": time * 1000,
        "encoder_attention_mask": torch.ones((1, 8), dtype=torch.bool),
        "return_dict": False,
    }}
    return arguments, noise - latents


def loss(prediction, target):
    return mse_loss(prediction, target)
"""
SIZES = {"Mochi": (7, 32, 32), "Allegro": (24, 144, 144)}


def vae_of(name: str) -> torch.nn.Module:
    if name == "Mochi":
        widths = (32,) * 4
        vae: torch.nn.Module = diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=widths, decoder_block_out_channels=widths, layers_per_block=(1,) * 5
        )
    else:
        vae = diffusers.AutoencoderKLAllegro(
            block_out_channels=(4,) * 4, norm_num_groups=2, layers_per_block=1, sample_size=144
        )
    return vae


def transformer_of(name: str) -> torch.nn.Module:
    if name == "Mochi":
        transformer: torch.nn.Module = diffusers.MochiTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=1, pooled_projection_dim=32, text_embed_dim=32,
            time_embed_dim=32, max_sequence_length=8,
        )  # fmt: skip
    else:
        transformer = diffusers.AllegroTransformer3DModel(
            num_attention_heads=2, attention_head_dim=24, cross_attention_dim=48, caption_channels=32, num_layers=1
        )
    return transformer


def video(path: Path, frames: int, height: int, width: int) -> None:
    draw = numpy.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p"
        for _ in range(frames):
            pixels = draw.integers(0, 255, (height, width, 3), dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


@SLOW
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # of Mochi's rotary embedding
@pytest.mark.parametrize("name", ["Mochi", "Allegro"])
def test_videos_are_encoded_trained_on_and_exported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python(RUNS))
    frames, height, width = SIZES[name]
    video(tmp_path / "noise.avi", frames, height, width)
    row = {"path": str(tmp_path / "noise.avi"), "frames": frames, "height": height, "width": width, "caption": "x"}
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps({"id": n} | row) + "\n" for n in range(2)))
    torch.manual_seed(0)
    vae_of(name).save_pretrained(tmp_path / "given" / "vae")  # type: ignore[operator]
    transformer_of(name).save_pretrained(tmp_path / "given" / "transformer")  # type: ignore[operator]
    (tmp_path / "model.py").write_text(MODEL.format(name=name, folder=str(tmp_path / "given")))

    build, kept, out = (str(tmp_path / place) for place in ("build", "kept", "out"))
    data = ["--data", str(tmp_path / "clips.jsonl"), "--batch", "all", "--cluster", "2:cpu", "--lr", "1e-3"]
    assert cli.run(["compile", str(tmp_path / "model.py"), *data, "-o", build]) == 0, capfd.readouterr().err
    init = ["--init", str(tmp_path / "given")]
    assert cli.run(["run", build, *init, "--steps", "2", "--checkpoint", kept]) == 0, capfd.readouterr().err
    assert cli.run(["export", build, "--checkpoint", kept, "-o", out]) == 0, capfd.readouterr().err
    steps = json.loads((tmp_path / "build" / "run.json").read_text())["steps"]
    assert len(steps) == 2 and all(step["loss"] > 0 for step in steps)

    kind = type(transformer_of(name))
    before, after = (kind.from_pretrained(tmp_path / place) for place in ("given/transformer", "out"))
    moved = [float((a - b).detach().abs().max()) for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert 0 < max(moved) < 0.01  # two steps of AdamW with this learning rate


def test_a_vae_that_encodes_in_tiles_alone_takes_clips_of_whole_tiles_one_by_one() -> None:
    encoder = VideoEncoder(vae_of("Allegro"))
    clip = VideoClip("a", 24, 140, 144, 1, "x", None)
    encoder.check(clip)
    loaded = torch.randint(0, 255, (2, 3, 24, 144, 144), dtype=torch.uint8)
    both = encoder(loaded)
    assert both.shape == (2, 4, 6, 18, 18)
    assert bool(both.abs().amin(dim=(0, 1)).min() > 0)  # nothing is left out
    torch.testing.assert_close(encoder(loaded[1:]), both[1:])


@pytest.mark.parametrize(
    ("size", "fitting"),
    [((16, 144, 144), "24 x 144 x 144"), ((41, 144, 200), "40 x 144 x 144"), ((40, 175, 144), "40 x 168 x 144")],
)
def test_a_clip_that_whole_tiles_do_not_cover_is_refused_with_a_size_that_they_do(
    size: tuple[int, int, int], fitting: str
) -> None:
    encoder = VideoEncoder(vae_of("Allegro"), 8)
    with pytest.raises(UserError) as told:
        encoder.check(VideoClip("a", *size, 1, "x", None))
    assert "AutoencoderKLAllegro encodes in tiles of 24 x 144 x 144" in str(told.value)
    (diagnostic,) = told.value.diagnostics
    assert fitting in diagnostic.text(diagnostic.help)
