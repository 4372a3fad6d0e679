"""What every command looks at before it imports a library that takes seconds: files that are not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from arachnec.models.file import MODEL_FILE, FileForm, demand_python_file
from arachnec.models.weights_there import demand_weights_there


def demand_file_can_be_written(path: Path) -> None:
    """Raises ``OSError`` where a file of this name could not be written, before what takes long is done for it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def demand_inputs(model: Path, *, form: FileForm = MODEL_FILE, init: Path | None = None) -> None:
    """Raises ``UserError`` where there is no such Python file, or nothing at ``init``."""
    demand_python_file(model, form)
    if init is not None:
        demand_weights_there(init)
