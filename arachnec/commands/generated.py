"""Requests on ranks of this machine, and what a person is told of them: ``arachnec generate`` and ``arachnec run``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arachnec.ir.diagnostic import counted

if TYPE_CHECKING:
    from arachnec.generation.run import Generation


def generate_here(
    generation: Generation,
    as_json: bool = False,
    report_file: Path | None = None,
    stall_timeout: float | None = None,
) -> None:
    """Run what is left, and print a line a request, or the report as JSON; ``report_file`` has it too."""
    from arachnec.generation.run import run_here
    from arachnec.launch.local_ranks import RankCrashed

    try:
        report = run_here(generation, stall_timeout)
    except RankCrashed as crash:
        # The launcher's own traceback would only hide the rank's.
        print(crash, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("what is finished stays; the same command does the requests that are not", err=True)
        raise
    if report_file is not None:
        report_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return
    for row in report["requests"]:
        where = row.get("video") or row["latents"]
        switched = "" if row["switched"] is None or len(report["models"]) == 1 else f", {row['switched']} by the first"
        ended = "finished before" if row["earlier"] else f"after {row['seconds']:.1f} s"
        click.echo(f"{row['id']}: {counted(row['steps'], 'step')}{switched}, {ended}: {where}")
    requests = counted(len(report["requests"]), "request")
    click.echo(f"{requests}, {report['seconds']:.1f} s on {counted(report['ranks'], 'rank')}")
