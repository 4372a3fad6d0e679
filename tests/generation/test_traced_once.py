"""Two experts of one structure, called alike, are traced once; any other two are two models."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from arachnec.generation import plan, rank_models
from tests.generation.cases import FIXED, REQUESTS, lowered, partitioned, sampling_of, written

OTHER_SETTING = """

def small():
    model = Tiny()
    model.blocks[0].options = {"scale": 2.0}
    return model


def models():
    return {"large": lambda: Tiny(), "small": small}
"""
OTHER_ARGUMENTS = """

alike = arguments


def arguments(name, latents, timestep, request, conditional):
    given = alike(name, latents, timestep, request, conditional)
    return given if name == "large" else {**given, "time": given["time"].double()}
"""


ALIKE = pytest.mark.parametrize(
    ("more", "count"), [("", 1), (OTHER_SETTING, 2), (OTHER_ARGUMENTS, 2)], ids=["alike", "setting", "arguments"]
)


@ALIKE
def test_models_are_traced_once_where_nothing_tells_them_apart(
    more: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Mock(side_effect=lambda source, clips, **options: Mock())
    monkeypatch.setattr(plan, "trace_model", trace)
    both = plan.traced(sampling_of(written(tmp_path, more), FIXED), REQUESTS).traces
    assert trace.call_count == len(set(both.values())) == count
    assert list(both) == ["large", "small"]


@ALIKE
def test_a_rank_captures_models_once_where_nothing_tells_them_apart(
    more: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Mock(wraps=rank_models.captured_again)
    monkeypatch.setattr(rank_models, "captured_again", capture)
    sampling = sampling_of(written(tmp_path, more), FIXED)
    program = lowered(partitioned(sampling, REQUESTS, 2), {})
    models = rank_models.RankModels(sampling.sampler, torch.device("cpu"))
    models.prepare_all(program, REQUESTS)
    assert capture.call_count == count
    large, small = (models._sequences[name] for name in sampling.names)
    assert large.model is models("large") and small.model is models("small")
