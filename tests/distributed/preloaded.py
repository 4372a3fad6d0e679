"""What ranks that are forked for tests have at birth: the captures of small models, which take a second each time."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from pathlib import Path

import torch

from arachnec.backends.cascade_step import DTYPES, in_training_precision
from arachnec.executable.training_options import Training
from arachnec.models.file import load_model_file
from arachnec.models.precision import CastSamples
from arachnec.tracing import blocks, sample
from tests.distributed import pipeline_cases
from tests.distributed.executor_cases import ADAPTERS, DOUBLE, FOUR_BLOCKS, MODEL, TIED, captured_once, clip
from tests.distributed.rank_device import without_gpu
from tests.generation.cases import written

FP32, BF16 = Training(), Training(dtype="bf16")
MODELS = (
    (MODEL, FP32), (MODEL, BF16), (FOUR_BLOCKS, FP32),
    (MODEL + DOUBLE, FP32), (MODEL + ADAPTERS, FP32), (MODEL + TIED, FP32),
    (pipeline_cases.MODEL, FP32), (pipeline_cases.MODEL, BF16),
    (pipeline_cases.MODEL + pipeline_cases.FROZEN, FP32), (pipeline_cases.MODEL + pipeline_cases.ADAPTED, FP32),
)  # fmt: skip

gc.set_threshold(50_000, 20, 20)
torch.set_num_threads(1)  # threads would not come along
with tempfile.TemporaryDirectory() as folder, captured_once(), without_gpu():
    for number, (text, training) in enumerate(MODELS):
        path = Path(folder, f"model_{number}.py")
        path.write_text(text)
        _file = load_model_file(path)
        with torch.device("meta"):  # as on a rank
            _model = in_training_precision(_file, training).build()
        _source = CastSamples(_file, DTYPES[training.dtype] if training is BF16 else None)
        blocks.capture_blocks(_model, sample.example_calls(_model, _source, [clip("a", 3)]), verify=False)
    if importlib.util.find_spec("diffusers"):  # which its scheduler is of
        _file = written(Path(folder)).model_file("large")
        with torch.device("meta"):
            _model = _file.build()
        blocks.capture_blocks(_model, sample.example_calls(_model, _file, [clip("a", 3)]), verify=False)
gc.freeze()
