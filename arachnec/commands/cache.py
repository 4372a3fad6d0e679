"""``arachnec cache``: run a model's encoders once, beforehand, and train from what they gave."""

from __future__ import annotations

import click

from arachnec.caching.options import CacheOptions, cache_options
from arachnec.commands.options import cluster_option, demand_inputs, print_json


@click.command("cache")
@cache_options
@cluster_option("This machine", default="auto")
def command(options: CacheOptions, cluster: str) -> None:
    """Run the encoders of MODEL for every clip, on all ranks of this machine. Run again, it encodes what is missing."""
    from arachnec.cluster.file import parse_cluster
    from arachnec.data.manifest import read_manifest

    demand_inputs(options.model, init=options.init)
    manifest = read_manifest(options.data, columns=options.columns)
    machine = parse_cluster(cluster)
    from arachnec.caching.manifest import Encoding, cache, on_this_machine
    from arachnec.models.caption_tokens import CaptionCounter

    encoding = Encoding.of(options, manifest.clips, machine)
    captions = CaptionCounter(encoding.model_file)
    manifest = captions.manifest(manifest)
    for note in (*manifest.notes, *captions.notes, *encoding.notes):
        click.echo(note, err=True)
    cached = cache(
        encoding, manifest, options.output, batch=options.batch, run=on_this_machine(_show, options.timeouts)
    )
    if options.as_json:
        print_json(cached.report)
        return
    for line in cached.warnings:
        click.echo(line, err=True)
    for line in cached.lines(encoding):
        click.echo(line)


def _show(data: bytes) -> None:
    from arachnec.backends.torch_distributed.reporting.events import decode
    from arachnec.backends.torch_distributed.reporting.report import Note

    event = decode(data)
    if isinstance(event, Note):
        click.echo(event.text, err=True)
