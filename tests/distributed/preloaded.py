"""What ranks that are forked for tests have at birth: the captures of small models, which take a second each time."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from pathlib import Path

import torch

from arachnec.models.file import load_model_file
from arachnec.tracing import blocks
from arachnec.tracing.sample import example_calls
from tests.distributed import pipeline_cases
from tests.distributed.executor_cases import ADAPTERS, DOUBLE, MODEL, TIED, captured_once, clip
from tests.distributed.rank_device import without_gpu
from tests.generation.cases import written

MODELS = (
    MODEL, MODEL + DOUBLE, MODEL + ADAPTERS, MODEL + TIED, pipeline_cases.MODEL,
    pipeline_cases.MODEL + pipeline_cases.FROZEN,
)  # fmt: skip

gc.set_threshold(50_000, 20, 20)
torch.set_num_threads(1)  # threads would not come along
with tempfile.TemporaryDirectory() as folder, captured_once(), without_gpu():
    for number, text in enumerate(MODELS):
        path = Path(folder, f"model_{number}.py")
        path.write_text(text)
        _file = load_model_file(path)
        _model = _file.build()
        blocks.capture_blocks(_model, example_calls(_model, _file, [clip("a", 3)]), verify=False)
    if importlib.util.find_spec("diffusers"):  # which its scheduler is of
        _file = written(Path(folder)).model_file("large")
        with torch.device("meta"):
            _model = _file.build()
        blocks.capture_blocks(_model, example_calls(_model, _file, [clip("a", 3)]), verify=False)
gc.freeze()
