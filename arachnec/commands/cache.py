"""``arachnec cache``: run a model's encoders once, beforehand, and train from what they gave."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from arachnec.ir.nodes import Cluster

PATH = click.Path(path_type=Path)


@click.command("cache")
@click.argument("model", type=PATH)
@click.option("--data", required=True, type=PATH, help="The clips: JSONL, CSV or Parquet.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Write the encoders' output and its manifest into this folder.",
)
@click.option("--cluster", help="A TOML file, or a short form such as 8:h100-80g; default: this machine.")
@click.option("--encoders", default="", help="Their names, with commas between; default: all of the model file.")
@click.option("--init", type=PATH, help="Read the encoders' weights from this folder: Diffusers'.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights without --init.")
@click.option("--batch", type=click.IntRange(min=1), help="Clips that are planned together; default: 16 a rank.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def command(
    model: Path,
    data: Path,
    output: Path,
    cluster: str | None,
    encoders: str,
    init: Path | None,
    seed: int,
    batch: int | None,
    as_json: bool,
) -> None:
    """Run the encoders of MODEL for every clip, on all ranks of this machine. Run again, it encodes what is missing."""
    from arachnec.caching.manifest import Encoding, cache, encoders_named
    from arachnec.cluster.file import parse_cluster
    from arachnec.data.manifest import read_manifest
    from arachnec.ir.diagnostic import counted
    from arachnec.models.file import load_model_file
    from arachnec.models.initial_weights import encoder_folder

    model_file, manifest = load_model_file(model), read_manifest(data)
    wanted = [name.strip() for name in encoders.split(",") if name.strip()]
    names = encoders_named(model_file, wanted, manifest.clips)
    machine = parse_cluster(cluster) if cluster is not None else _this_machine()
    encoding = Encoding(model_file, names, machine, init, seed)
    drawn = [name for name in names if init is None or not encoder_folder(init, name).is_dir()]
    if drawn:
        click.echo(
            f"note: the weights of {', '.join(drawn)} are those that encoders() makes, not read by --init", err=True
        )
    cached = cache(encoding, manifest, output, batch=batch, tell=_show)
    if as_json:
        json.dump(cached.report, sys.stdout, indent=2)
        print()
        return
    for clip, reason in cached.set_aside.items():
        click.echo(f"clip {clip} is set aside: {reason}", err=True)
    now, before = counted(cached.encoded, "clip"), cached.before
    click.echo(f"encoded {now} with {', '.join(names)} in {cached.seconds:.1f} s; {before} were there before")
    click.echo(f"wrote {cached.manifest}")


def _show(data: bytes) -> None:
    from arachnec.backends.torch_distributed.events import decode
    from arachnec.backends.torch_distributed.report import Note

    event = decode(data)
    if isinstance(event, Note):
        click.echo(event.text, err=True)


def _this_machine() -> Cluster:
    from arachnec.cluster.file import parse_cluster
    from arachnec.commands.cluster import detected

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(detected())
        file.flush()
        return parse_cluster(file.name)
