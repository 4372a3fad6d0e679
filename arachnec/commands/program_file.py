"""Reading what ``check``, ``simulate`` and ``show`` take: an executable folder, or a lowered module as a file."""

from __future__ import annotations

from pathlib import Path

from arachnec.commands.opt import read_text
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.verify import check_module

PROGRAM = "program.cascade"


REMAINING = {
    Level.TRACED: "partition,annotate,schedule-z3,place,lower",
    Level.PARTITIONED: "annotate,schedule-z3,place,lower",
    Level.COSTED: "schedule-z3,place,lower",
    Level.SCHEDULED: "place,lower",
    Level.PLACED: "lower",
}
REMAINING_OF_REQUESTS = {
    **REMAINING,
    Level.TRACED: "segment,annotate,schedule-sampling,place,lower",
    Level.PARTITIONED: "annotate,schedule-sampling,place,lower",
    Level.COSTED: "schedule-sampling,place,lower",
}


def demand_program(path: Path) -> None:
    """Raises ``UserError`` where nothing is at ``path``."""
    if not path.exists() and str(path) != "-":
        raise user_error(
            f"there is no {path}", help="give the folder that `arachnec compile -o` wrote, or a .cascade file"
        )


def read_program(path: Path) -> Module:
    """The lowered module at ``path``, verified but not yet checked. Raises UserError."""
    demand_program(path)
    file = path / PROGRAM if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise user_error(
            f"{path} has no {PROGRAM}", help="give the folder that `arachnec compile -o` wrote, or a .cascade file"
        )
    module = parse_module(read_text(file), str(file))
    if module.level is not Level.LOWERED:
        remaining = REMAINING if module.attrs.get("models") is None else REMAINING_OF_REQUESTS
        raise user_error(
            f"{file} is at level {module.level.word}, and only a lowered module has programs",
            help=f"run `arachnec opt {file} --passes {remaining[module.level]} -o lowered.cascade` first",
        )
    check_module(module)
    return module
