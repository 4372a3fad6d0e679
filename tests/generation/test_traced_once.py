"""Two experts of one structure, called alike, are traced once; any other two are two models."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from arachnec.generation import plan
from tests.generation.cases import FIXED, REQUESTS, sampling_of, written

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
    monkeypatch.setattr(plan, "trace_model", lambda source, clips, **options: Mock())
    both = plan.traced(sampling_of(written(tmp_path, more), FIXED), REQUESTS).traces
    assert list(both) == ["large", "small"]
    assert len({id(trace) for trace in both.values()}) == count
