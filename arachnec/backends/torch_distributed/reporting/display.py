"""A run on the screen: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from arachnec.backends.torch_distributed.reporting.events import decode, line
from arachnec.backends.torch_distributed.reporting.report import Event, Note, Start, StepReport

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
