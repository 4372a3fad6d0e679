"""docs/fine_tuning.md from end to end: a pretrained folder, videos with captions, ranks, files for Diffusers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import av
import numpy
import pytest
import torch
from safetensors import safe_open

from arachnec import cli
from arachnec.data.clip import VideoClip
from arachnec.models.batch import make_batch, prediction_of
from arachnec.models.file import load_model_file
from arachnec.models.initial_weights import initial_weights
from tests.distributed.executor_cases import RUNS
from tests.slow import quick
from tests.warm_python import warm_python

diffusers: Any = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")

EXAMPLES = Path(__file__).parents[2] / "examples" / "finetune"
SIZES = ((5, 32, 48), (1, 32, 32), (5, 32, 48))  # frames, height, width


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pretrained pipeline's folder, and a manifest of three clips of one video."""
    from examples.finetune.pretrained import main

    main(str(tmp_path / "pretrained"))
    draw = numpy.random.default_rng(0)
    with av.open(str(tmp_path / "noise.avi"), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuvj420p"
        for _ in range(8):
            pixels = draw.integers(0, 255, (32, 48, 3), dtype=numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    rows = [
        {"id": n, "path": "noise.avi", "start": n, "caption": f"noise {n}", "frames": f, "height": h, "width": w}
        for n, (f, h, w) in enumerate(SIZES)
    ]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("kind", quick(["lora", "full"], "lora"))
def test_a_pretrained_folder_is_trained_on_two_ranks_then_one_and_exported(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python(RUNS))
    pretrained, build, kept = folder / "pretrained", folder / "build", folder / "kept"
    model = folder / "model.py"
    source = (EXAMPLES / f"{kind}.py").read_text()
    model.write_text(source.replace('"finetune-output/pretrained"', repr(str(pretrained))))

    def arachnec(*words: object) -> None:
        assert cli.run([str(word) for word in words]) == 0, capfd.readouterr().err

    data = ("--data", folder / "clips.jsonl", "--batch", "all", "--cluster", "2:cpu")
    arachnec("compile", model, *data, "--lr", "1e-2", "-o", build)
    run = ("run", build, "--init", pretrained, "--checkpoint", kept)
    arachnec(*run, "--steps", 2)
    arachnec(*run, "--steps", 3, "--ranks", 1, "--resume")
    steps = json.loads((build / "run.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [2]

    expected = predicted(trained(model, pretrained, kept), model)
    untrained = diffusers.WanTransformer3DModel.from_pretrained(pretrained / "transformer")
    assert not torch.allclose(predicted(untrained, model), expected, atol=1e-3)
    whole = ("export", build, "--checkpoint", kept, "-o", folder / "whole")
    arachnec(*whole, *(("--init", pretrained) if kind == "lora" else ()))
    again = diffusers.WanTransformer3DModel.from_pretrained(folder / "whole")
    torch.testing.assert_close(predicted(again, model), expected, rtol=1e-5, atol=1e-5)
    if kind == "lora":
        arachnec("export", build, "--checkpoint", kept, "-o", folder / "adapter", "--lora")
        pipeline = diffusers.WanPipeline.from_pretrained(pretrained)
        pipeline.load_lora_weights(folder / "adapter")
        torch.testing.assert_close(predicted(pipeline.transformer, model), expected, rtol=1e-5, atol=1e-5)


def trained(path: Path, pretrained: Path, kept: Path) -> Any:
    """The file's model with the newest checkpoint's parameters, joined here from what the ranks wrote."""
    model: Any = load_model_file(path).build()
    initial_weights(pretrained, model).fill(model)
    newest = max(kept.glob("step-*"))
    assert newest.name == "step-00000003"
    parameters, filled = dict(model.named_parameters()), set()
    with torch.no_grad():
        for place in newest.glob("rank-*.safetensors"):
            with safe_open(place, "pt") as file:
                for key, (first, _) in json.loads(file.metadata()["runs"]).items():
                    name = key.removeprefix("master/")
                    if name != key:
                        run = file.get_tensor(key)
                        parameters[name].view(-1)[first : first + len(run)] = run
                        filled.add(name)
    assert filled == {name for name, value in parameters.items() if value.requires_grad}
    return model


@torch.no_grad()
def predicted(model: Any, path: Path) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shapes = {"vae": (1, 4, 2, 4, 6), "text": (1, 7, 64)}
    encoded = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    clip = VideoClip("a", 5, 32, 48, 7, "a cat", None, 0)
    arguments, _ = make_batch(load_model_file(path), [clip], 0, 3, "cpu", encoded=encoded)
    return prediction_of(model.eval()(**arguments))
