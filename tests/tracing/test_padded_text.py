"""To how many text tokens captions are padded is found from the sizes of what a model is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.data.requests import Request
from arachnec.models.sampler_file import load_sampler_file
from arachnec.tracing.sample_reads import padded_text

pytest.importorskip("diffusers")

FILE = """
import torch
from torch import nn


class Model(nn.Linear):
    pass


def models():
    return {"large": lambda: Model(4, 4)}


def scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def start(request, generator):
    return torch.randn(1, request.frames, 4, generator=generator)


def arguments(name, latents, timestep, request, conditional):
    real = request.clip(conditional).text_tokens
    return {"input": latents, "text": torch.zeros(1, LENGTH, 4)}
"""
LENGTHS = {"max(37, real)": 37, "real": None, "5": None, "-(-real // 16) * 16": None}


@pytest.mark.parametrize("length", LENGTHS)
def test_the_length_that_all_captions_have(tmp_path: Path, length: str) -> None:
    path = tmp_path / "sampler.py"
    path.write_text(FILE.replace("LENGTH", length))
    source = load_sampler_file(path).model_file("large")
    requests = [Request(n, None, 9, 32, 32 * n, text_tokens=text) for n, text in ((1, 20), (2, 9))]
    assert padded_text(source, [request.clip() for request in requests]) == LENGTHS[length]


def test_a_caption_that_is_too_long_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "sampler.py"
    refusing = "    if real > 50:\n        raise ValueError('too long')\n    return"
    path.write_text(FILE.replace("LENGTH", "50").replace('    return {"input"', refusing + ' {"input"'))
    source = load_sampler_file(path).model_file("large")
    assert padded_text(source, [Request(1, None, 9, 32, 32, text_tokens=50).clip()]) == 50
    assert padded_text(source, [Request(1, None, 9, 32, 32, text_tokens=3).clip()]) == 50
