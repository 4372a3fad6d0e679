"""``arachnec manifest``: a folder of videos as a list of clips."""

from __future__ import annotations

import json
from pathlib import Path

import click

from arachnec.commands.options import columns_option

SHOWN = 20  # skipped files that are named


@click.command("manifest")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the manifest here, as JSONL.",
)
@click.option(
    "--captions",
    type=click.Path(path_type=Path),
    help="A JSONL, JSON, CSV or Parquet file of files and captions; default: a .txt file beside each video.",
)
@columns_option
def command(folder: Path, output: Path, captions: Path | None, columns: str) -> None:
    """List the videos and pictures in FOLDER, and in those in it, with their sizes, lengths and captions.

    Files that cannot be read are named and left out. A caption is the text of the .txt file of the same stem, or stands
    in the table of --captions; else it is empty.
    """
    from arachnec.commands.progress import progress_on_stderr
    from arachnec.data.folder_manifest import list_folder
    from arachnec.ir.diagnostic import counted, writing

    if output.suffix.lower() != ".jsonl":
        raise click.UsageError(f"-o {output}: the manifest is written as JSONL; give a name that ends in .jsonl")
    if columns and captions is None:
        raise click.UsageError("--columns is of the table of --captions")
    with progress_on_stderr() as reporter:
        listed = list_folder(folder, output.parent, captions, columns, reporter)
    draft = output.with_suffix(".part")
    with writing(output):
        draft.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in listed.rows), encoding="utf-8")
        draft.replace(output)
    for path, reason in list(listed.skipped.items())[:SHOWN]:
        click.echo(f"skipped {path}: {reason}", err=True)
    if len(listed.skipped) > SHOWN:
        click.echo(f"... and {len(listed.skipped) - SHOWN} more", err=True)
    notes = [f"{counted(len(listed.skipped), 'file')} skipped"] if listed.skipped else []
    notes += [f"{listed.without_caption} without a caption"] if listed.without_caption else []
    notes += [f"{counted(listed.no_file, 'caption')} of no file"] if listed.no_file else []
    stills = sum(row["frames"] == 1 for row in listed.rows)
    of = f" ({counted(stills, 'still')})" if stills else ""
    click.echo("; ".join([f"wrote {output}: {counted(len(listed.rows), 'clip')}{of}", *notes]))
