"""One rank of ``arachnec cache``: ``python -m arachnec.caching.plan_worker PLAN OUTPUT``, started by it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from arachnec.launch.ending import exit_with
from arachnec.launch.phases import Timeouts
from arachnec.launch.ranks import joined_rank

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("plan", type=FOLDER)
@click.argument("output", type=FOLDER)
@click.option("--identity", required=True)
@click.option("--init", type=FOLDER)
@click.option("--timeouts", "given", required=True, help="As JSON.")
def command(plan: Path, output: Path, identity: str, init: Path | None, given: str) -> None:
    """Run this rank's part of PLAN, and write into OUTPUT."""
    timeouts = msgspec.json.decode(given, type=Timeouts)
    with joined_rank(timeouts.start) as joined:
        from arachnec.backends.torch_distributed.plans.step_plans import planned_for_cpu
        from arachnec.caching.files import EncodedFiles
        from arachnec.caching.rank import encode_batches
        from arachnec.executable.folder import read_executable

        executable = read_executable(plan)
        device, _ = joined.meet(cpu=planned_for_cpu(executable), planned=executable.program.cluster)
        files = EncodedFiles(output, identity, tuple(stage.name for stage in executable.traced.stages))
        encode_batches(executable, files, init, device, joined.watchdog.enter, timeouts)


if __name__ == "__main__":
    exit_with(lambda: command.main(standalone_mode=False))
