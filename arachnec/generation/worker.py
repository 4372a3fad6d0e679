"""One rank of a run of requests: ``python -m arachnec.generation.worker OUT``, started by ``arachnec generate``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from arachnec.generation.results import Outcome, Results
from arachnec.generation.settings import PLAN, PROGRAM, read_settings
from arachnec.launch.ranks import exit_with, joined_rank


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
def command(out: Path) -> None:
    """Run this rank's part of the program in OUT. Rank and world size come from torchrun's environment."""
    with joined_rank() as joined:
        from arachnec.data.switch import parse_switch
        from arachnec.generation.rank import GenerationRank
        from arachnec.ir.parser import parse_file
        from arachnec.models.sampler_file import load_sampler_file
        from arachnec.sampling.loop import Sampling

        settings, requests = read_settings(out)
        module = parse_file(out / PLAN / PROGRAM)
        device, _ = joined.agree_on_devices(cpu=settings.cpu, planned=module.cluster)
        joined.make_process_group(device)
        joined.watchdog.enter("set-up")
        sampler = load_sampler_file(settings.sampler)
        sampling = Sampling(sampler, settings.models, parse_switch(settings.switch), settings.restart)
        results = Results(out, settings, sampler.digest)
        folder = out / PLAN / "outcomes"
        folder.mkdir(exist_ok=True)

        def tell(outcome: Outcome) -> None:
            (folder / f"{outcome.id}.json").write_bytes(msgspec.json.encode(outcome))

        rank = GenerationRank(joined.rank, sampling, module, requests, results, device, tell)
        rank.connect()
        joined.watchdog.enter("work")
        rank.run()


if __name__ == "__main__":
    exit_with(lambda: command.main(standalone_mode=False))
