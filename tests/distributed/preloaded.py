"""What ranks that are forked for tests have at birth: the capture of the small model, which takes seconds each time."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch

from arachnec.models.file import load_model_file
from arachnec.tracing import blocks
from arachnec.tracing.sample import example_calls
from tests.distributed.executor_cases import MODEL, captured_once, clip

gc.set_threshold(50_000, 20, 20)
torch.set_num_threads(1)  # threads would not come along
with tempfile.TemporaryDirectory() as folder, captured_once():
    Path(folder, "model.py").write_text(MODEL)
    _file = load_model_file(Path(folder, "model.py"))
    _model = _file.build()
    blocks.capture_blocks(_model, example_calls(_model, _file, [clip("a", 3)]), verify=False)
gc.freeze()
