"""A run on this machine: the ranks, what they say, and the pictures at the end.

What takes torch or draws is imported when it is needed: the ranks start without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.reporting.events import decode, line
from arachnec.backends.torch_distributed.reporting.report import Event, Note, Start, StepReport
from arachnec.cluster.topology import cluster_for
from arachnec.executable.folder import MODEL, demand_folder, read_executable
from arachnec.executable.other_manifests import demand_same_manifests
from arachnec.executable.train_file import located
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, counted
from arachnec.ir.nodes import Module
from arachnec.launch.local_ranks import crash_told, launch
from arachnec.views.format import terminal

ROWS = 8
COLUMNS = ("step", "loss", "step ms", "planned ms", "imbalance", "tokens/s", "peak GiB", "waited for plan ms")


@dataclass
class Display:
    """Shows each event as it comes. Use as a context manager."""

    console: Console
    _recent: list[StepReport] = field(default_factory=list)
    _progress: Progress | None = None
    _task: TaskID | None = None
    _live: Live | None = None
    _costs: str = ""

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self.console)
            self._live = Live(self._view(), console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._view())
            self._live.__exit__(None, None, None)

    def show(self, data: bytes) -> None:
        """One line that rank 0 reported."""
        event = decode(data)
        if self._live is None or self._progress is None:
            self.console.print(line(event), highlight=False, soft_wrap=True)
        else:
            self._update(self._progress, self._live, event)

    def _update(self, progress: Progress, live: Live, event: Event) -> None:
        if isinstance(event, Note):
            live.console.print(line(event))
        elif isinstance(event, Start):
            live.console.print(line(event))
            self._costs = event.costs
            self._task = progress.add_task("steps", total=event.steps)
        else:
            self._recent = [*self._recent, event][-ROWS:]
            if self._task is not None:
                progress.advance(self._task)
        live.update(self._view())

    def _view(self) -> Group:
        assert self._progress is not None
        source = f", costs from {self._costs}" if self._costs else ""
        table = Table(caption=f"planned: the plan's own numbers{source}; all others measured", caption_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for event in self._recent:
            table.add_row(*cells(event))
        return Group(table, self._progress)


def cells(event: StepReport) -> tuple[str, ...]:
    return (
        str(event.step),
        "skipped" if event.loss is None else f"{event.loss:.6f}",
        f"{event.step_ms:.1f}",
        f"{event.planned_ms:.1f}",
        f"{event.imbalance:.3f}",
        f"{event.tokens_per_s:,.0f}",
        f"{event.peak_memory_gib:.2f}",
        f"{event.exposed_planning_ms:.1f}",
    )


def run_here(
    folder: Path, ranks: int | None, options: RunOptions, before: Callable[[Module], str] | None = None
) -> None:
    """Start the ranks, show how they fare, and say what was written. ``before`` sees the program that is about to run,
    where none is to be planned anew for other ranks, while the ranks start: none trains before it has come back.

    Raises ``UserError`` before anything starts for a folder that is no executable, options out of range, or a number of
    ranks that the cluster cannot be divided into; before any rank trains, for what torch or the folder of weights to
    begin with is no good for.
    """
    executable = read_executable(folder)
    try:
        training = options.training(executable.training)
        demand_same_manifests(executable, training)
    except UserError as error:
        raise located(error, options.train) from None
    files = (path.parent for path in (options.report, options.save_gradients) if path)
    for place in filter(None, (folder, *files, options.checkpoint, options.save_lists)):
        demand_folder(place)
    cluster = executable.program.cluster
    assert cluster is not None
    world = ranks or cluster.world
    cluster_for(cluster, world)
    console = terminal()
    for name in executable.changed_since():
        told = f"note: {name} has changed since it was compiled; its copy in {folder} runs; compile again"
        console.print(told, highlight=False, soft_wrap=True)

    def beside() -> None:
        _look_while_ranks_start(options, training, executable.digests[MODEL])
        if before is not None and world == cluster.world:
            console.print(before(executable.program), highlight=False, soft_wrap=True)

    with crash_told(), Display(console) as display:
        launch(
            world,
            [str(folder), *options.arguments()],
            display.show,
            stopped_s=options.stall_timeout,
            beside=beside,
            on_stop=None if options.checkpoint is None else partial(_tell_stop, display),
        )
    for text in written(folder, options, training.accumulate):
        console.print(text, highlight=False, soft_wrap=True)


def _tell_stop(display: Display) -> None:
    told = "the run ends after the step under way, with a checkpoint; Ctrl-C again ends it at once"
    display.show(msgspec.json.encode(Note(told)))


def _look_while_ranks_start(options: RunOptions, training: Training, model: str) -> None:
    """Look at what takes torch to be looked at, what is quick first. ``model`` is the model file's digest. Raises
    ``UserError``."""
    from arachnec.backends.torch_distributed.checkpoints import checkpoint
    from arachnec.models.initial_weights import model_folder
    from arachnec.models.weight_files import weight_files
    from arachnec.optimizers.recipe import demand_torch_takes

    if options.checkpoint is not None and not options.resume:
        checkpoint.demand_empty(options.checkpoint)
    elif options.checkpoint is not None:
        checkpoint.demand_own(options.checkpoint, model, training.seed, training.accumulate)
    try:
        demand_torch_takes(training)
    except UserError as error:
        raise located(error, options.train) from None
    if options.init is not None:
        weight_files(model_folder(options.init))


def written(folder: Path, options: RunOptions, batches: int) -> list[str]:
    """What the run left behind, one line each; makes the pictures. A step has so many ``batches``."""
    from arachnec.backends.torch_distributed.reporting.logs import losses, validation_losses
    from arachnec.backends.torch_distributed.reporting.report import RunReport
    from arachnec.views.executable_page import PAGE
    from arachnec.views.sparse_attention import sparsity_map

    place = options.report or folder / "run.json"
    summary = msgspec.json.decode(place.read_bytes(), type=RunReport)
    lines = [
        f"report {place}",
        f"timeline of the last step, planned and measured: open {folder / PAGE} in a browser "
        "(as a drawing: measured.svg, as data: measured.json)",
    ]
    if options.save_gradients:
        lines.append(f"gradients of the last step: {options.save_gradients}")
    if options.checkpoint:
        lines.append(f"checkpoint in {options.checkpoint}")
    if any(layer.steps for layer in summary.sparse_layers):
        drawing = folder / "sparsity.svg"
        drawing.write_text(sparsity_map(summary.sparse_layers), encoding="utf-8")
        lines.append(f"sparsity of every head over steps: {drawing}")
    log = options.checkpoint or folder
    return lines + pictures(folder, losses(log, batches), validation_losses(log, batches), summary.ranks)


def pictures(folder: Path, loss: Mapping[int, float], validation: Mapping[int, float], ranks: int) -> list[str]:
    """Draw the loss of every step so far, with those before a run was resumed, and the validation loss behind those
    that have one."""
    try:
        import matplotlib
    except ImportError:
        return ["no loss curve: matplotlib is not installed (pip install matplotlib)"]
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = sorted(loss)
    axes.plot(steps, [loss[step] for step in steps], marker="." if len(steps) < 50 else "", label="training")
    if validation:
        validated = sorted(validation)
        axes.plot(validated, [validation[step] for step in validated], "s--", markersize=4, label="validation")
        axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(f"{counted(len(steps), 'step')}, the last of them on {counted(ranks, 'rank')}")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    place = folder / "loss.png"
    figure.savefig(place, dpi=120)
    pyplot.close(figure)
    return [f"loss curve{', with the validation loss' if validation else ''}: {place}"]
