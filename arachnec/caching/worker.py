"""One rank of encoding a manifest under torchrun, on one machine or several.

torchrun --nnodes=2 --nproc-per-node=8 ... -m arachnec.caching.worker model.py --data clips.jsonl --cluster
2x8:h100-80g -o latents/

Rank 0 looks what is missing, plans, and writes the manifest; all ranks encode. The folder is one that all hosts see.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arachnec.caching.options import CacheOptions, cache_options
from arachnec.ir.diagnostic import user_error
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import joined_rank

if TYPE_CHECKING:
    from arachnec.caching.files import EncodedFiles
    from arachnec.caching.manifest import Cached, Encoding
    from arachnec.data.manifest import Manifest

    Encode = Callable[[Path, EncodedFiles], None]


@click.command()
@cache_options
@click.option("--cluster", required=True, help="A TOML file, or a short form such as 2x8:h100-80g.")
def command(options: CacheOptions, cluster: str) -> None:
    """Run the encoders of MODEL for every clip, on the ranks of torchrun. Run again, it encodes what is missing."""
    with joined_rank(options.start_timeout) as joined:
        from arachnec.caching.manifest import Encoding
        from arachnec.caching.rank import encode_batches
        from arachnec.cluster.file import parse_cluster
        from arachnec.cluster.topology import cluster_for
        from arachnec.data.manifest import read_manifest
        from arachnec.executable.folder import read_executable
        from arachnec.models.caption_tokens import CaptionCounter

        machine = cluster_for(parse_cluster(cluster), joined.world)
        device, _ = joined.meet(cpu=machine.attrs.get("device") == "cpu", planned=machine)

        def encode(plan: Path, files: EncodedFiles) -> None:
            encode_batches(read_executable(plan), files, options.init, device, joined.watchdog.enter, options.timeouts)

        if joined.rank:
            joined.watchdog.enter("the plan of rank 0")
            follow(joined.rank, options.output, encode)
            return
        manifest = read_manifest(options.data, columns=options.columns)
        encoding = Encoding.of(options, manifest.clips, machine)
        captions = CaptionCounter(encoding.model_file)
        manifest = captions.manifest(manifest)
        for note in (*manifest.notes, *captions.notes, *encoding.notes):
            print(note, file=sys.stderr, flush=True)
        cached = lead(encoding, manifest, options.output, options.batch, encode)
        report = (
            json.dumps(cached.report, indent=2)
            if options.as_json
            else "\n".join([*cached.warnings, *cached.lines(encoding)])
        )
        print(report, flush=True)


def lead(encoding: Encoding, manifest: Manifest, output: Path, batch: int | None, encode: Encode) -> Cached:
    """Rank 0: what ``cache`` does, with every rank of the process group. Collective, as ``follow`` on the others."""
    from arachnec.caching.manifest import cache
    from arachnec.runtime.agreement import share_text

    told = []

    def run(encoding: Encoding, files: EncodedFiles, plan: Path) -> None:
        told.append(share_text(files.identity))
        encode(plan, files)

    cached = cache(encoding, manifest, output, batch=batch, run=run)
    if not told:
        share_text("")  # nothing was missing
    return cached


def follow(rank: int, output: Path, encode: Encode) -> None:
    """Encode by the plan that rank 0 has written, if it has. Raises ``UserError`` where this host does not see it."""
    from arachnec.caching.files import EncodedFiles
    from arachnec.caching.manifest import PLAN
    from arachnec.executable.folder import HEADER, read_executable
    from arachnec.runtime.agreement import share_text

    identity = share_text(None)
    if not identity:
        return
    if not (output / PLAN / HEADER).is_file():
        raise user_error(
            f"rank {rank} does not see in {output} what rank 0 wrote there",
            help="give -o a folder on a file system that all hosts share, where training can read it, too",
        )
    names = tuple(stage.name for stage in read_executable(output / PLAN).traced.stages)
    encode(output / PLAN, EncodedFiles(output, identity, names))


if __name__ == "__main__":
    exit_with(lambda: command.main(standalone_mode=False))
