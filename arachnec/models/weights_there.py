"""Whether a folder of weights is there at all: a look that imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arachnec.ir.diagnostic import Diagnostic, UserError


@dataclass(frozen=True)
class NoWeights(Diagnostic):
    title = "{folder} holds no weights: {reason}"
    help = "give a folder that `save_pretrained` wrote, or one of .safetensors files"
    folder: str
    reason: str


def demand_weights_there(folder: Path) -> None:
    """Raises ``UserError`` where there is neither a folder nor a file."""
    if not folder.exists():
        raise UserError(NoWeights(None, str(folder), "there is no such folder"))
