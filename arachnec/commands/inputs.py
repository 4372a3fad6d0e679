"""What every command looks at before it imports a library that takes seconds: files that are not there."""

from __future__ import annotations

from pathlib import Path

from arachnec.models.file import MODEL_FILE, FileForm, demand_python_file
from arachnec.models.weights_there import demand_weights_there


def demand_inputs(model: Path, *, form: FileForm = MODEL_FILE, init: Path | None = None) -> None:
    """Raises ``UserError`` where there is no such Python file, or nothing at ``init``."""
    demand_python_file(model, form)
    if init is not None:
        demand_weights_there(init)
