"""What a run leaves behind besides its checkpoints: the last gradient, the report, the last step to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.torch_distributed.reporting import report
from arachnec.checkpoint.files import save_tensors
from arachnec.executable.folder import MEASURED, MEASURED_PROGRAM, Executable
from arachnec.ir.nodes import Module
from arachnec.ir.printer import print_module
from arachnec.runtime.agreement import gather_values
from arachnec.runtime.step_progress import Interval
from arachnec.views.executable_page import PAGE, executable_page
from arachnec.views.timeline import planned, read_measured
from arachnec.views.timeline_svg import draw


class OfRank(msgspec.Struct, frozen=True):
    """What a rank measured of the last step."""

    peak_gib: float
    intervals: list[Interval]


def gradient_saver(path: Path | None) -> Callable[[Mapping[str, Tensor]], None] | None:
    """What ``run_iteration`` calls with the whole gradient: writes it to ``path``, on rank 0."""
    if path is None:
        return None

    def save(gradients: Mapping[str, Tensor]) -> None:
        if dist.get_rank() != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors({name: value.cpu().contiguous() for name, value in gradients.items()}, path, {})

    return save


def write_measured(
    executable: Executable, program: Module, last: report.StepReport, intervals: Sequence[Interval], peak_gib: float
) -> None:
    """Write the last step's program and what all ranks measured of it into the executable's folder, as data and as
    pictures. Collective; ``intervals`` and ``peak_gib`` are this rank's."""
    ranks = gather_values(OfRank(peak_gib, list(intervals)), OfRank)
    if dist.get_rank() != 0:
        return
    everyone = [interval for own in ranks for interval in own.intervals]
    place = executable.folder / MEASURED
    peaks = [own.peak_gib for own in ranks]
    report.write_json(place, report.Measured(last.step, last.iteration, everyone, peaks))
    (executable.folder / MEASURED_PROGRAM).write_text(print_module(program), encoding="utf-8")
    measured = read_measured(place)
    place.with_suffix(".svg").write_text(draw(program, planned(program), measured), encoding="utf-8")
    page = executable_page(program, measured, pipeline=executable.header.pipeline, clips=executable.clips)
    (executable.folder / PAGE).write_text(page, encoding="utf-8")
