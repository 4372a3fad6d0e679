"""Whether a folder of weights is there at all: a look that imports nothing."""

from __future__ import annotations

from pathlib import Path

from arachnec.ir.diagnostic import UserError, user_error


def no_weights_error(folder: str, reason: str) -> UserError:
    return user_error(
        f"{folder} holds no weights: {reason}",
        help="give a folder that `save_pretrained` wrote, or one of .safetensors files",
    )


def demand_weights_there(folder: Path) -> None:
    """Raises ``UserError`` where there is neither a folder nor a file."""
    if not folder.exists():
        raise no_weights_error(str(folder), "there is no such folder")
